"""The 16-token diagonal tiles of chunked KDA: scores of queries and keys against keys under decay, and their gradients.

score[i, j] = sum_c row[i, c] k[j, c] exp(G[i, c] - G[j, c]) for j <= i, G the cumulative log-decay inside the tile.

Bounded decay: the exponential splits at one anchor a tile, exp(G_i - C) exp(C - G_j), and the tile is a dense matmul. The anchor
lies 8 |bound| below the tile's start, a constant, so no later token can move an earlier score, and 16 tokens keep both factors
within exp(±8 |bound|): e^40 at -5. Entries above the diagonal grow to e^75 and are zeroed after the product.

Unbounded decay has no such range: there every pair of positions gets its own exponent, a sum of log-decays, at most zero.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 16
_PAIR_ELEMENTS = 1 << 22  # elements of the [tiles, 16, 16, K] pair table held at once


class Tiles(NamedTuple):
    """Factors of every tile; all [M, C, K] in chunk order, C a multiple of 16."""

    up: Tensor  # exp(G) * anchor, what a row carries
    query: Tensor  # scaled unit query * up
    key: Tensor  # unit key * up
    column: Tensor  # unit key / up (bounded), the unit key itself (unbounded)
    tail: Tensor  # unit key * exp(G_end - G)


@functools.lru_cache(maxsize=64)
def _ones(size: int, value: float, lower: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    ones = torch.full((size, size), value, dtype=dtype, device=device)
    return ones.tril_() if lower else ones.triu_()


def sum_up_to(x: Tensor, size: int, value: float = 1.0) -> Tensor:
    """value * inclusive cumulative sum over runs of `size` rows of [..., K], as a product with a triangle."""
    flat = x.view(-1, size, x.shape[-1])
    return torch.bmm(_ones(size, value, True, x.dtype, x.device).expand(flat.shape[0], -1, -1), flat).view(x.shape)


def sum_from(x: Tensor, size: int) -> Tensor:
    """Inclusive reverse cumulative sum over runs of `size` rows of [..., K]."""
    flat = x.view(-1, size, x.shape[-1])
    return torch.bmm(_ones(size, 1.0, False, x.dtype, x.device).expand(flat.shape[0], -1, -1), flat).view(x.shape)


def anchor(lower_bound: float | None) -> float:
    """The factor exp(G_start - C), as a power of two: so it multiplies exp(G) without rounding, which 40 added to a small G would not."""
    return 1.0 if lower_bound is None else 2.0 ** round(TILE / 2 * abs(lower_bound) / math.log(2))


def _tiled(x: Tensor) -> Tensor:
    return x.view(-1, TILE, x.shape[-1])


def bounded_scores(rows: Tensor, column: Tensor, diagonal: int) -> Tensor:
    """[M*C/16, 16, 16] scores of `rows` against `column`, kept on and below `diagonal` (0, or -1 for strictly below)."""
    return torch.bmm(_tiled(rows), _tiled(column).transpose(1, 2)).tril_(diagonal)


def pair_decay(g: Tensor) -> Tensor:
    """exp(sum of g over (j, i]) for every pair of a tile, zero for j > i: [tiles, 16, 16, K] from g [tiles, 16, K].

    The sum is taken anew for each j instead of as a difference of cumulative sums, which would round away a slow decay after a fast one.
    """
    spread = g[:, :, None, :].expand(-1, TILE, TILE, g.shape[-1])
    below = torch.ones(TILE, TILE, dtype=torch.bool, device=g.device).tril_(-1)[None, :, :, None]
    total = torch.where(below, spread, torch.zeros((), dtype=g.dtype, device=g.device)).cumsum(1)
    return total.exp_().mul_(below.logical_or(torch.eye(TILE, dtype=torch.bool, device=g.device)[None, :, :, None]))


def _slices(count: int, width: int) -> list[slice]:
    step = max(1, _PAIR_ELEMENTS // (TILE * TILE * width))
    return [slice(a, min(a + step, count)) for a in range(0, count, step)]


def pair_scores(query: Tensor, key: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of unit queries and unit keys [M, C, K] against the keys under log-decay g: two of [M*C/16, 16, 16]."""
    query, key, g = _tiled(query), _tiled(key), _tiled(g)
    scores_q = query.new_empty(query.shape[0], TILE, TILE)
    scores_k = torch.empty_like(scores_q)
    for part in _slices(*query.shape[::2]):
        weighted = pair_decay(g[part]).mul_(key[part, None])
        scores_q[part] = (weighted @ query[part, :, :, None])[..., 0]
        scores_k[part] = (weighted @ key[part, :, :, None])[..., 0]
    return scores_q.tril_(), scores_k.tril_(-1)


def pair_gradients(query: Tensor, key: Tensor, g: Tensor, dscores_q: Tensor, dscores_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (of queries, of keys as rows, of keys as columns), each [M, C, K]; the upstream scores are already masked."""
    shape = query.shape
    query, key, g = _tiled(query), _tiled(key), _tiled(g)
    dquery, drow, dcolumn = torch.empty_like(query), torch.empty_like(query), torch.empty_like(query)
    for part in _slices(*query.shape[::2]):
        decay = pair_decay(g[part])
        up_q, up_k = dscores_q[part, :, :, None], dscores_k[part, :, :, None]
        dcolumn[part] = (decay * (up_q * query[part, :, None] + up_k * key[part, :, None])).sum(1)
        weighted = decay.mul_(key[part, None])
        dquery[part] = (weighted * up_q).sum(2)
        drow[part] = (weighted * up_k).sum(2)
    return dquery.view(shape), drow.view(shape), dcolumn.view(shape)


def anchor_limit() -> float:
    """The steepest bound for which both factors of a tile, and the products above its diagonal, stay in float32's and bfloat16's range."""
    return math.log(torch.finfo(torch.bfloat16).max) / (TILE - 1)  # 5.9
