"""Experts as batched matmuls over tiles of experts of like load, in plain torch, for any device.

Each tile gathers its rows and its experts' weights into buffers that all tiles share, so that it works inside the cache on a CPU;
whole-size tensors are only the experts' outputs by padded row and, backward, the rows' gradients. The backward pass recomputes the
hidden activations. No atomics: a token's sum runs over its k rows in order.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from atoll.ops.experts.layout import Layout, Tile, build
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


def _project(x: Tensor, w: Tensor, scratch: _Scratch, name: str, dtype: torch.dtype) -> Tensor:
    """x [G, c, A] through w [G, A, B] in x's dtype, widened: [G, c, B], in the buffer `name`."""
    shape = (*x.shape[:2], w.shape[2])
    if x.dtype == dtype:
        return torch.bmm(x, w, out=scratch(name, *shape))
    return scratch(name, *shape, dtype=dtype).copy_(torch.bmm(x, w, out=scratch(f"{name} narrow", *shape)))


def _sum(rows: Tensor, layout: Layout, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[T, L] in `dtype`: each token's k rows, weighted, summed in order in at least float32."""
    return F.embedding_bag(layout.slot, rows.to(wide(dtype)), mode="sum", per_sample_weights=weights).to(dtype)


def _padded(values: Tensor, layout: Layout) -> Tensor:
    """values [T, k] by padded row, zero in padding."""
    flat = torch.cat([values.reshape(-1), values.new_zeros(1)])
    return flat.index_select(0, layout.assignment)


def _forward_tile(tile: Tile, tokens: Tensor, x: Tensor, w: tuple[Tensor, ...], betas: Betas, scratch: _Scratch, out: Tensor) -> None:
    shape, dtype = (tile.experts.numel(), tile.capacity, x.shape[1]), wide(x.dtype)
    rows = scratch.rows("rows", x, tokens, *shape)
    w1, w3, w2 = (scratch.rows(name, v, tile.experts) for name, v in zip(("w1", "w3", "w2"), w, strict=True))
    gate, up = _project(rows, w1.mT, scratch, "gate", dtype), _project(rows, w3.mT, scratch, "up", dtype)
    hidden, spare = (scratch(name, *gate.shape, dtype=dtype) for name in ("hidden", "spare"))
    glu_forward(gate, up, betas, hidden, up, spare)
    torch.bmm(hidden.to(x.dtype), w2.mT, out=out.view(shape))


class Grouped(torch.autograd.Function):
    """(x, ids, weights, w1, w3, w2, betas) -> [T, L]; see `experts_mlp`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, betas: Betas) -> Tensor:
        layout = build(ids, w1.shape[0])
        ctx.layout, ctx.betas = layout, betas
        ctx.save_for_backward(x, weights, w1, w3, w2)
        if layout.rows == 0:
            return x.new_zeros(x.shape)
        out, scratch = x.new_empty(layout.rows, x.shape[1]), _Scratch(x)
        for tile in layout.tiles:
            at = slice(tile.start, tile.stop)
            _forward_tile(tile, layout.token[at], x, (w1, w3, w2), betas, scratch, out[at])
        return _sum(out, layout, weights.to(wide(x.dtype)), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, *w = ctx.saved_tensors
        layout = ctx.layout
        if layout.rows == 0:
            return torch.zeros_like(x), None, torch.zeros_like(weights), *(torch.zeros_like(v) for v in w), None
        grad, p = grads[0].contiguous(), _padded(weights.to(wide(x.dtype)), layout)
        dp, dx = torch.empty_like(p), x.new_empty(layout.rows, x.shape[1])
        dw = [
            torch.empty_like(v).index_fill_(0, layout.unvisited, 0) if n else None
            for v, n in zip(w, ctx.needs_input_grad[3:6], strict=True)
        ]
        scratch = _Scratch(x)
        for tile in layout.tiles:
            at = slice(tile.start, tile.stop)
            _backward_tile(tile, layout.token[at], x, grad, p[at], w, ctx.betas, scratch, dp[at], dx[at], dw)
        d_weights = dp.index_select(0, layout.slot.view(-1)).view_as(weights).to(weights.dtype)
        return _sum(dx, layout, None, x.dtype), None, d_weights, *dw, None


def _backward_tile(
    tile: Tile,
    tokens: Tensor,
    x: Tensor,
    grad: Tensor,
    p: Tensor,
    w: list[Tensor],
    betas: Betas,
    scratch: _Scratch,
    dp: Tensor,
    dx: Tensor,
    dw: list[Tensor | None],
) -> None:
    """Writes the tile's part of the gradients: dp [rows], dx [rows, L] and the experts' places in dw. The token's weight is p [rows]."""
    shape, dtype = (tile.experts.numel(), tile.capacity, x.shape[1]), wide(x.dtype)
    rows, g_rows = scratch.rows("rows", x, tokens, *shape), scratch.rows("grad", grad, tokens, *shape)
    w1, w3, w2 = (scratch.rows(name, v, tile.experts) for name, v in zip(("w1", "w3", "w2"), w, strict=True))
    gate, up = _project(rows, w1.mT, scratch, "gate", dtype), _project(rows, w3.mT, scratch, "up", dtype)
    back = _project(g_rows, w2, scratch, "back", dtype)  # gradient of the hidden activations before the token's weight
    s, g, h, spare = (scratch(name, *gate.shape, dtype=dtype) for name in ("s", "g", "hidden", "spare"))
    h, a, b, h_scale, scale = glu_backward(gate, up, betas, (s, g, h))
    torch.sum(torch.mul(back, h, out=spare), -1, out=dp.view(shape[:2])).mul_(h_scale)
    p = p.view(*shape[:2], 1)
    back.mul_(p * scale)
    hidden, d_gate, d_up = (u.to(x.dtype) for u in (h.mul_(p * h_scale), a.mul_(back), b.mul_(back)))
    for place, left, right in zip(dw, (d_gate, d_up, g_rows), (rows, rows, hidden), strict=True):
        if place is not None:
            product = scratch("dw", shape[0], left.shape[2], right.shape[2])
            place.index_copy_(0, tile.experts, torch.bmm(left.mT, right, out=product))
    part = torch.bmm(d_gate, w1, out=dx.view(shape))
    torch.baddbmm(part, d_up, w3, out=part)
