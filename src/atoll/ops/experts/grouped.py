"""Experts as batched matmuls over tiles of experts of like load, in plain torch, for any device.

Each tile gathers its rows and its experts' weights, so that it works inside the cache on a CPU; whole-size tensors are only the
experts' outputs by padded row and, backward, the rows' gradients. The backward pass recomputes the hidden activations. No atomics:
a token's sum runs over its k rows in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from atoll.ops.experts.layout import Layout, Tile, build
from atoll.ops.situ import situ_backward, situ_values, swiglu_backward, swiglu_values, wide

Betas = tuple[float, float | None] | None  # SiTU's two caps, or None for SwiGLU


def _rows(x: Tensor, layout: Layout, tile: Tile) -> Tensor:
    return x.index_select(0, layout.token[tile.start : tile.stop]).view(-1, tile.capacity, x.shape[1])


def _padded(values: Tensor, layout: Layout) -> Tensor:
    """values [T, k] by padded row, zero in padding."""
    flat = torch.cat([values.reshape(-1), values.new_zeros(1)])
    return flat.index_select(0, layout.assignment)


def _sum(rows: Tensor, layout: Layout, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[T, L] in `dtype`: each token's k rows, weighted, summed in order in at least float32."""
    rows = rows.to(wide(dtype))
    return F.embedding_bag(layout.slot, rows, mode="sum", per_sample_weights=weights).to(dtype)


class Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, betas: Betas) -> Tensor:
        layout = build(ids, w1.shape[0])
        ctx.layout, ctx.betas = layout, betas
        ctx.save_for_backward(x, weights, w1, w3, w2)
        if layout.rows == 0:
            return x.new_zeros(x.shape)
        dtype = wide(x.dtype)
        y = x.new_empty(layout.rows, x.shape[1])
        for tile in layout.tiles:
            rows = _rows(x, layout, tile)
            gate = torch.bmm(rows, w1.index_select(0, tile.experts).mT).to(dtype)
            up = torch.bmm(rows, w3.index_select(0, tile.experts).mT).to(dtype)
            hidden = (swiglu_values(gate, up) if betas is None else situ_values(gate, up, *betas)).to(x.dtype)
            torch.bmm(hidden, w2.index_select(0, tile.experts).mT, out=y[tile.start : tile.stop].view_as(rows))
        return _sum(y, layout, weights.to(dtype), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, w1, w3, w2 = ctx.saved_tensors
        layout, betas, dtype = ctx.layout, ctx.betas, wide(x.dtype)
        if layout.rows == 0:
            return torch.zeros_like(x), None, torch.zeros_like(weights), *(torch.zeros_like(w) for w in (w1, w3, w2)), None
        grad = grads[0].contiguous()
        p = _padded(weights.to(dtype), layout)
        dp, dx = torch.empty_like(p), x.new_empty(layout.rows, x.shape[1])
        dw1, dw3, dw2 = (torch.empty_like(w).index_fill_(0, layout.unvisited, 0) for w in (w1, w3, w2))
        for tile in layout.tiles:
            at = slice(tile.start, tile.stop)
            rows, g_rows = _rows(x, layout, tile), _rows(grad, layout, tile)
            v1, v3, v2 = (w.index_select(0, tile.experts) for w in (w1, w3, w2))
            weight = p[at].view(-1, tile.capacity, 1)
            gate, up = torch.bmm(rows, v1.mT).to(dtype), torch.bmm(rows, v3.mT).to(dtype)
            back = torch.bmm(g_rows, v2).to(dtype)  # gradient of the hidden activations before the token's weight
            if betas is None:
                hidden, d_gate, d_up = swiglu_backward(gate, up)
            else:
                hidden, d_gate, d_up = situ_backward(gate, up, *betas)
            dp[at] = torch.linalg.vecdot(back, hidden).view(-1)
            back.mul_(weight)
            dw2.index_copy_(0, tile.experts, torch.bmm(g_rows.mT, hidden.mul_(weight).to(x.dtype)))
            d_gate, d_up = d_gate.mul_(back).to(x.dtype), d_up.mul_(back).to(x.dtype)
            dw1.index_copy_(0, tile.experts, torch.bmm(d_gate.mT, rows))
            dw3.index_copy_(0, tile.experts, torch.bmm(d_up.mT, rows))
            part = dx[at].view_as(rows)
            torch.bmm(d_gate, v1, out=part)
            torch.baddbmm(part, d_up, v3, out=part)
        d_weights = dp.index_select(0, layout.slot.view(-1)).view_as(weights).to(weights.dtype)
        return _sum(dx, layout, None, x.dtype), None, d_weights, dw1, dw3, dw2, None
