"""What passes between the stages of a pipeline: one message a hop, of a size that both ends know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """Messages around the ring of a pipeline's processes, to the next one (`ahead`) or to the one before.

    Sending does not wait. Each process works through an order of its own, so messages of two kinds between one pair may be wanted in
    another order than they were sent in, which NCCL, where they stand in one queue, answers by waiting for ever. So each kind has a group
    of its own: ahead and back, within the ring and around its end. Within a kind both ends have one order. (A group must not have been
    bound to its device when it was made, or all its pairs share a queue; torch makes one a pair otherwise.)
    """

    def __init__(self, pipelines: Sequence[Sequence[int]]) -> None:
        """`pipelines`: the ranks of every pipeline; each process is in one, and all of them call this."""
        self.groups: dict[tuple[bool, bool], Any] = {}
        for kind in ((ahead, around) for ahead in (True, False) for around in (False, True)):
            self.groups[kind], _ = dist.new_subgroups_by_enumeration([list(p) for p in pipelines])
        self.ranks = next(list(p) for p in pipelines if dist.get_rank() in p)
        self.place, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.sent_bytes = 0
        self._under_way: list[tuple[Any, Tensor]] = []

    def send(self, rows: Tensor, ahead: bool) -> None:
        """`rows` to the next process of the ring, or to the one before; `rows` must not change any more."""
        to = self.place + (1 if ahead else -1)
        group = self.groups[ahead, not 0 <= to < self.size]
        self._under_way = [(work, kept) for work, kept in self._under_way if not work.is_completed()]  # gloo says so only when waited for
        self._under_way.append((dist.isend(rows, self.ranks[to % self.size], group=group), rows))
        self.sent_bytes += rows.numel() * rows.element_size()

    def expect(self, rows: Tensor, ahead: bool) -> Any:
        """Have `rows` filled with what travels ahead from the process before, or back from the next. The handle's `wait()` says when."""
        source = self.place - (1 if ahead else -1)
        group = self.groups[ahead, not 0 <= source < self.size]
        return dist.irecv(rows, self.ranks[source % self.size], group=group)

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def from_last_(self, tensor: Tensor) -> Tensor:
        """The last process's `tensor`, in place, on all of the pipeline."""
        dist.broadcast(tensor, self.ranks[-1], group=self.groups[True, False])
        return tensor

    def gather(self, found: Any) -> list[Any]:
        """What each process of the pipeline has found, in order; on all of them."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, found, group=self.groups[True, False])
        return every


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows [B,T,D] as one message [rows,B,T,D]."""
    return torch.stack([r.detach() for r in rows])
