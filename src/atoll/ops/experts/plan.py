"""Fixed launch settings of the experts' kernels, and the sort that precedes them. Triton is imported at the first launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.ops.dispatch import launch

_NARROWEST = 32  # least tokens of a tile: the room for the tiles' list counts on it


class Config(NamedTuple):
    """Token tiles: `full`, in `halves` parts of the weights, and the classes `first` + `second` for what is left of an expert.

    `weights` rows of an expert's weights a program, `depth` of the sum a step, pipeline `stages`, `warps`; the same for the gradients of
    the weights, whose tile is `tall` x `wide`. `group`: token tiles of an expert that share a weight tile before the next is read.
    Two of `grad_stages` go to the rows' numbers, which are fetched before the rows. `resident`: programs of a product that a
    multiprocessor holds at once, by registers and shared memory. With `halves` = 1, `full` is a class.
    """

    full: int
    halves: int
    first: tuple[int, ...]
    second: tuple[int, ...]
    weights: int
    depth: int
    stages: int
    warps: int
    tall: int = 128
    wide: int = 256
    deep: int = 64
    grad_stages: int = 5
    grad_warps: int = 8
    group: int = 16
    grad_group: int = 8
    resident: int = 1

    @property
    def widest(self) -> int:
        """Most tokens of a class; a rest above it takes a full tile."""
        return self.first[-1] + self.second[-1]


# 146 tokens an expert, 8192 x 16 of 896: 160 columns of 256 weights. More tokens: 256 columns of 128 weights.
HOPPER = Config(256, 2, (32, 64, 128, 128, 128), (0, 0, 0, 32, 64), 256, 64, 4, 8)


def choose(tokens: int, latent: int, inner: int, dtype: torch.dtype, hopper: bool) -> Config:
    """The settings for `tokens` tokens, of which at most so many meet at one expert."""
    most = min(256, max(_NARROWEST, 1 << max(tokens - 1, 0).bit_length()))
    full = min(most, 64 if dtype == torch.float32 else 128)
    classes = tuple(n for n in (32, 64, 128) if n <= full)
    none = (0,) * len(classes)
    if dtype == torch.float32:
        return Config(full, 1, classes, none, 64, 32, 2, 4, 64, 64, 32, 2, 4, resident=3)
    # A few steps a sum: several small programs a multiprocessor hide each other's beginning and end. Rows that do not start on 16
    # elements are fetched through registers, which large tiles have none left for.
    if min(latent, inner) < 512 or latent % 16 or inner % 16:
        return Config(full, 1, classes, none, 64, 32, 3, 4, 64, 64, 64, 5, 4, resident=4)
    if hopper and most > 128:
        return HOPPER
    if not hopper or full == 128:
        return Config(full, 1, classes, none, 128, 64, 4 if hopper else 2, 8, 128, 128, grad_stages=5 if hopper else 2)
    return Config(full, 1, classes, none, 128, 64, 4, 4, 128, 128, resident=2)


def _room(n: int) -> int:
    return (n + 15) // 16 * 16  # slices that start on 64 bytes


class Plan(NamedTuple):
    """`order` [R]: the assignment of each sorted row; `first`, `tiles` [E+1]: an expert's first row and tile; `table`: `table_kernel`."""

    order: Tensor
    first: Tensor
    tiles: Tensor
    table: Tensor

    @staticmethod
    def size(assignments: int, experts: int) -> int:
        """Integers of the buffer that holds all three; the same whatever the settings."""
        tiles = assignments // _NARROWEST + torch.sym_min(assignments, experts)  # a traced number has no min()
        return _room(assignments) + 2 * _room(experts + 1) + 8 * tiles  # pyright: ignore[reportReturnType]

    @staticmethod
    def read(buffer: Tensor, assignments: int, experts: int) -> Plan:
        first, each = _room(assignments), _room(experts + 1)
        rows, tiles = (buffer[at : at + experts + 1] for at in (first, first + each))
        return Plan(buffer[:assignments], rows, tiles, buffer[first + 2 * each :].view(-1, 8))


def tiles(config: Config, assignments: int, experts: int) -> int:
    """The most token tiles there can be: what the list must hold without knowing the load."""
    return min(assignments, experts) + assignments // config.full * config.halves


def sort(ids: Tensor, experts: int, config: Config) -> Tensor:
    """The buffer of a `Plan` for ids [T, k], int32."""
    from atoll.ops.experts import sort_kernels as kernels

    assignments, block, bins = ids.numel(), 256, max(64, 1 << experts.bit_length())
    buffer = ids.new_zeros(Plan.size(assignments, experts), dtype=torch.int32)
    plan, number = Plan.read(buffer, assignments, experts), tiles(config, assignments, experts)
    blocks = -(-assignments // block)
    counts, totals = (ids.new_empty(n, dtype=torch.int32) for n in (blocks * experts, experts))
    columns = {"ROWS": min(256, max(16, 1 << (blocks - 1).bit_length())), "COLUMNS": 16}
    sizes = {"FULL": config.full, "WIDEST": config.widest}
    launch(kernels.count_kernel, (blocks,), ids, ids, counts, assignments, experts, BLOCK=block, BINS=bins)
    launch(kernels.scan_kernel, (-(-experts // 16),), ids, counts, totals, blocks, experts, **columns)
    launch(kernels.layout_kernel, (1,), ids, totals, plan.first, plan.tiles, experts, HALVES=config.halves, BINS=bins, **sizes)
    launch(kernels.place_kernel, (blocks,), ids, ids, counts, plan.first, plan.order, assignments, experts, BLOCK=block, PART=32)
    launch(
        kernels.table_kernel, (-(-number // 32),), ids,
        plan.first, plan.tiles, plan.table, number, experts, experts.bit_length(), BLOCK=32, **sizes,
    )  # fmt: skip
    return buffer
