"""Samples in a fixed pseudo-random order: row i is the same row at any batch split, on any number of ranks, and after a resume.

Documents are cut into *pieces* of at most `length` tokens; a piece that continues a document begins with the last token of the
piece before it, as context. The pieces, in a fresh pseudo-random order each epoch, form one endless stream, and row i is the
`length` tokens of it from position i * (length - 1) on: neighbouring rows share one token, which the later row does not count.
So every token but the first of a document is a target exactly once an epoch, wherever the cuts fall, and nothing is padded.
A piece cut by the end of a row goes on in the next row, from its shared token, as a document of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from atoll.data.documents import TokenSet

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Rows end to end.

    input_ids int64 [1, N]; labels int64 [1, N], unshifted, -100 at the first token of every segment; cu_seqlens int64 [S+1],
    segment bounds from 0 to N; num_bytes: bytes of text behind the counted targets.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    num_bytes: int


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """A pseudo-random order of range(size), int64, from (seed, epoch) alone.

    Sorted by a 64-bit mixing function (splitmix64's finaliser) rather than drawn from numpy's generator, whose stream may change
    between versions.
    """
    with np.errstate(over="ignore"):
        start = _mix(np.asarray([seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        base = _mix(start[:1] + np.uint64(31) * start[1:])
        keys = _mix(base + np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return np.argsort(keys, kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Sampler:
    """Endless rows of `length` tokens by global index; see the module's head for the order."""

    def __init__(self, token_set: TokenSet, length: int, seed: int) -> None:
        """`length` at least 2. Holds three int64 arrays over the pieces, and two more for each of the last two epochs used."""
        if length < 2:
            raise ValueError(f"length = {length}: a row needs a token and one before it")
        self.token_set, self.length, self.seed = token_set, length, seed
        sizes = np.diff(token_set.offsets)
        count = np.maximum(1, -(-(sizes - 1) // (length - 1)))
        first = np.concatenate([[0], np.cumsum(count)[:-1]])
        inner = (np.arange(int(count.sum())) - np.repeat(first, count)) * (length - 1)
        self._starts = np.repeat(token_set.offsets[:-1], count) + inner
        self._sizes = np.minimum(length, np.repeat(sizes, count) - inner)
        self.epoch_tokens = int(self._sizes.sum())
        if not self.epoch_tokens:
            raise ValueError("a sampler needs at least one document")
        self._epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    @property
    def epoch_rows(self) -> float:
        """Rows after which every token has been a target once."""
        return self.epoch_tokens / (self.length - 1)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Row `index` (0 or more): ids int64 [length], and the positions in it where a segment starts (0 is always one)."""
        if index < 0:
            raise IndexError(f"sample index {index}: 0 or more is expected")
        ids, starts = np.empty(self.length, dtype=np.int64), []
        epoch, offset = divmod(index * (self.length - 1), self.epoch_tokens)
        at = 0
        while at < self.length:
            order, ends = self._epoch(epoch)
            rank = int(np.searchsorted(ends, offset, side="right"))
            while at < self.length and rank < len(order):
                piece = order[rank]
                skip = offset - int(ends[rank] - self._sizes[piece])  # above 0 only where the row cuts into a piece
                take = min(self.length - at, int(self._sizes[piece]) - skip)
                begin = int(self._starts[piece]) + skip
                ids[at : at + take] = self.token_set.tokens[begin : begin + take]
                starts.append(at)
                at, offset, rank = at + take, offset + take, rank + 1
            epoch, offset = epoch + 1, 0
        return ids, np.asarray(starts, dtype=np.int64)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Order of the pieces in an epoch, and where each ends in the stream."""
        if epoch not in self._epochs:
            order = permutation(len(self._sizes), self.seed, epoch)
            self._epochs[epoch] = order, np.cumsum(self._sizes[order])
            while len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]


def make_batch(sampler: Sampler, start: int, count: int) -> Batch:
    """The `count` rows of global indices start … start + count - 1 as one packed batch of [1, count * length]."""
    rows = [sampler[i] for i in range(start, start + count)]
    ids = np.concatenate([row for row, _ in rows])
    starts = np.concatenate([at + i * sampler.length for i, (_, at) in enumerate(rows)])
    labels = ids.copy()
    labels[starts] = IGNORED
    num_bytes = int(sampler.token_set.token_bytes[labels[labels != IGNORED]].sum())
    bounds = np.append(starts, len(ids))
    return Batch(torch.from_numpy(ids)[None], torch.from_numpy(labels)[None], torch.from_numpy(bounds), num_bytes)
