"""Where each assignment of a token to an expert lives: experts of like load share a rectangular tile, one batched matmul."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WASTE = 0.10  # share of a tile that may be padding ...
SLACK = 256  # ... or this many rows, which cost less than another tile's calls
ROWS = 8192  # rows of a tile at most, one expert's aside: the tile's tensors stay in a CPU's last-level cache
EXPERTS = 128  # experts of a tile at most, for the same reason


@dataclass(frozen=True)
class Tile:
    """`experts` of one tile, each with `capacity` rows, the tile's rows starting at `start` of the padded order."""

    experts: Tensor  # int64 [G]
    start: int
    capacity: int

    @property
    def stop(self) -> int:
        return self.start + self.experts.numel() * self.capacity


@dataclass(frozen=True)
class Layout:
    tiles: list[Tile]
    slot: Tensor  # int64 [T, k]: the padded row of each assignment
    token: Tensor  # int64 [P]: the token of each padded row; padding rows say token 0
    assignment: Tensor  # int64 [P]: its place in the flattened [T, k]; padding rows say T*k
    unvisited: Tensor  # int64: experts without a token

    @property
    def rows(self) -> int:
        return self.token.numel()


def _cut(counts: list[int]) -> list[tuple[int, int]]:
    """Cut falling counts (no zeros) into runs [a, b) whose padding to the run's first count stays small."""
    runs, a, waste = [], 0, 0
    for b in range(1, len(counts) + 1):
        if b < len(counts):
            size = counts[a] * (b + 1 - a)
            padding = waste + counts[a] - counts[b]
            if size <= ROWS and b - a < EXPERTS and padding <= max(SLACK, WASTE * size):
                waste = padding
                continue
        runs.append((a, b))
        a, waste = b, 0
    return runs


def build(ids: Tensor, experts: int) -> Layout:
    """Sort the assignments ids [T, k] by their expert's load, then expert, then token, and pad each expert to its tile's capacity."""
    flat = ids.reshape(-1)
    n, k, device = flat.numel(), ids.shape[1], flat.device
    least, most = (int(v) for v in flat.aminmax()) if n else (0, 0)
    if least < 0 or most >= experts:
        raise ValueError(f"ids must lie in [0, {experts})")
    counts = torch.bincount(flat, minlength=experts)
    loads, by_load = counts.sort(descending=True, stable=True)
    sorted_loads = loads.tolist()
    visited = experts - sorted_loads.count(0)
    tiles, starts, row = [], [0] * experts, 0
    for a, b in _cut(sorted_loads[:visited]):
        capacity = sorted_loads[a]
        tiles.append(Tile(by_load[a:b], row, capacity))
        starts[a:b] = range(row, row + capacity * (b - a), capacity)
        row += capacity * (b - a)
    first = torch.zeros_like(counts).index_copy_(0, by_load, torch.tensor(starts, device=device))
    order = (flat.to(torch.int16) if experts < 2**15 else flat).argsort(stable=True)
    shift = first - (counts.cumsum(0) - counts)  # padded row of an expert's first assignment, less its rank in `order`
    slot_sorted = torch.arange(n, device=device) + shift.index_select(0, flat.index_select(0, order))
    slot = torch.empty_like(flat).index_copy_(0, order, slot_sorted)
    assignment = torch.full((row,), n, device=device).index_copy_(0, slot_sorted, order)
    token = torch.zeros(row, dtype=torch.int64, device=device).index_copy_(0, slot_sorted, order // k)
    return Layout(tiles, slot.view_as(ids), token, assignment, by_load[visited:])
