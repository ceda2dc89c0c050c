"""Muon where matrices are cut by rows: each is brought together on one process, made orthogonal there, once, and handed back.

The matrices of a step are dealt out so that every process orthogonalises about as much. Two exchanges do a whole batch of them: rows
to the owners, updates back; a process sends and receives about what it holds, whatever the number of processes. A stack of experts is
cut between its matrices, so it needs no exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.optim.muon import MAX_BATCH_ELEMENTS, Blocks, Muon, orthogonalised


@dataclass(frozen=True)
class _Rows:
    """One matrix of a step: what this process holds of it, its rows as a whole, its blocks, and its update before it is orthogonal."""

    held: Tensor
    height: int
    blocks: Blocks
    update: Tensor

    @property
    def elements(self) -> int:
        return self.height * self.held.shape[1]

    def rows_of(self, rank: int, size: int) -> int:
        """Rows that a process holds, as `torch.chunk` cuts them."""
        each = -(-self.height // size)
        return max(0, min(each, self.height - rank * each))


class ShardedMuon(Muon):
    """`Muon` over what one process holds.

    Args:
        params: groups as in `Muon`, of local tensors. group: the processes that a matrix is cut over.
        heights: rows as a whole of the parameters that are cut by rows; the others hold whole matrices.
    """

    def __init__(self, params: Iterable[Any], *args: Any, group: dist.ProcessGroup, heights: Mapping[Tensor, int], **options: Any) -> None:
        self.group, self.heights = group, heights
        super().__init__(params, *args, **options)

    def _check_blocks(self, p: Tensor, blocks: Blocks) -> None:
        if p not in self.heights:
            super()._check_blocks(p, blocks)

    def _update(self, taken: list[tuple[Tensor, Blocks, Tensor]], group: dict[str, Any]) -> None:
        super()._update([t for t in taken if t[0] not in self.heights], group)
        cut = [_Rows(p, self.heights[p], blocks, u) for p, blocks, u in taken if p in self.heights]
        lr = self._rate(group)
        for batch in _batches(cut, self.group.size() * MAX_BATCH_ELEMENTS):
            for rows, update in zip(batch, self._exchanged(batch, group, lr), strict=True):
                rows.held.mul_(1 - lr * group["weight_decay"]).sub_(update)

    def _exchanged(self, batch: list[_Rows], group: dict[str, Any], lr: Any) -> list[Tensor]:
        """The rows held here of what is to be taken off each matrix."""
        size, rank = self.group.size(), dist.get_rank(self.group)
        owners = _deal(batch, size)
        out = [[i for i, owner in enumerate(owners) if owner == r] for r in range(size)]
        mine = out[rank]
        sent = [torch.cat([batch[i].update.reshape(-1) for i in part] or [batch[0].update.new_zeros(0)]) for part in out]
        sizes = [[batch[i].rows_of(r, size) * batch[i].held.shape[1] for i in mine] for r in range(size)]
        pieces = [p.split(n) for p, n in zip(self._all_to_all(sent, [sum(n) for n in sizes]), sizes, strict=True)]
        whole = [torch.cat([pieces[r][j].view(-1, batch[i].held.shape[1]) for r in range(size)]) for j, i in enumerate(mine)]
        stacks = [s for j, i in enumerate(mine) for s in batch[i].blocks.split(whole[j])]
        for at, block, scale in orthogonalised(stacks, group["ns_steps"], group["ns_dtype"]) if stacks else ():
            stacks[at].copy_(block).mul_(lr * scale)  # views of `whole`
        cuts = [w.split([batch[i].rows_of(r, size) for r in range(size)]) for w, i in zip(whole, mine, strict=True)]
        back = [torch.cat([c[r].reshape(-1) for c in cuts] or [batch[0].update.new_zeros(0)]) for r in range(size)]
        updates: list[Tensor] = [batch[0].update] * len(batch)
        for part, got in zip(out, self._all_to_all(back, [s.numel() for s in sent]), strict=True):
            for i, flat in zip(part, got.split([batch[i].held.numel() for i in part]), strict=True):
                updates[i] = flat.view_as(batch[i].held)
        return updates

    def _all_to_all(self, sent: list[Tensor], into: list[int]) -> tuple[Tensor, ...]:
        """`sent[r]` to process r, for `into[r]` elements from each."""
        got = sent[0].new_empty(sum(into))
        dist.all_to_all_single(got, torch.cat(sent), into, [s.numel() for s in sent], group=self.group)
        return got.split(into)


def _batches(cut: list[_Rows], limit: int) -> Iterator[list[_Rows]]:
    """Matrices in order, at most `limit` elements together: bounds what an owner holds at once."""
    batch, elements = [], 0
    for rows in cut:
        if batch and elements + rows.elements > limit:
            yield batch
            batch, elements = [], 0
        batch.append(rows)
        elements += rows.elements
    if batch:
        yield batch


def _deal(batch: list[_Rows], size: int) -> list[int]:
    """An owner for each matrix: the largest first, each to whoever has least to do; the same on every process."""
    load, owners = [0] * size, [0] * len(batch)
    for i in sorted(range(len(batch)), key=lambda i: (-batch[i].elements, i)):
        owners[i] = min(range(size), key=lambda r: (load[r], r))
        load[owners[i]] += batch[i].elements * min(batch[i].height, batch[i].held.shape[1])
    return owners
