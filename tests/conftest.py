"""What every room's tests share: one CPU thread, no cache or settings of the machine's owner."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tests run side by side; more threads than cores slow all of them down."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp() / "home"))
