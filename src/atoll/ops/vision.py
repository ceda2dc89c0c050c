"""What a vision tower computes without parameters: interpolated positions, time codes, 2-D rotation, merging of patches.

MoonViT (Kimi-VL, arXiv 2504.07491, §2.1) as Kimi K3 has it (arXiv 2607.24653, §2.4). An item is an image or a clip; its patches
stand frame by frame, each frame row by row. A grid is (frames, rows, columns), in patches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

Grid = tuple[int, int, int]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def tent_weights(size: int, out: int, like: Tensor) -> Tensor:
    """Weights [out, size] of linear interpolation from `size` samples to `out`, in `like`'s type and device.

    Sample i of the result lies at (i + 1/2) size / out - 1/2, held within the samples there are; the two neighbours share it by
    distance. As a matrix, its gradient is a product too, the same on every run.
    """
    at = (torch.arange(out, dtype=like.dtype, device=like.device) + 0.5) * (size / out) - 0.5
    distance = at.clamp(0, size - 1)[:, None] - torch.arange(size, dtype=like.dtype, device=like.device)
    return (1 - distance.abs()).clamp(min=0)


def interpolate_table(table: Tensor, rows: int, columns: int) -> Tensor:
    """`table` [H, W, D] as [rows, columns, D], bilinearly, corners not aligned; the table itself where the sizes agree.

    In at least float32.
    """
    wide = table.to(_wide(table.dtype))
    height, width, dim = wide.shape
    if (rows, columns) == (height, width):
        return wide
    down = (tent_weights(height, rows, wide) @ wide.flatten(1)).view(rows, width, dim)
    return tent_weights(width, columns, wide) @ down


def time_codes(frames: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Fixed code of each frame, float32 [frames, dim]: sines of t · 10000^(-i / (dim/2)), then the cosines."""
    frequencies = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angles = torch.arange(frames, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1).to(device, torch.float32)


def rotation_angles(grids: Sequence[Grid], head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angles [N, head_dim / 2] of all patches of all items, in at least float32.

    Adjacent channels are pairs. With θ_i = 10000^(-4i / head_dim), pair 2i turns by column · θ_i and pair 2i + 1 by row · θ_i, the
    same in every frame.
    """
    kind = _wide(dtype)
    theta = 10000.0 ** (-torch.arange(0, head_dim, 4, dtype=kind, device=device) / head_dim)
    parts = []
    for (frames, rows, columns), alike in itertools.groupby(grids):
        across = torch.arange(columns, dtype=kind, device=device)[:, None] * theta
        down = torch.arange(rows, dtype=kind, device=device)[:, None] * theta
        shape = rows, columns, len(theta)
        pairs = torch.stack([across[None].expand(shape), down[:, None].expand(shape)], -1)
        parts.append(pairs.reshape(rows * columns, -1).repeat(frames * len(list(alike)), 1))
    return torch.cat(parts)


def rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn adjacent channel pairs of `x` [N, H, D] by the angles whose cosine and sine [N, D / 2] are given; x's dtype out."""
    first, second = x.to(cosine.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosine[:, None], sine[:, None]
    turned = torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1)
    return turned.flatten(-2).to(x.dtype)


def merge_patches(x: Tensor, grid: Grid, kernel: tuple[int, int], items: int = 1) -> Tensor:
    """Patches [items·t·h·w, D] of items of one grid as [items · h/a · w/b, a·b, D] for kernel (a, b): the mean over frames, a × b
    neighbours together."""
    (frames, rows, columns), (a, b) = grid, kernel
    tiles = x.view(items, frames, rows // a, a, columns // b, b, x.shape[-1]).mean(1)
    return tiles.transpose(2, 3).reshape(-1, a * b, x.shape[-1])
