"""Generated tasks with one right answer, to train on and to measure with: `Tasks(...).make(name, draw, length, depth)`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from atoll.config import UserError
from atoll.data.tasks import needles, recall, state
from atoll.data.tasks.forms import Haystack, RawForm, TextForm
from atoll.data.tasks.sample import Draw, Sample, Vocabulary

__all__ = ["DEEP", "FORMED", "LEAST", "NAMES", "RAW", "SUITES", "Draw", "Sample", "Tasks", "check"]

RAW: dict[str, Callable[..., Sample]] = {
    **{f.__name__: f for f in (recall.mqar, recall.palindrome, recall.stack, recall.copy)},
    **{f.__name__: f for f in (state.parity, state.modular, state.s3, state.s5)},
}
DEEP = {f.__name__: f for f in (needles.needle_single, needles.needle_multi, needles.needle_values, needles.variables)}
LISTS = {f.__name__: f for f in (needles.common_words, needles.frequent_words)}
FORMED = (*DEEP, *LISTS)  # these come in two forms, text and raw tokens: NAME and NAME:raw
SUITES = {
    "recall": ("mqar", "palindrome", "stack", "copy"),
    "state": ("parity", "modular", "s3", "s5"),
    "needle": ("needle_single", "needle_multi", "needle_values"),
    "ruler": FORMED,
}
NAMES = (*RAW, *FORMED, *(f"{name}:raw" for name in FORMED))
LEAST = 16  # tokens of the shortest raw sample


def check(setting: str, names: tuple[str, ...]) -> None:
    """Refuse a name that is no task's, with the nearest."""
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            raise UserError(
                f"{setting} = {name!r}: no such task; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(NAMES)}")
            )


class Tasks:
    """All tasks over one `atoll.data.Tokenizer` and a model's bos; needles lie in `text`, a `TokenSet`, or where it is None in noise."""

    def __init__(self, tokenizer: Any, bos: int, text: Any = None) -> None:
        self.bos, self.vocabulary = bos, Vocabulary.of(tokenizer.bytes_table, bos)
        raw, english = RawForm(self.vocabulary), TextForm(tokenizer.encode)
        self.haystacks = {"raw": Haystack(raw, text), "text": Haystack(english, text)}

    def make(self, name: str, draw: Draw, length: int, depth: float = 0.5) -> Sample:
        """A sample of the task `name` (of `NAMES`) of at most `length` tokens, its needle at `depth`, 0 to 1, where it has one.

        Raises `UserError` where `length` cannot hold the question.
        """
        task, _, form = name.partition(":")
        try:
            if task in RAW:
                return RAW[task](draw, self.vocabulary, length)
            hay = self.haystacks[form or "text"]
            return DEEP[task](draw, hay, self.bos, length, depth) if task in DEEP else LISTS[task](draw, hay, self.bos, length)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
