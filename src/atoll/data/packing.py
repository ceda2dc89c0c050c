"""Whole conversations in rows of one length, packed tightly, in a fixed pseudo-random order.

A conversation is never cut in two, since an answer without its question teaches nothing: one that is longer than a row ends after
the last assistant's message that fits, and is left out where none does. Which conversations share a row is settled once, by best
fit; each epoch shuffles the rows. What is left of a row is padding, a segment of its own that nothing counts.
"""

from __future__ import annotations

import bisect

import numpy as np

from atoll.config import UserError
from atoll.data.documents import TokenSet
from atoll.data.loader import Rows, Sampler, permutation
from atoll.data.synthetic import TaskSampler


def open_sampler(token_set: TokenSet, length: int, seed: int) -> Rows:
    """The sampler for documents, for conversations, for generated tasks, or for documents with pictures."""
    if token_set.tasks is not None:
        return TaskSampler(token_set, length, seed)
    if token_set.pictures is not None:
        return token_set.pictures.rows(token_set, length, seed)
    return Sampler(token_set, length, seed) if token_set.trained is None else ConversationSampler(token_set, length, seed)


class ConversationSampler:
    """Endless rows of `length` tokens by global index."""

    def __init__(self, token_set: TokenSet, length: int, seed: int) -> None:
        """Raises `UserError` when no conversation has an assistant's message within `length` tokens."""
        assert token_set.trained is not None
        self.token_set, self.length, self.seed = token_set, length, seed
        self._trained = token_set.trained
        whole = np.diff(token_set.offsets)
        self._sizes = np.asarray([self._fitting(i) if size > length else size for i, size in enumerate(whole.tolist())], dtype=np.int64)
        self.cut = int(((self._sizes < whole) & (self._sizes > 0)).sum())  # conversations that end early
        self.dropped = int((self._sizes == 0).sum())  # conversations left out
        kept = np.flatnonzero(self._sizes)
        if not len(kept):
            raise UserError(f"stages: length = {length}: no conversation has an assistant's message within so many tokens; raise it")
        self._rows = [kept[row] for row in pack(self._sizes[kept], length)]
        self._orders: dict[int, np.ndarray] = {}

    def _fitting(self, index: int) -> int:
        """Tokens of a conversation up to the end of its last assistant's message within `length`; 0 when there is none."""
        begin = int(self.token_set.offsets[index])
        span = slice(begin, begin + self.length)
        ends = np.flatnonzero((self.token_set.tokens[span] == self.token_set.end_of_msg) & self._trained[span])
        return int(ends[-1]) + 1 if len(ends) else 0

    @property
    def epoch_rows(self) -> float:
        """Rows in which every conversation stands once."""
        return len(self._rows)

    @property
    def note(self) -> str:
        """One line on what the rows hold."""
        filled = int(self._sizes.sum()) / (len(self._rows) * self.length)
        lost = f"{self.cut:,} cut after an earlier message, {self.dropped:,} left out" if self.cut or self.dropped else "none"
        return f"{len(self._rows):,} rows of {self.length:,} tokens, {filled:.0%} filled; conversations longer than a row: {lost}"

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Row `index` (0 or more): ids int64 [length], padded, and the positions in it where a segment starts."""
        spans = self._spans(index)
        ids = np.full(self.length, self.token_set.pad, dtype=np.int64)
        for at, span in spans:
            ids[at : at + span.stop - span.start] = self.token_set.tokens[span]
        end = spans[-1][0] + spans[-1][1].stop - spans[-1][1].start
        starts = [at for at, _ in spans] + ([end] if end < self.length else [])
        return ids, np.asarray(starts, dtype=np.int64)

    def trained(self, index: int) -> np.ndarray:
        """Which tokens of row `index` are an assistant's, bool [length]."""
        mask = np.zeros(self.length, dtype=bool)
        for at, span in self._spans(index):
            mask[at : at + span.stop - span.start] = self._trained[span]
        return mask

    def _spans(self, index: int) -> list[tuple[int, slice]]:
        """Where in row `index` each of its conversations begins, and where it stands in the flat tokens."""
        if index < 0:
            raise IndexError(f"sample index {index}: 0 or more is expected")
        epoch, slot = divmod(index, len(self._rows))
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = permutation(len(self._rows), self.seed, epoch)
        spans, at = [], 0
        for conversation in self._rows[self._orders[epoch][slot]].tolist():
            begin, size = int(self.token_set.offsets[conversation]), int(self._sizes[conversation])
            spans.append((at, slice(begin, begin + size)))
            at += size
        return spans


def pack(sizes: np.ndarray, length: int) -> list[np.ndarray]:
    """Indices of `sizes` (1 to `length`) in rows whose sums are at most `length`: best fit, longest first."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room left → rows
    rooms: list[int] = []  # its keys, ascending
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        at = bisect.bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(index)
        if left := room - size:
            if left not in by_room:
                bisect.insort(rooms, left)
            by_room.setdefault(left, []).append(row)
    return [np.asarray(row, dtype=np.int64) for row in rows]
