"""One decoding step of KDA in plain torch, the twin of the kernel: gather states and inputs, advance token by token, put back."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.ops.kda.reference import advance, compute_dtype, log_decay, unit


class ConvState(NamedTuple):
    """The short convolution's weight and the inputs it still remembers.

    weight: [C, 1, W], last tap for the current token; or three of them, for q, k and v.
    window: without `position` [S, W-1, C], the inputs before the current one, oldest first. With it a ring [S, R, C], R >= W-1+T:
        token i of slot s lies in row i mod R.
    position: int [S], tokens each slot has taken in. A step does not move it: add the tokens that are kept after the last layer,
        one addition for all layers. Tokens before a sequence's first count as zeros, so a slot's ring needs no clearing.
    """

    weight: Tensor | tuple[Tensor, Tensor, Tensor]
    window: Tensor
    position: Tensor | None = None

    def taps(self) -> tuple[Tensor, ...]:
        return self.weight if isinstance(self.weight, tuple) else (self.weight,)


class OutputNorm(NamedTuple):
    """The gated norm after the read: `weight * o * rsqrt(mean(o²) + eps) * sigmoid(gate)`; weight [V], gate [N, H*V] or [N, T, H*V]."""

    weight: Tensor
    gate: Tensor
    eps: float = 1e-5


class Tokens(NamedTuple):
    """x [N, T, C] before the convolution, g [N, T, H, K], beta [N, T, H]: everything that a call's tokens bring."""

    x: Tensor
    g: Tensor
    beta: Tensor


def _ring_rows(conv: ConvState, slots: Tensor, offsets: Tensor) -> Tensor:
    """Token numbers [N, …] at `offsets` from each slot's next token."""
    assert conv.position is not None
    return conv.position.index_select(0, slots)[:, None].to(torch.int64) + offsets.to(slots.device)


def _history(conv: ConvState, slots: Tensor, taps: int) -> Tensor:
    """The W-1 inputs before the call, [N, W-1, C]."""
    window = conv.window.index_select(0, slots)
    if conv.position is None:
        return window
    rows = _ring_rows(conv, slots, torch.arange(1 - taps, 0))
    index = (rows % window.shape[1])[:, :, None].expand(-1, -1, window.shape[2])
    return window.gather(1, index).masked_fill((rows < 0)[:, :, None], 0.0)


def _mix(tokens: Tokens, conv: ConvState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """All inputs that matter [N, W-1+T, C], and the convolved ones [N, T, C]."""
    weight = torch.cat([w[:, 0] for w in conv.taps()])  # [C, W]
    taps = weight.shape[1]
    wide = compute_dtype(tokens.x, weight)
    sequence = torch.cat((_history(conv, slots, taps).to(tokens.x.dtype), tokens.x), 1)
    blocks = sequence.unfold(1, taps, 1).to(wide)  # [N, T, C, W]
    return sequence, F.silu((blocks * weight.to(wide)).sum(-1)).to(tokens.x.dtype)


def step_reference(
    tokens: Tokens, A_log: Tensor, dt_bias: Tensor, state: Tensor, conv: ConvState, lower_bound: float | None, slots: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """T tokens of N sequences from states [N, H, K, V]: o [N, T, H, V], the state after each token, and the inputs [N, W-1+T, C].

    The state is rounded to its dtype after every token, so that T tokens in one call equal T calls.
    """
    n, length, heads, width = tokens.g.shape
    value = state.shape[3]
    sequence, mixed = _mix(tokens, conv, slots)
    dtype = compute_dtype(*tokens)
    q, k, v = mixed.to(dtype).split((heads * width, heads * width, heads * value), -1)
    q, k, v = (x.view(n, length, heads, -1) for x in (q, k, v))
    q, k = unit(q) * width**-0.5, unit(k)
    decay = log_decay(tokens.g, A_log, dt_bias, lower_bound).to(dtype).exp()
    strength = torch.sigmoid(tokens.beta.to(dtype))
    outputs, states = [], []
    for t in range(length):
        o, new = advance(state.to(dtype), q[:, t], k[:, t], v[:, t], decay[:, t], strength[:, t])
        state = new.to(state.dtype)
        outputs.append(o.to(tokens.x.dtype))
        states.append(state)
    return torch.stack(outputs, 1), states, sequence


def put_back(state: Tensor, conv: ConvState, slots: Tensor, states: list[Tensor], sequence: Tensor) -> None:
    """States and inputs into the pool, in place."""
    if state.dim() == 5:
        for t, new in enumerate(states):
            state[:, t].index_copy_(0, slots, new)
    else:
        state.index_copy_(0, slots, states[-1])
    keep = conv.taps()[0].shape[-1] - 1
    if conv.position is None:
        conv.window.index_copy_(0, slots, sequence[:, sequence.shape[1] - keep :].to(conv.window.dtype))
        return
    fresh = sequence[:, keep:].to(conv.window.dtype)
    rows = _ring_rows(conv, slots, torch.arange(fresh.shape[1])) % conv.window.shape[1]
    conv.window[slots[:, None], rows] = fresh
