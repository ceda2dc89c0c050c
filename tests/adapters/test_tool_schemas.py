"""Declarations of tools equal those that transformers makes of the same functions: what TRL tells its models."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from atoll.rl.tools import declaration


def simple(words: str, most: int = 10, exact: bool = False, weight: float = 1.0):
    """Look for words.

    Args:
        words: What to look for.
        most: How many, at most.
        exact: Whether case counts.
        weight: Of the words.
    """


def nested(names: list[str], table: dict[str, float], rest: dict, several: list):
    """Take much.

    Args:
        names: Some names.
        table: A number each.
        rest: Anything.
        several: More.
    """


def several(note: str | None, amount: int | float, value: Any):
    """Take one of several.

    Args:
        note: It may be missing.
        amount: A number.
        value: Anything.
    """


def chosen(order: Literal["price", "name"], level: Literal[1, 2, 3] = 1):
    """Choose.

    Args:
        order: By what.
        level: How far.
    """


@pytest.mark.parametrize("function", [simple, nested, several, chosen])
def test_as_transformers_makes_them(function):
    assert declaration(function) == get_json_schema(function)
