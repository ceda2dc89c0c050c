"""One decoding step of KDA: convolution, SiLU, norms, gate, delta update and read. One kernel on a GPU; its twin in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.ops.dispatch import count, use_triton
from atoll.ops.kda.step_launch import launch_step, normed, step_refusal
from atoll.ops.kda.step_reference import ConvState, OutputNorm, Tokens, put_back, step_reference

__all__ = ["ConvState", "OutputNorm", "kda_step"]

Parts = tuple[Tensor, Tensor, Tensor]


def _expect(name: str, shape: tuple[int, ...], expected: tuple[int, ...], letters: str) -> None:
    if tuple(shape) != expected:
        raise ValueError(f"kda_step: {name} has shape {tuple(shape)}; it must be {letters} = {expected}")


def _check_inputs(x: tuple[Tensor, ...], g: Tensor, beta: Tensor, state: Tensor, conv: ConvState) -> int:
    """Raises what does not fit; returns the number of channels."""
    if g.dim() not in (3, 4) or beta.shape != g.shape[:-1]:
        raise ValueError(f"kda_step: g has shape {tuple(g.shape)}, beta {tuple(beta.shape)}; they must be [N, H, K] and [N, H]")
    heads, width = g.shape[-2:]
    if state.dim() not in (4, 5) or state.shape[-3:-1] != (heads, width):
        raise ValueError(f"kda_step: state has shape {tuple(state.shape)}; it must be [S, H, K, V] with H, K = {heads}, {width}")
    parts = (heads * width, heads * width, heads * state.shape[-1])
    widths = parts if len(x) == 3 else (sum(parts),)
    for tensor, channels in zip(x, widths, strict=True):
        _expect("x_qkv", tensor.shape, (*g.shape[:-2], channels), "[N, H*(2K+V)]")
    weights, taps = conv.taps(), conv.taps()[0].shape[-1]
    for weight, channels in zip(weights, parts if len(weights) == 3 else (sum(parts),), strict=True):
        _expect("conv.weight", weight.shape, (channels, 1, taps), "[C, 1, W]")
    return sum(parts)


def _check_memory(
    g: Tensor, state: Tensor, conv: ConvState, channels: int, slots: Tensor | None, accepted: Tensor | None, out: Tensor | None
) -> None:
    sequences, tokens = g.shape[0], g.shape[1] if g.dim() == 4 else 1
    rows, taps = conv.window.shape[1], conv.taps()[0].shape[-1]
    if conv.position is None:
        _expect("conv.window", conv.window.shape, (state.shape[0], taps - 1, channels), "[S, W-1, C]")
    else:
        _expect("conv.window", conv.window.shape, (state.shape[0], rows, channels), "[S, R, C]")
        _expect("conv.position", conv.position.shape, (state.shape[0],), "[S]")
        if rows < taps - 1 + tokens:
            raise ValueError(f"kda_step: the ring conv.window has {rows} rows; {tokens} tokens need W-1+T = {taps - 1 + tokens}")
    if slots is None and state.shape[0] != sequences:
        raise ValueError(f"kda_step: state holds {state.shape[0]} slots for {sequences} tokens; pass slots to say which")
    if slots is not None:
        _expect("slots", slots.shape, (sequences,), "[N]")
    if state.dim() == 5 and (conv.position is None or state.shape[1] < tokens):
        raise ValueError(f"kda_step: state {tuple(state.shape)} keeps a state a draft; it needs conv.position and D >= T = {tokens}")
    if accepted is not None:
        if state.dim() != 5:
            raise ValueError("kda_step: accepted chooses among the states of drafts; state must be [S, D, H, K, V]")
        _expect("accepted", accepted.shape, (sequences,), "[N]")
    if out is not None:
        _expect("out", out.shape, (*g.shape[:-1], state.shape[-1]), "[N, H, V] or [N, T, H, V]")


def kda_step(
    x_qkv: Tensor | Parts,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    conv: ConvState,
    *,
    lower_bound: float | None = -5.0,
    slots: Tensor | None = None,
    accepted: Tensor | None = None,
    norm: OutputNorm | None = None,
    out: Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, ConvState]:
    """One token a slot, or a few: short convolution, SiLU, L2 norms, gate, sigmoid of beta, delta update, read, gated norm if given.

    The recurrence is Kimi Linear, arXiv 2510.26692, eq. 1; the scale K^-0.5.

    Several tokens a call have a T after the N: x_qkv [N, T, C], g [N, T, H, K], beta [N, T, H], and the result [N, T, H, V]. For
    speculative decoding `state` is [S, D, H, K, V], D >= T, and `conv` has a ring and positions. The state after token t goes to
    state[slot, t]; the next call starts from state[slot, accepted - 1], and with the position moved by `accepted` what was rejected
    is overwritten.

    Args:
        x_qkv: [N, H*(2K+V)] projections before the convolution: all heads of q, then of k, then of v; or the three apart.
        g: [N, H, K] raw decay logits. beta: [N, H] raw logits. A_log: [H]. dt_bias: [H, K].
        state: [S, H, K, V], float32, wider or bfloat16, any strides. On a GPU V-major memory (K contiguous) is the fast one.
        conv: `ConvState(weight [C, 1, W], window [S, W-1, C])`, or with a ring and positions.
        lower_bound: bound of the log-decay; None for the softplus gate.
        slots: int [N], which of the S states each sequence owns, each at most once, -1 to skip it. Without it n owns state n.
        accepted: int [N], 1 to D: how many tokens of the previous call were kept. Without it the call starts from draft 0's state.
        norm: `OutputNorm(weight [V], gate [N, H*V], eps)`, applied to the result as rounded to x_qkv's dtype.
        out: where to put the result; contiguous.
        inplace: update `state` in place without slots too. A plain window is then still a new tensor.
        backend: "auto", "triton" (no gradients) or "torch".

    Returns:
        o [N, H, V] in x_qkv's dtype (zero where skipped), the state and the ConvState. Without slots these are new tensors;
        with slots `state` and `conv.window` are updated in place and returned. A ring and drafts are always updated in place.
        With a ring, in place and with `out`, nothing is allocated and one kernel runs: fit for a CUDA graph.

    Raises:
        ValueError: a shape or the backend does not fit.
    """
    x = x_qkv if isinstance(x_qkv, tuple) else (x_qkv,)
    channels = _check_inputs(x, g, beta, state, conv)
    _check_memory(g, state, conv, channels, slots, accepted, out)
    keep = not inplace and slots is None and conv.position is None
    refusal = step_refusal(x, (g, beta, A_log, dt_bias), state, conv, norm)
    if use_triton("kda_step", backend, g.is_cuda, refusal):
        if keep:
            state = state.clone()
        o, window = launch_step(x, g, beta, A_log, dt_bias, state, conv, lower_bound, slots, accepted, norm, out)
        return o, state, conv._replace(window=window)
    if not (g.is_cuda and refusal) and not torch.compiler.is_compiling():
        count("kda_step torch")
    tokens = Tokens(torch.cat(x, -1), g, beta)
    if g.dim() == 3:
        tokens = Tokens(*(t[:, None] for t in tokens))
    o, state, conv = _torch_step(tokens, A_log, dt_bias, state, conv, lower_bound, slots, accepted, keep)
    o = o.view(*g.shape[:-1], -1)
    if norm is not None:
        o = normed(o, norm, slots, backend)
    return (o if out is None else out.copy_(o)), state, conv


def _torch_step(
    tokens: Tokens,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    conv: ConvState,
    lower_bound: float | None,
    slots: Tensor | None,
    accepted: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, ConvState]:
    """The twin on active slots only; a new state and window with `keep`, else in place."""
    rest = (A_log, dt_bias)
    if slots is None:
        active = chosen = torch.arange(tokens.g.shape[0], device=tokens.g.device)
    else:
        active = torch.nonzero(slots >= 0)[:, 0]
        chosen = slots.index_select(0, active).to(torch.int64)
    held = state
    if state.dim() == 5:
        draft = torch.zeros_like(chosen) if accepted is None else accepted.index_select(0, active).to(torch.int64) - 1
        held = state[chosen, draft]
    elif slots is not None:
        held = state.index_select(0, chosen)
    given = tokens if slots is None else Tokens(*(t.index_select(0, active) for t in tokens))
    o, states, sequence = step_reference(given, *rest, held, conv, lower_bound, chosen)
    if slots is not None:
        o = o.new_zeros(slots.numel(), *o.shape[1:]).index_copy_(0, active, o)
    window = sequence[:, sequence.shape[1] + 1 - conv.taps()[0].shape[-1] :].to(conv.window.dtype)
    if keep:
        return o, states[-1], conv._replace(window=window)
    if slots is None and conv.position is None:
        return o, state.copy_(states[-1]), conv._replace(window=window)
    put_back(state, conv, chosen, states, sequence)
    return o, state, conv
