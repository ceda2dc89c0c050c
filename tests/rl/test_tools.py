"""What a model is told of an environment's methods, and what is refused."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from atoll.config import UserError
from atoll.data.chat import render
from atoll.rl.tools import declaration, declarations, schema_of, tools_of


class Shop:
    """An environment as TRL takes it."""

    def __init__(self) -> None:
        self.basket: list[str] = []

    def reset(self, **row: Any) -> str | None:
        self.basket = []
        return "Welcome."

    def get_reward(self) -> float:
        return float(len(self.basket))

    def search(self, words: str, most: int = 10, order: Literal["price", "name"] = "name") -> str:
        """Find goods by words.

        The words are matched anywhere,
        in any case.

        Args:
            words: What to look for.
            most: How many to list, at most:
                more are cut off.
            order: By what they are sorted.

        Returns:
            A list, a line each.
        """
        return ""

    def buy(self, goods: list[str], note: str | None = None, paid: int | float = 0) -> bool:
        """Put goods into the basket.

        Args:
            goods (list): Their names.
            note: For the seller.
            paid: Money.
        """
        self.basket += goods
        return True

    def _secret(self) -> None:
        """Not a tool."""


class Sale(Shop):
    def bargain(self, offers: dict[str, float]) -> str:
        """Offer prices.

        Args:
            offers: A price for each name.
        """
        return ""


def test_public_methods_are_tools_in_order_also_inherited_ones():
    assert list(tools_of(Shop)) == ["search", "buy"]
    assert list(tools_of(Sale())) == ["search", "buy", "bargain"]


def test_a_declaration_says_name_purpose_and_arguments():
    search, buy = (d["function"] for d in declarations(Shop()))
    assert search == {
        "name": "search",
        "description": "Find goods by words. The words are matched anywhere, in any case.",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "string", "description": "What to look for."},
                "most": {"type": "integer", "description": "How many to list, at most: more are cut off."},
                "order": {"type": "string", "enum": ["price", "name"], "description": "By what they are sorted."},
            },
            "required": ["words"],
        },
    }
    assert buy["parameters"]["properties"] == {
        "goods": {"type": "array", "items": {"type": "string"}, "description": "Their names."},
        "note": {"type": "string", "nullable": True, "description": "For the seller."},
        "paid": {"type": ["integer", "number"], "description": "Money."},
    }


def test_declarations_are_json_that_the_chat_format_renders():
    made = declarations(Sale)
    assert json.loads(json.dumps(made)) == made
    text = "".join(str(part) for part in render([{"role": "user", "content": "hi"}], made))
    assert "bargain" in text


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (Any, {}),
        (list, {"type": "array"}),
        (dict[str, list[int]], {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Literal["a", 1], {"type": ["integer", "string"], "enum": ["a", 1]}),
        (list[str] | int, {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "integer"}]}),
    ],
)
def test_types(hint, schema):
    assert schema_of(hint) == schema


def no_doc(x: int): ...
def no_type(x):
    """Do.

    Args:
        x: It.
    """


def untold(x: int):
    """Do."""


def catches(*rest: int):
    """Do.

    Args:
        rest: All.
    """


def foreign(x: complex):
    """Do.

    Args:
        x: It.
    """


def unknown(x: Nothing):  # noqa: F821
    """Do.

    Args:
        x: It.
    """


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_doc, "tool no_doc: has no docstring"),
        (no_type, "tool no_type: x has no type"),
        (untold, "tool untold: x is not described"),
        (catches, "tool catches: \\*rest catches any number"),
        (foreign, "tool foreign: x has the type <class 'complex'>, which JSON has not"),
        (unknown, "tool unknown: its types cannot be read"),
    ],
)
def test_what_cannot_be_declared_is_said_in_one_line(function, says):
    with pytest.raises(UserError, match=says) as found:
        declaration(function)
    assert "\n" not in str(found.value)
