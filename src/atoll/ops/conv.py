"""Short causal depthwise convolution with SiLU, before the delta attention (Kimi Linear, arXiv 2510.26692, §3).

Every document is laid out behind W-1 rows of history (zeros, or the given state), so one sweep over all rows serves packed
documents, states and their gradients with no special case: rows of history feed outputs and receive gradients, and that is all.
On a GPU the kernels of `conv_launch.py` do the same in one pass each way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.conv_launch import conv, conv_refusal
from atoll.ops.dispatch import use_triton

_CPU_BLOCK = 1 << 17  # elements a sweep touches at once on a CPU: what stays in a core's cache between the taps


class _Layout(NamedTuple):
    """Where tokens and history rows lie in the padded [R, C] matrix."""

    source: Tensor  # [R] token shown in each row (history rows show some token and are then overwritten)
    token: Tensor  # [B*T] row of each token
    history: Tensor  # [N*(W-1)] rows before each document
    last: Tensor  # [N*(W-1)] rows that become the final state


def _layout(boundaries: Tensor, tokens: int, taps: int) -> _Layout:
    history = taps - 1
    device = boundaries.device
    documents = boundaries.numel() - 1
    rows = tokens + documents * history
    starts = boundaries[:-1] + torch.arange(documents, device=device) * history  # first history row of each document
    offsets = torch.arange(history, device=device)
    index = torch.arange(tokens, device=device)
    token = index + history * torch.searchsorted(boundaries[1:], index, right=True).add_(1)
    source = torch.zeros(rows, dtype=torch.int64, device=device).index_copy_(0, token, index)
    before = (starts[:, None] + offsets).reshape(-1)
    last = (starts[:, None] + (boundaries[1:] - boundaries[:-1])[:, None] + offsets).reshape(-1)
    return _Layout(source, token, before, last)


def _padded(x: Tensor, state: Tensor | None, layout: _Layout) -> Tensor:
    """[R, C]: documents of `x` [T, C], each behind its history."""
    if x.shape[0] == 0:
        padded = x.new_zeros(layout.source.numel(), x.shape[1])
    else:
        padded = x.index_select(0, layout.source)
    if state is None:
        return padded.index_fill_(0, layout.history, 0.0)
    return padded.index_copy_(0, layout.history, state.reshape(-1, x.shape[1]).to(x.dtype))


def _taps(padded: Tensor, weight: Tensor) -> Tensor:
    """sum_j weight[:, j] * padded[r + j], the convolution before SiLU: [R, C] to [R-W+1, C]. weight [W, C]."""
    taps = weight.shape[0]
    rows = padded.shape[0] - taps + 1
    out = padded[:rows] * weight[0]
    for j in range(1, taps):
        out.addcmul_(padded[j : j + rows], weight[j])
    return out


def _block_rows(padded: Tensor) -> int:
    if padded.device.type != "cpu":
        return max(1, padded.shape[0])
    return max(64, _CPU_BLOCK // max(1, padded.shape[1]))


def _wide_dtype(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Tensor | None, layout: _Layout) -> tuple[Tensor, Tensor]:
        wide = _wide_dtype(x, weight)
        padded = _padded(x, state, layout)
        taps = weight.t().to(wide).contiguous()  # [W, C]
        history, step = taps.shape[0] - 1, _block_rows(padded)
        out = x.new_empty(padded.shape[0] - history, x.shape[1])
        for a in range(0, out.shape[0], step):
            block = padded[a : a + step + history].to(wide)
            out[a : a + step] = F.silu(_taps(block, taps), inplace=True)
        ctx.save_for_backward(x, weight, *([] if state is None else [state]))
        ctx.layout = layout
        return out.index_select(0, layout.token - history), padded.index_select(0, layout.last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dy, dfinal = grad_outputs
        x, weight, *rest = ctx.saved_tensors
        state, layout = (rest[0] if rest else None), ctx.layout
        wide = _wide_dtype(x, weight)
        taps = weight.t().to(wide).contiguous()
        padded = _padded(x, state, layout)
        rows, step = padded.shape[0], _block_rows(padded)
        # upstream gradient by the row of its newest input; zero on history rows, so nothing crosses a document
        upstream = dy.new_zeros(rows, dy.shape[1]).index_copy_(0, layout.token, dy)
        dpadded = x.new_empty(padded.shape, dtype=wide)
        dtaps = torch.zeros_like(taps)
        for a in range(0, rows, step):
            b = min(a + step, rows)
            _backward_block(padded, upstream, taps, dpadded, dtaps, a, b)
        dpadded.index_add_(0, layout.last, dfinal.to(wide))
        dx = dpadded.index_select(0, layout.token).to(x.dtype)
        dstate = None if state is None else dpadded.index_select(0, layout.history).view(state.shape).to(state.dtype)
        return dx, dtaps.t().to(weight.dtype), dstate, None


def _backward_block(padded: Tensor, upstream: Tensor, taps: Tensor, dpadded: Tensor, dtaps: Tensor, a: int, b: int) -> None:
    """Gradients of padded rows [a, b): fills `dpadded[a:b]`, adds the block's share to `dtaps`."""
    history, rows = taps.shape[0] - 1, padded.shape[0]
    first = max(a, history)  # rows below `history` are history of the first document: no output ends there
    stop = min(b + history, rows)
    grad = torch.zeros(b - a + history, taps.shape[1], dtype=taps.dtype, device=taps.device)
    if stop > first:
        window = padded[first - history : stop].to(taps.dtype)
        before = _taps(window, taps)
        sigmoid = torch.sigmoid(before)
        slope = before.mul_(1 - sigmoid).add_(1).mul_(sigmoid)  # silu'(u) = s (1 + u (1 - s))
        part = grad[first - a : stop - a]
        torch.mul(slope, upstream[first:stop], out=part)
        own = grad[first - a : b - a]  # each row's weights are counted once, in the block that owns it
        for j in range(history + 1):
            dtaps[j] += (own * window[j : j + own.shape[0]]).sum(0)
    out = dpadded[a:b]
    torch.mul(grad[: b - a], taps[history], out=out)
    for lag in range(1, history + 1):
        out.addcmul_(grad[lag : lag + b - a], taps[history - lag])


