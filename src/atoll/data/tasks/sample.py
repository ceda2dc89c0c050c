"""What a task is made of: pseudo-random draws that any machine repeats, a small vocabulary, and samples with marked answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from atoll.config import UserError
from atoll.data.loader import mix

MARKERS, SYMBOLS, LEAST = 8, 128, 24  # ids of a raw task: its signs, its symbols, and the fewest symbols that do
STEP = np.uint64(0x9E3779B97F4A7C15)


class Draw:
    """Pseudo-random numbers from a key alone (splitmix64), so that numpy's version changes nothing: `Draw(seed, index, ...)`."""

    def __init__(self, *key: int) -> None:
        self._state = np.zeros(1, dtype=np.uint64)
        for part in key:
            self._next(part & 0xFFFFFFFFFFFFFFFF)

    def _next(self, add: int = 0) -> np.uint64:
        with np.errstate(over="ignore"):
            self._state = mix(self._state * np.uint64(31) + np.uint64(add) + STEP)
        return self._state[0]

    def integers(self, high: int, size: int) -> np.ndarray:
        """`size` numbers of 0 … high - 1, int64."""
        base = self._next()
        with np.errstate(over="ignore"):
            keys = mix(base + np.arange(1, size + 1, dtype=np.uint64) * STEP)
        return (keys % np.uint64(high)).astype(np.int64)

    def integer(self, high: int) -> int:
        """One number of 0 … high - 1."""
        return int(self._next() % np.uint64(high))

    def order(self, size: int) -> np.ndarray:
        """A permutation of range(size), int64."""
        return np.argsort(self.integers(1 << 62, size), kind="stable")


@dataclass(frozen=True)
class Vocabulary:
    """Ids that raw tasks are written in: `markers` [8], `symbols` [24 to 128], both ordinary tokens of the model; and bos."""

    bos: int
    markers: np.ndarray
    symbols: np.ndarray

    @classmethod
    def of(cls, token_bytes: np.ndarray, bos: int) -> Vocabulary:
        """The first ordinary ids, those with bytes behind them: in a byte-level vocabulary the bytes. Raises `UserError` for too few."""
        ordinary = np.flatnonzero(token_bytes)[: MARKERS + SYMBOLS].astype(np.int64)
        if len(ordinary) < MARKERS + LEAST:
            raise UserError(f"model.vocab_size: {len(ordinary)} ordinary tokens; tasks need at least {MARKERS + LEAST}, so raise it")
        return cls(bos, ordinary[:MARKERS], ordinary[MARKERS:])

    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """Two sets of symbols without a common one: keys, values."""
        middle = len(self.symbols) // 2
        return self.symbols[:middle], self.symbols[middle : 2 * middle]


@dataclass(frozen=True)
class Question:
    """ids[start:stop] are one answer. `chance`: probability that a blind guess among the task's answers is all right."""

    start: int
    stop: int
    chance: float


@dataclass(frozen=True)
class Sample:
    """A prompt and its answers: ids int64 [T] from bos on; every question's answer stands in them.

    `depth`: tokens of the haystack before the (first) needle over all of the haystack's; None where the evidence is everywhere.
    `truncated`: the prompt had to be cut at its front to keep to the length that was asked for.
    """

    ids: np.ndarray
    questions: tuple[Question, ...]
    depth: float | None = None
    truncated: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens read before the last answer."""
        return self.questions[-1].start

    def answers(self) -> np.ndarray:
        """Which tokens are answers, bool [T]."""
        mask = np.zeros(len(self.ids), dtype=bool)
        for q in self.questions:
            mask[q.start : q.stop] = True
        return mask


@dataclass
class Writer:
    """A sample as it is put together, piece by piece."""

    parts: list[np.ndarray] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    length: int = 0

    def add(self, ids: Sequence[int] | np.ndarray) -> Writer:
        """Tokens that are read."""
        self.parts.append(np.asarray(ids, dtype=np.int64))
        self.length += len(ids)
        return self

    def ask(self, ids: Sequence[int] | np.ndarray, chance: float) -> Writer:
        """Tokens that are an answer."""
        self.questions.append(Question(self.length, self.length + len(ids), chance))
        return self.add(ids)

    def sample(self, length: int, depth: float | None = None) -> Sample:
        """What was written, cut at its front, behind bos, where it is longer than `length`. Raises `ValueError` if an answer would go."""
        ids = np.concatenate(self.parts)
        over = max(0, len(ids) - length)
        if not over:
            return Sample(ids, tuple(self.questions), depth)
        kept = tuple(Question(q.start - over, q.stop - over, q.chance) for q in self.questions)
        if kept[0].start < 2:
            raise ValueError(f"length = {length}: the question and its answer alone take more; raise it")
        return Sample(np.concatenate([ids[:1], ids[1 + over :]]), kept, depth, truncated=True)
