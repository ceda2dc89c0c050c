"""KDA token by token: the formula itself, and the twin every faster path is checked against.

Kimi Linear, arXiv 2510.26692, eq. 1, with the bounded decay of the Kimi K3 report, arXiv 2607.24653, eq. 5:

    S <- exp(g_t) * S                        decay first, rows are key channels
    S <- S + beta_t k_t (v_t - S^T k_t)^T    the delta is taken from the decayed state
    o_t = S^T q_t * scale                    read after the write
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g, beta, A_log, dt_bias


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype arithmetic is done in: float32, or float64 when an input is."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The log-decay of every key channel, at most zero.

    Bounded: `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`; with lower_bound None: `-exp(A_log) * softplus(g + dt_bias)`.

    Args:
        g: [..., H, K] raw logits. A_log: [H]. dt_bias: [H, K].

    Returns:
        [..., H, K] in at least float32.
    """
    dtype = compute_dtype(g, A_log, dt_bias)
    rate = A_log.to(dtype).exp()[:, None]
    shifted = g.to(dtype) + dt_bias.to(dtype)
    if lower_bound is None:
        return rate * F.logsigmoid(-shifted)  # F.softplus drops exp(-x) above 20
    return lower_bound * torch.sigmoid(rate * shifted)


def unit(x: Tensor) -> Tensor:
    """`x / sqrt(sum x² + 1e-6)` over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token: state [..., K, V], normalised q (already scaled) and k [..., K], v [..., V], decay exp(g) [..., K], beta [...].

    Returns:
        o [..., V] and the new state.
    """
    state = decay[..., None] * state
    predicted = (state * k[..., None]).sum(-2)
    state = state + (beta[..., None] * k)[..., None] * (v - predicted)[..., None, :]
    return (state * q[..., None]).sum(-2), state


def kda_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float,
    initial_state: Tensor | None,
    boundaries: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence; arguments as `atoll.ops.kda.kda` after its checks, `boundaries` the document boundaries as integers.

    Returns:
        o [B, T, H, V] in v's dtype, final state [N, H, K, V] in at least float32. Gradients by autograd.
    """
    dtype = compute_dtype(q, k, v, g, beta)
    decay = log_decay(g, A_log, dt_bias, lower_bound).to(dtype).exp()
    strength = torch.sigmoid(beta.to(dtype))
    query, key, value = unit(q.to(dtype)) * scale, unit(k.to(dtype)), v.to(dtype)
    batch, length, heads, width = k.shape
    spans = [(0, length)] if boundaries is None else list(itertools.pairwise(boundaries))
    outputs, finals = [], []
    for n, (start, stop) in enumerate(spans):
        if initial_state is None:
            state = value.new_zeros(batch, heads, width, v.shape[-1])
        else:
            state = (initial_state if boundaries is None else initial_state[n : n + 1]).to(dtype)
        for t in range(start, stop):
            o, state = advance(state, query[:, t], key[:, t], value[:, t], decay[:, t], strength[:, t])
            outputs.append(o)
        finals.append(state)
    out = torch.stack(outputs, 1) if outputs else value.new_zeros(v.shape)
    final = torch.cat(finals) if finals else value.new_zeros(0, heads, width, v.shape[-1])
    return out.to(v.dtype), final
