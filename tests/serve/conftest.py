"""One server with a tiny random model for all tests that only ask it something."""

from __future__ import annotations

import openai
import pytest
from serving import served


@pytest.fixture(scope="module")
def server():
    with served() as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
