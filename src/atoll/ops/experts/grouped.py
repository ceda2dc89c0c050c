"""Experts as batched matmuls over tiles of experts of like load, in plain torch, for any device.

Each tile gathers its rows and its experts' weights into buffers that all tiles share, so that it works inside the cache on a CPU;
whole-size tensors are only the experts' outputs by padded row and, backward, the rows' gradients. Kept for the backward pass are
the inputs and the two pre-activations of each assignment (recomputing those too takes 12 % longer on a CPU); the activation is
recomputed. No atomics: a token's sum runs over its k rows in order.

Quantisation rounds what a tile has gathered: its experts' weights, and the rows that enter its two matmuls. So only visited experts are
rounded, nothing of the size of all weights is kept, and the backward pass, which multiplies by what the forward pass multiplied by,
hands the gradient of the rounded weights and rows on as that of the unrounded (straight-through).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from atoll.ops.experts.layout import Layout, Tile, build
from atoll.ops.mxfp4 import mxfp4_fake
from atoll.ops.mxfp8 import mxfp8_fake
from atoll.ops.situ import Betas, glu_backward, glu_forward, wide


class _Scratch:
    """Named buffers, grown to the largest shape asked for. On a CPU fresh memory costs more than the pass that fills it."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.flat = like, {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        size = prod(shape)
        if name not in self.flat or self.flat[name].numel() < size:
            self.flat[name] = self.like.new_empty(size, dtype=dtype or self.like.dtype)
        return self.flat[name][:size].view(shape)

    def rows(self, name: str, x: Tensor, at: Tensor, *shape: int) -> Tensor:
        """x's rows (or matrices) `at`, viewed in `shape`."""
        out = self(name, at.numel(), *x.shape[1:])
        torch.index_select(x, 0, at, out=out)
        return out.view(shape) if shape else out


