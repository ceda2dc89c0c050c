"""Where the pieces of a matrix lie that is cut over processes, for whoever must put it together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """A matrix [height, width] over the processes of `group`, numbered data first and tensor last.

    On the tensor axis it is cut by rows ("column"), by columns ("row"), or each holds the same (None); what is left is cut by rows over
    the data axis, as `torch.chunk` cuts.
    """

    group: dist.ProcessGroup
    height: int
    width: int
    tensor: int = 1  # processes of the tensor axis
    kind: Literal["column", "row"] | None = None

    def place(self, rank: int) -> tuple[slice, slice]:
        """Rows and columns that a process holds."""
        data, band = divmod(rank, self.tensor)
        rows, columns = self.height, self.width
        rows = rows // self.tensor if self.kind == "column" else rows
        columns = columns // self.tensor if self.kind == "row" else columns
        each = -(-rows // (self.group.size() // self.tensor))
        top = band * rows if self.kind == "column" else 0
        left = band * columns if self.kind == "row" else 0
        return slice(top + min(rows, data * each), top + min(rows, (data + 1) * each)), slice(left, left + columns)

    def numel(self, rank: int) -> int:
        """Numbers that a process holds."""
        rows, columns = self.place(rank)
        return (rows.stop - rows.start) * (columns.stop - columns.start)

    def sends(self, rank: int) -> bool:
        """Whether a process is the one of those with the same piece that speaks for it."""
        return self.kind is not None or rank % self.tensor == 0

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """The piece of a process, a view."""
        return whole[self.place(rank)]

    def joined(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """The whole matrix from what each process sent, flat."""
        whole = like.new_empty(self.height, self.width)
        for rank, part in enumerate(parts):
            if self.sends(rank):
                piece = self.of(whole, rank)
                piece.copy_(part.view_as(piece))
        return whole
