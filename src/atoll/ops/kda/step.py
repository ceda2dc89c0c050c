"""One decoding step of KDA, in plain torch: convolution, SiLU, norms, gate, delta update and read, for one token a slot."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.ops.kda.reference import advance, compute_dtype, log_decay, unit


class ConvState(NamedTuple):
    """The short convolution's weight and the inputs it still remembers.

    weight: [C, 1, W], last tap for the current token. window: [S, W-1, C] inputs before the current one, oldest first.
    """

    weight: Tensor
    window: Tensor


def _check(x_qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor, conv: ConvState, slots: Tensor | None) -> None:
    if g.dim() != 3 or beta.shape != g.shape[:2]:
        raise ValueError(f"kda_step: g has shape {tuple(g.shape)}, beta {tuple(beta.shape)}; they must be [N, H, K] and [N, H]")
    n, heads, width = g.shape
    if state.dim() != 4 or state.shape[1:3] != (heads, width):
        raise ValueError(f"kda_step: state has shape {tuple(state.shape)}; it must be [S, H, K, V] with H, K = {heads}, {width}")
    channels = heads * (2 * width + state.shape[3])
    if x_qkv.shape != (n, channels):
        raise ValueError(f"kda_step: x_qkv has shape {tuple(x_qkv.shape)}; it must be [N, H*(2K+V)] = {(n, channels)}")
    taps = conv.weight.shape[-1]
    if conv.weight.shape != (channels, 1, taps):
        raise ValueError(f"kda_step: conv.weight has shape {tuple(conv.weight.shape)}; it must be [C, 1, W] with C = {channels}")
    if conv.window.shape != (state.shape[0], taps - 1, channels):
        raise ValueError(f"kda_step: conv.window has shape {tuple(conv.window.shape)}; it must be {(state.shape[0], taps - 1, channels)}")
    if slots is None and state.shape[0] != n:
        raise ValueError(f"kda_step: state holds {state.shape[0]} slots for {n} tokens; pass slots to say which")


def kda_step(
    x_qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    conv: ConvState,
    *,
    lower_bound: float | None = -5.0,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, ConvState]:
    """One token a slot: short convolution, SiLU, L2 norms, gate, sigmoid of beta, delta update, read.

    The recurrence is Kimi Linear, arXiv 2510.26692, eq. 1.

    Args:
        x_qkv: [N, H*(2K+V)] projections before the convolution: all heads of q, then of k, then of v; scale K^-0.5.
        g: [N, H, K] raw decay logits. beta: [N, H] raw logits. A_log: [H]. dt_bias: [H, K].
        state: [S, H, K, V], float32 or wider.
        conv: `ConvState(weight [C, 1, W], window [S, W-1, C])`.
        lower_bound: bound of the log-decay; None for the softplus gate.
        slots: int64 [N], which of the S states each token belongs to, -1 to skip it. Without it token n belongs to state n.

    Returns:
        o [N, H, V] in x_qkv's dtype (zero where skipped), the state and the ConvState. Without slots these are new tensors;
        with slots `state` and `conv.window` are updated in place and returned.

    Raises:
        ValueError: a shape does not fit.
    """
    _check(x_qkv, g, beta, state, conv, slots)
    if slots is not None:
        return _pooled_step(x_qkv, g, beta, A_log, dt_bias, state, conv, lower_bound, slots)
    n, heads, width = g.shape
    wide = compute_dtype(x_qkv, conv.weight)
    sequence = torch.cat((conv.window.to(x_qkv.dtype), x_qkv[:, None]), 1)  # [N, W, C]
    mixed = F.silu((sequence.to(wide) * conv.weight[:, 0].t().to(wide)).sum(1)).to(x_qkv.dtype)
    dtype = compute_dtype(x_qkv, g, beta)
    q, k, v = mixed.to(dtype).split((heads * width, heads * width, heads * state.shape[3]), -1)
    q, k, v = (x.view(n, heads, -1) for x in (q, k, v))
    decay = log_decay(g, A_log, dt_bias, lower_bound).to(dtype).exp()
    o, new = advance(state.to(dtype), unit(q) * width**-0.5, unit(k), v, decay, torch.sigmoid(beta.to(dtype)))
    return o.to(x_qkv.dtype), new.to(state.dtype), ConvState(conv.weight, sequence[:, 1:].to(conv.window.dtype))


def _pooled_step(
    x_qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    conv: ConvState,
    lower_bound: float | None,
    slots: Tensor,
) -> tuple[Tensor, Tensor, ConvState]:
    """The step on a pool of states, in place; slot -1 is skipped."""
    active = torch.nonzero(slots >= 0)[:, 0]
    chosen = slots.index_select(0, active)
    x, g, beta = (t.index_select(0, active) for t in (x_qkv, g, beta))
    held = ConvState(conv.weight, conv.window.index_select(0, chosen))
    o, new, after = kda_step(x, g, beta, A_log, dt_bias, state.index_select(0, chosen), held, lower_bound=lower_bound)
    state.index_copy_(0, chosen, new)
    conv.window.index_copy_(0, chosen, after.window)
    out = o.new_zeros(slots.numel(), *o.shape[1:]).index_copy_(0, active, o)
    return out, state, conv