def _sum(rows: Tensor, layout: Layout, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[T, L] in `dtype`: each token's k rows, weighted, summed in order in at least float32."""
    return F.embedding_bag(layout.slot, rows.to(wide(dtype)), mode="sum", per_sample_weights=weights).to(dtype)


def _padded(values: Tensor, layout: Layout) -> Tensor:
    """values [T, k] by padded row, zero in padding."""
    flat = torch.cat([values.reshape(-1), values.new_zeros(1)])
    return flat.index_select(0, layout.assignment)


def _weights(w: Sequence[Tensor], tile: Tile, scratch: _Scratch, quantization: str) -> Iterator[Tensor]:
    """The tile's w1, w3, w2, as the matmuls take them."""
    for name, v in zip(("w1", "w3", "w2"), w, strict=True):
        rows = scratch.rows(name, v, tile.experts)
        yield rows if quantization == "none" else mxfp4_fake(rows, out=rows)


def _hidden(gate: Tensor, up: Tensor, betas: Betas, scratch: _Scratch, quantization: str) -> Tensor:
    """The rows that enter w2, in the type of gate and up."""
    dtype = wide(gate.dtype)
    hidden, up_out, spare = (scratch(name, *gate.shape, dtype=dtype) for name in ("hidden", "up out", "spare"))
    out = glu_forward(gate.to(dtype), up.to(dtype), betas, hidden, up_out, spare).to(gate.dtype)
    return mxfp8_fake(out, out=out) if quantization == "mxfp4+mxfp8" else out


def _forward_tile(
    tile: Tile,
    tokens: Tensor,
    x: Tensor,
    w: tuple[Tensor, Tensor, Tensor],
    betas: Betas,
    quantization: str,
    scratch: _Scratch,
    kept: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> None:
    """Writes the tile's outputs out [rows, L] and, where asked, its pre-activations, each kept [rows, I]."""
    rows = scratch.rows("rows", x, tokens, tile.experts.numel(), tile.capacity, x.shape[1])
    w1, w3, w2 = _weights(w, tile, scratch, quantization)
    shape = (*rows.shape[:2], w1.shape[1])
    gate, up = (scratch("gate", *shape), scratch("up", *shape)) if kept is None else (t.view(shape) for t in kept)
    torch.bmm(rows, w1.mT, out=gate)
    torch.bmm(rows, w3.mT, out=up)
    torch.bmm(_hidden(gate, up, betas, scratch, quantization), w2.mT, out=out.view(rows.shape))


def _backward_tile(
    tile: Tile,
    tokens: Tensor,
    x: Tensor,
    grad: Tensor,
    p: Tensor,
    w: list[Tensor],
    betas: Betas,
    quantization: str,
    scratch: _Scratch,
    kept: tuple[Tensor, Tensor],
    dp: Tensor,
    dx: Tensor,
    dw: list[Tensor | None],
) -> None:
    """Writes the tile's part of the gradients: dp [rows], dx [rows, L] and the experts' places in dw. The token's weight is p [rows]."""
    shape = (tile.experts.numel(), tile.capacity, x.shape[1])
    rows, g_rows = scratch.rows("rows", x, tokens, *shape), scratch.rows("grad", grad, tokens, *shape)
    w1, w3, w2 = _weights(w, tile, scratch, quantization)
    inner, dtype = (*shape[:2], w1.shape[1]), wide(x.dtype)
    # the gradient of the hidden activations before the token's weight
    back = torch.bmm(g_rows, w2, out=scratch("back", *inner)).to(dtype)
    s, g, h, t, u = (scratch(name, *inner, dtype=dtype) for name in ("s", "g", "h", "t", "u"))
    gate, up = (v.view(inner).to(dtype) for v in kept)
    h, a, b, h_scale, scale = glu_backward(gate, up, betas, (s, g, h, t, u))
    if quantization == "mxfp4+mxfp8":  # what w2 met was rounded; found by the forward pass's own arithmetic, so that no tie flips
        h, h_scale = _hidden(kept[0].view(inner), kept[1].view(inner), betas, scratch, quantization).to(dtype), 1.0
    torch.sum(torch.mul(back, h, out=t), -1, out=dp.view(shape[:2])).mul_(h_scale)
    p = p.view(*shape[:2], 1)
    back.mul_(p * scale)
    hidden, d_gate, d_up = (v.to(x.dtype) for v in (h.mul_(p * h_scale), a.mul_(back), b.mul_(back)))
    for place, left, right in zip(dw, (d_gate, d_up, g_rows), (rows, rows, hidden), strict=True):
        if place is not None:
            product = scratch("dw", shape[0], left.shape[2], right.shape[2])
            place.index_copy_(0, tile.experts, torch.bmm(left.mT, right, out=product))
    part = torch.bmm(d_gate, w1, out=dx.view(shape))
    torch.baddbmm(part, d_up, w3, out=part)


class Grouped(torch.autograd.Function):
    """(x, ids, weights, w1, w3, w2, betas, quantization, keep) -> [T, L]; see `experts_mlp`. keep: a backward pass may follow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        w1, w3, w2, betas, quantization, keep = rest
        layout = build(ids, w1.shape[0])
        ctx.layout, ctx.betas, ctx.quantization = layout, betas, quantization
        if quantization == "mxfp4+mxfp8":
            x = mxfp8_fake(x)
        kept = [x.new_empty(layout.rows, w1.shape[1]) for _ in range(2)] if keep else []
        ctx.save_for_backward(x, weights, w1, w3, w2, *kept)
        if layout.rows == 0:
            return x.new_zeros(x.shape)
        out, scratch = x.new_empty(layout.rows, x.shape[1]), _Scratch(x)
        for tile in layout.tiles:
            at = slice(tile.start, tile.stop)
            tile_kept = (kept[0][at], kept[1][at]) if keep else None
            _forward_tile(tile, layout.token[at], x, (w1, w3, w2), betas, quantization, scratch, tile_kept, out[at])
        return _sum(out, layout, weights.to(wide(x.dtype)), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, w1, w3, w2, gate, up = ctx.saved_tensors
        layout, w = ctx.layout, [w1, w3, w2]
        if layout.rows == 0:
            return torch.zeros_like(x), None, torch.zeros_like(weights), *(torch.zeros_like(v) for v in w), None, None, None
        grad, p = grads[0].contiguous(), _padded(weights.to(wide(x.dtype)), layout)
        dp, dx = torch.empty_like(p), x.new_empty(layout.rows, x.shape[1])
        needed = zip(w, ctx.needs_input_grad[3:6], strict=True)
        dw = [v.new_empty(v.shape).index_fill_(0, layout.unvisited, 0) if n else None for v, n in needed]
        scratch = _Scratch(x)
        for tile in layout.tiles:
            at = slice(tile.start, tile.stop)
            tile_kept, options = (gate[at], up[at]), (ctx.betas, ctx.quantization)
            _backward_tile(tile, layout.token[at], x, grad, p[at], w, *options, scratch, tile_kept, dp[at], dx[at], dw)
        d_weights = dp.index_select(0, layout.slot.view(-1)).view_as(weights).to(weights.dtype)
        return _sum(dx, layout, None, x.dtype), None, d_weights, *dw, None, None, None
