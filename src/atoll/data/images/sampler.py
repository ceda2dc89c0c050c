"""Rows of text and pictures by global sample index: row i is the same row, pictures and all, at any split and after a resume."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from atoll.config import ModelConfig, UserError
from atoll.data.documents import TokenSet
from atoll.data.images.picture import Picture
from atoll.data.images.samples import Sample, pieces
from atoll.data.loader import permutation
from atoll.data.packing import pack

KEPT = 64  # rows remembered: a batch asks for each more than once
EPOCH = 1024  # rows that are called an epoch where there is no end
PATCH_COST = 0.1  # of a text token's: the tower's time for a patch, forward and backward, at `tiny-vl`'s sizes on a CPU


class PictureRows:
    """Endless rows of `length` tokens, each made of whole `Sample`s; `_samples` says which."""

    def __init__(self, token_set: TokenSet, length: int) -> None:
        self.token_set, self.length = token_set, length
        self._rows: OrderedDict[int, list[Sample]] = OrderedDict()

    def _samples(self, index: int) -> list[Sample]:
        raise NotImplementedError

    @property
    def epoch_rows(self) -> float:
        """Rows after which every document has been read once."""
        raise NotImplementedError

    def row(self, index: int) -> list[Sample]:
        """The samples of row `index` (0 or more), in order."""
        if index < 0:
            raise IndexError(f"sample index {index}: 0 or more is expected")
        if index not in self._rows:
            self._rows[index] = self._samples(index)
            while len(self._rows) > KEPT:
                self._rows.popitem(last=False)
        return self._rows[index]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [length], padded, and the positions in it where a segment starts."""
        samples = self.row(index)
        sizes = np.cumsum([0, *(len(s.ids) for s in samples)])
        ids = np.full(self.length, self.token_set.pad, dtype=np.int64)
        ids[: sizes[-1]] = np.concatenate([s.ids for s in samples])
        return ids, sizes if sizes[-1] < self.length else sizes[:-1]

    def trained(self, index: int) -> np.ndarray:
        """Which tokens of row `index` may be targets, bool [length]: never a picture's."""
        mask = np.zeros(self.length, dtype=bool)
        known = np.concatenate([s.trained for s in self.row(index)])
        mask[: len(known)] = known
        return mask

    def pictures(self, index: int) -> list[Picture]:
        """The pictures of row `index`, in the order of their placeholders."""
        return [item.load() for sample in self.row(index) for item in sample.items]

    def cost(self, index: int) -> float:
        """What row `index` costs, in tokens of text."""
        patches = sum(int(np.prod(item.grid)) for sample in self.row(index) for item in sample.items)
        return self.length + PATCH_COST * patches


class DocumentRows(PictureRows):
    """Rows of given documents: pieces that fit, packed by best fit once, the rows shuffled each epoch."""

    def __init__(self, token_set: TokenSet, samples: Sequence[Sample], length: int, seed: int, model: ModelConfig, cut: str) -> None:
        """Raises `UserError` for a document whose image a row cannot hold, or would cut where that is refused."""
        super().__init__(token_set, length)
        named = zip(samples, token_set.names, strict=True)
        self._pieces = [piece for sample, name in named for piece in pieces(sample, length, model, name, cut)]
        if not self._pieces:
            raise UserError("data.source: no document with something to learn")
        self._packed = pack(np.asarray([len(p.ids) for p in self._pieces]), length)
        self._seed = seed
        self._orders: dict[int, np.ndarray] = {}

    @property
    def epoch_rows(self) -> float:
        return len(self._packed)

    def _samples(self, index: int) -> list[Sample]:
        epoch, slot = divmod(index, len(self._packed))
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = permutation(len(self._packed), self._seed, epoch)
        return [self._pieces[i] for i in self._packed[self._orders[epoch][slot]].tolist()]


class DrawnRows(PictureRows):
    """Rows of documents that are made as they are asked for: `make(row, slot)`, until the next does not fit."""

    def __init__(self, token_set: TokenSet, make: Callable[[int, int], Sample], length: int) -> None:
        super().__init__(token_set, length)
        self._make = make
        if len(first := make(0, 0).ids) > length:
            raise UserError(f"stages: length = {length}: a picture and its answer take {len(first)} tokens and more; raise it to 64")

    @property
    def epoch_rows(self) -> float:
        return float(EPOCH)

    def _samples(self, index: int) -> list[Sample]:
        samples, used = [], 0
        while True:
            sample = self._make(index, len(samples))
            if used + len(sample.ids) > self.length:
                return samples
            samples.append(sample)
            used += len(sample.ids)
