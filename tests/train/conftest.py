"""Fixtures of the training tests."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import standin


@pytest.fixture
def standin_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`atoll.model.Model` is the stand-in for the length of a test."""
    monkeypatch.setitem(sys.modules, "atoll.model", SimpleNamespace(Model=standin.Model))