def _check(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if x.dim() != 3:
        raise ValueError(f"short_conv: x has shape {tuple(x.shape)}; it must be [B, T, C]")
    if weight.dim() != 3 or weight.shape[:2] != (x.shape[2], 1):
        raise ValueError(f"short_conv: weight has shape {tuple(weight.shape)}; it must be [C, 1, W] with C = {x.shape[2]}")
    if cu_seqlens is not None and x.shape[0] != 1:
        raise ValueError(f"short_conv: cu_seqlens needs a batch of 1, got B = {x.shape[0]}; flatten the documents into one row")
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    expected = (count, weight.shape[2] - 1, x.shape[2])
    if state is not None and tuple(state.shape) != expected:
        raise ValueError(f"short_conv: initial_state has shape {tuple(state.shape)}; it must be [N, W-1, C] = {expected}")


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution, then SiLU: `silu(sum_j weight[c, 0, j] * x[t - W + 1 + j, c])`.

    Args:
        x: [B, T, C], any floating dtype; sums in float32 (float64 for float64).
        weight: [C, 1, W]; the last tap multiplies the current token.
        initial_state: [N, W-1, C], the inputs before each sequence, oldest first; zeros when absent. N = B, or the number of documents.
        cu_seqlens: int64 [N+1], document boundaries when B = 1; empty documents are allowed.
        output_final_state: also return the last W-1 inputs of each sequence.
        backend: "auto", "triton" or "torch".

    Returns:
        y [B, T, C] in x's dtype, and the final state [N, W-1, C] in x's dtype or None.

    Raises:
        ValueError: a shape does not fit.
    """
    _check(x, weight, initial_state, cu_seqlens)
    batch, length, channels = x.shape
    refusal = conv_refusal(x, weight, initial_state) if x.is_cuda or backend == "triton" else ""
    # without tokens there is nothing to gain, and rows of no length cannot be counted
    if use_triton("short_conv", backend, x.is_cuda, refusal) and x.numel():
        edges = None if cu_seqlens is None else cu_seqlens.to(x.device)
        y, final = conv(x.reshape(-1, channels), weight[:, 0], initial_state, edges, length, output_final_state)
        return y.view(x.shape), final if output_final_state else None
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, batch * length + 1, max(length, 1), device=x.device)[: batch + 1]
        if length == 0:
            cu_seqlens = torch.zeros(batch + 1, dtype=torch.int64, device=x.device)
    layout = _layout(cu_seqlens.to(device=x.device, dtype=torch.int64), batch * length, weight.shape[2])
    y, final = _ShortConv.apply(x.reshape(-1, channels), weight[:, 0], initial_state, layout)  # pyright: ignore[reportGeneralTypeIssues]
    state = final.view(-1, weight.shape[2] - 1, channels) if output_final_state else None
    return y.view(x.shape), state
