"""Muon where matrices are cut: each is brought together on one process, made orthogonal there, once, and handed back.

The matrices of a step are dealt out so that every process orthogonalises about as much. Two exchanges do a whole batch of them: pieces
to the owners, updates back; a process sends and receives about what it holds, whatever the number of processes. A stack of experts is
cut between its matrices, so it needs no exchange; nor do heads that lie whole on a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.optim.muon import MAX_BATCH_ELEMENTS, Blocks, Muon, orthogonalised
from atoll.parallel.pieces import Pieces


@dataclass(frozen=True)
class _Matrix:
    """One matrix of a step: what this process holds of it, where the rest is, its blocks, and its update before it is orthogonal."""

    held: Tensor
    pieces: Pieces
    blocks: Blocks
    update: Tensor

    @property
    def elements(self) -> int:
        return self.pieces.height * self.pieces.width


class ShardedMuon(Muon):
    """`Muon` over what one process holds.

    Args:
        params: groups as in `Muon`, of local tensors. pieces: of the parameters that are cut; the others hold whole matrices.
    """

    def __init__(self, params: Iterable[Any], *args: Any, pieces: Mapping[Tensor, Pieces], **options: Any) -> None:
        self.pieces = pieces
        super().__init__(params, *args, **options)

    def _check_blocks(self, p: Tensor, blocks: Blocks) -> None:
        if p not in self.pieces:
            super()._check_blocks(p, blocks)

    def _update(self, taken: list[tuple[Tensor, Blocks, Tensor]], group: dict[str, Any]) -> None:
        super()._update([t for t in taken if t[0] not in self.pieces], group)
        lr = self._rate(group)
        cut = [_Matrix(p, self.pieces[p], blocks, u) for p, blocks, u in taken if p in self.pieces]
        for processes in dict.fromkeys(m.pieces.group for m in cut):
            alike = [m for m in cut if m.pieces.group is processes]
            for batch in _batches(alike, processes.size() * MAX_BATCH_ELEMENTS):
                for matrix, update in zip(batch, self._exchanged(batch, processes, group, lr), strict=True):
                    matrix.held.mul_(1 - lr * group["weight_decay"]).sub_(update)

    def _exchanged(self, batch: list[_Matrix], processes: dist.ProcessGroup, group: dict[str, Any], lr: Any) -> list[Tensor]:
        """The pieces held here of what is to be taken off each matrix."""
        size, rank, none = processes.size(), dist.get_rank(processes), batch[0].update.new_zeros(0)
        owners = _deal(batch, size)
        out = [[i for i, owner in enumerate(owners) if owner == r] for r in range(size)]
        mine = [batch[i] for i in out[rank]]
        sent = [torch.cat([batch[i].update.reshape(-1) for i in part if batch[i].pieces.sends(rank)] or [none]) for part in out]
        sizes = [[m.pieces.numel(r) if m.pieces.sends(r) else 0 for m in mine] for r in range(size)]
        came = [p.split(n) for p, n in zip(_all_to_all(sent, [sum(n) for n in sizes], processes), sizes, strict=True)]
        whole = [m.pieces.joined([came[r][j] for r in range(size)], none) for j, m in enumerate(mine)]
        stacks = [s for m, w in zip(mine, whole, strict=True) for s in m.blocks.split(w)]
        for at, block, scale in orthogonalised(stacks, group["ns_steps"], group["ns_dtype"]) if stacks else ():
            stacks[at].copy_(block).mul_(lr * scale)  # views of `whole`
        back = [torch.cat([m.pieces.of(w, r).reshape(-1) for m, w in zip(mine, whole, strict=True)] or [none]) for r in range(size)]
        updates: list[Tensor] = [none] * len(batch)
        for part, got in zip(out, _all_to_all(back, [sum(batch[i].held.numel() for i in part) for part in out], processes), strict=True):
            for i, flat in zip(part, got.split([batch[i].held.numel() for i in part]), strict=True):
                updates[i] = flat.view_as(batch[i].held)
        return updates


def _all_to_all(sent: list[Tensor], into: list[int], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """`sent[r]` to process r, for `into[r]` elements from each."""
    got = sent[0].new_empty(sum(into))
    dist.all_to_all_single(got, torch.cat(sent), into, [s.numel() for s in sent], group=group)
    return got.split(into)


def _batches(cut: list[_Matrix], limit: int) -> Iterator[list[_Matrix]]:
    """Matrices in order, at most `limit` elements together: bounds what an owner holds at once."""
    batch, elements = [], 0
    for matrix in cut:
        if batch and elements + matrix.elements > limit:
            yield batch
            batch, elements = [], 0
        batch.append(matrix)
        elements += matrix.elements
    if batch:
        yield batch


def _deal(batch: list[_Matrix], size: int) -> list[int]:
    """An owner for each matrix: the largest first, each to whoever has least to do; the same on every process."""
    load, owners = [0] * size, [0] * len(batch)
    for i in sorted(range(len(batch)), key=lambda i: (-batch[i].elements, i)):
        owners[i] = min(range(size), key=lambda r: (load[r], r))
        load[owners[i]] += batch[i].elements * min(batch[i].pieces.height, batch[i].pieces.width)
    return owners
