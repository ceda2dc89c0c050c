"""Samples in a fixed pseudo-random order: row i is the same row at any batch split, on any number of ranks, and after a resume.

Documents are cut into *pieces* of at most `length` tokens; a piece that continues a document begins with the last token of the
piece before it, as context. A piece of exactly `length` tokens is a row of its own, so that long texts are learnt with whole
contexts. The shorter ones, in a fresh pseudo-random order each time round, form one endless stream, cut every length - 1 tokens:
neighbouring rows of the stream share one token, which the later row does not count, and a piece cut by the end of a row goes on in
the next from that token. Each epoch shuffles all its rows. So every token but the first of a document is a target exactly once
each time round, and nothing is padded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from atoll.data.documents import TokenSet
from atoll.data.images.picture import Picture, stack

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Rows end to end.

    input_ids int64 [1, N]; labels int64 [1, N], unshifted, -100 at the first token of every segment; cu_seqlens int64 [S+1],
    segment bounds from 0 to N; num_bytes: bytes of text behind the counted targets. Of rows with pictures also `pixel_values` float32
    [patches, 3, p, p] and `grid_thws` int64 [pictures, 3].
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    num_bytes: int
    pixel_values: torch.Tensor | None = None
    grid_thws: torch.Tensor | None = None


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """A pseudo-random order of range(size), int64, from (seed, epoch) alone.

    Sorted by a 64-bit mixing function (splitmix64's finaliser) rather than drawn from numpy's generator, whose stream may change
    between versions.
    """
    with np.errstate(over="ignore"):
        start = mix(np.asarray([seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        base = mix(start[:1] + np.uint64(31) * start[1:])
        keys = mix(base + np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return np.argsort(keys, kind="stable")


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Rows(Protocol):
    """What `make_batch` reads: endless rows of `length` tokens by global index."""

    token_set: TokenSet
    length: int

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [length] of row `index`, and where in it a segment starts."""
        ...

    def trained(self, index: int) -> np.ndarray | None:
        """Which tokens of row `index` may be targets, bool [length]; None is all of them."""
        ...

    @property
    def epoch_rows(self) -> float:
        """Rows after which every token has been read once."""
        ...


@runtime_checkable
class Pictured(Protocol):
    """Rows in which pictures stand among text."""

    def pictures(self, index: int) -> list[Picture]:
        """The pictures of row `index`, in the order of their placeholders."""
        ...

    def cost(self, index: int) -> float:
        """What row `index` costs, in tokens of text."""
        ...


class Sampler:
    """Endless rows of `length` tokens by global index; see the module's head for the order."""

    def __init__(self, token_set: TokenSet, length: int, seed: int) -> None:
        """`length` at least 2. Holds two int64 arrays over the pieces, and two more for each of the last few epochs used."""
        if length < 2:
            raise ValueError(f"length = {length}: a row needs a token and one before it")
        if not len(token_set):
            raise ValueError("a sampler needs at least one document")
        self.token_set, self.length, self.seed, self._step = token_set, length, seed, length - 1
        starts, sizes = self._pieces()
        self._full = starts[sizes == length]
        self._starts, self._sizes = starts[sizes < length], sizes[sizes < length]
        self._short = int(self._sizes.sum())  # tokens of the stream, once round
        self._period = len(self._full) * self._step + self._short  # so many rows are `length - 1` epochs
        self._orders: OrderedDict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def _pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each piece starts in the flat tokens, and its size: int64, in the order of the documents."""
        offsets = self.token_set.offsets
        sizes = np.diff(offsets)
        count = -(-(sizes - 1) // self._step)
        first = np.repeat(np.cumsum(count) - count, count)
        inner = (np.arange(len(first)) - first) * self._step
        return np.repeat(offsets[:-1], count) + inner, np.minimum(self.length, np.repeat(sizes, count) - inner)

    def trained(self, index: int) -> np.ndarray | None:
        """Which tokens of row `index` may be targets, bool [length]; None is all of them."""
        return None

    @property
    def epoch_rows(self) -> float:
        """Rows after which every token has been a target once, on average over the epochs."""
        return self._period / self._step

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Row `index` (0 or more): ids int64 [length], and the positions in it where a segment starts (0 is always one)."""
        if index < 0:
            raise IndexError(f"sample index {index}: 0 or more is expected")
        epoch = ((index + 1) * self._step - 1) // self._period  # the last whose first row, epoch * period // step, is not past `index`
        first, stop = (e * self._period // self._step for e in (epoch, epoch + 1))
        slot = int(self._order("row", epoch, stop - first)[0][index - first])
        if slot < len(self._full):
            begin = int(self._full[slot])
            return self.token_set.tokens[begin : begin + self.length].astype(np.int64), np.zeros(1, dtype=np.int64)
        return self._from_stream(epoch * self._short // self._step + slot - len(self._full))

    def _from_stream(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Row `row` of the endless stream of short pieces."""
        ids, starts = np.empty(self.length, dtype=np.int64), []
        turn, offset = divmod(row * self._step, self._short)
        at = 0
        while at < self.length:
            order, ends = self._order("piece", turn, len(self._sizes))
            rank = int(np.searchsorted(ends, offset, side="right"))
            while at < self.length and rank < len(order):
                piece = order[rank]
                skip = offset - int(ends[rank] - self._sizes[piece])  # above 0 only where the row cuts into a piece
                take = min(self.length - at, int(self._sizes[piece]) - skip)
                begin = int(self._starts[piece]) + skip
                ids[at : at + take] = self.token_set.tokens[begin : begin + take]
                starts.append(at)
                at, offset, rank = at + take, offset + take, rank + 1
            turn, offset = turn + 1, 0
        return ids, np.asarray(starts, dtype=np.int64)

    def _order(self, kind: str, epoch: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The shuffled rows of an epoch, or pieces of a turn of the stream, and (of pieces) where each ends in the stream."""
        key = kind, epoch
        if key not in self._orders:
            order = permutation(size, self.seed, 2 * epoch + (kind == "piece"))
            self._orders[key] = order, np.cumsum(self._sizes[order]) if kind == "piece" else order
            while len(self._orders) > 4:
                self._orders.popitem(last=False)
        return self._orders[key]


def make_batch(sampler: Rows, start: int, count: int) -> Batch:
    """The `count` rows of global indices start … start + count - 1 as one packed batch of [1, count * length]."""
    return batch_of(sampler, range(start, start + count))


def batch_of(sampler: Rows, indices: Sequence[int]) -> Batch:
    """The rows of these global indices as one packed batch of [1, rows * length], their pictures with them."""
    rows = [sampler[i] for i in indices]
    ids = np.concatenate([row for row, _ in rows])
    starts = np.concatenate([at + i * sampler.length for i, (_, at) in enumerate(rows)])
    labels = ids.copy()
    labels[starts] = IGNORED
    masks = [sampler.trained(i) for i in indices]
    if masks and masks[0] is not None:
        labels[~np.concatenate([m for m in masks if m is not None])] = IGNORED
    num_bytes = int(sampler.token_set.token_bytes[labels[labels != IGNORED]].sum())
    bounds = np.append(starts, len(ids))
    shown = [p for i in indices for p in sampler.pictures(i)] if isinstance(sampler, Pictured) else []
    pixels = stack(shown) if shown else ()
    return Batch(torch.from_numpy(ids)[None], torch.from_numpy(labels)[None], torch.from_numpy(bounds), num_bytes, *pixels)
