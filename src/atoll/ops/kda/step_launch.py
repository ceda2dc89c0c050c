"""Launches the decoding step's kernel: which calls it takes, with which settings, and its registration with torch.

Triton is imported at the first launch. The op mutates what it is given and returns nothing, so nothing in it allocates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.ops.dispatch import count, launch
from atoll.ops.kda.step_reference import ConvState, OutputNorm
from atoll.ops.norm import gated_rms_norm

WIDTHS = (16, 32, 64, 128, 256)
MOST_TOKENS = 8
FUSED_STATE = 1 << 14  # largest K*V that one program holds whole in registers, as the norm over V needs
_FLOATS = (torch.bfloat16, torch.float32)


class StepConfig(NamedTuple):
    """Value columns a program, its warps, the most registers a thread (0: the compiler's choice), the cache policy for the state."""

    columns: int
    warps: int
    registers: int = 0
    evict: str = "evict_first"  # a state comes back only after all other layers', and the pool is larger than the cache


def step_config(sequences: int, heads: int, width: int, value: int, fused: bool) -> StepConfig:
    """Fixed settings, by measurement on an H200 (benchmarks/decode_log.md): slabs of 32 columns, of 16 where that gives fewer than two
    programs a multiprocessor; wider ones were slower at every batch.

    The norm needs all of V in one program: a head's 64 KiB are in flight at once, so few programs still load at full rate.
    """
    columns = value
    if not fused:
        fitting = [c for c in (32, 16) if c <= value]
        columns = next((c for c in fitting if sequences * heads * (value // c) >= 264), 16)
    # 32 to 64 state elements a thread, never fewer than a thread loads at once, or two warps would own one element
    warps = min(8, max(1, width * columns // 1024))
    crowded = sequences * heads * (value // columns) > 132 and width * columns > warps * 1024
    return StepConfig(columns, warps, 128 if crowded else 0)  # 64 elements a thread: two programs a multiprocessor with 128 registers


def step_refusal(x: tuple[Tensor, ...], inputs: tuple[Tensor, ...], state: Tensor, conv: ConvState, norm: OutputNorm | None) -> str:
    """Why the kernel does not take this call; empty when it does."""
    g = inputs[0]
    tensors = (*x, *inputs, state, *conv.taps(), conv.window, *(() if norm is None else norm[:2]))
    if any(t.dtype not in _FLOATS for t in tensors):
        return "an input is neither bfloat16 nor float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are asked for, and the step's kernel has none"
    if state.shape[-1] not in WIDTHS or state.shape[-2] not in WIDTHS:
        return f"K, V = {state.shape[-2]}, {state.shape[-1]} are not both among {WIDTHS}"
    if not 2 <= conv.taps()[0].shape[-1] <= 8:
        return f"the convolution has {conv.taps()[0].shape[-1]} taps, not 2 to 8"
    if g.dim() == 4 and not 1 <= g.shape[1] <= MOST_TOKENS:
        return f"T = {g.shape[1]} tokens a call are not 1 to {MOST_TOKENS}"
    return ""


def _apart(x: tuple[Tensor, ...], widths: tuple[int, ...], dim: int) -> list[Tensor]:
    return list(x) if len(x) == 3 else list(x[0].split(widths, dim))


def _rows(x: Tensor) -> Tensor:
    """[N, T, C] or [N, C] as [N*T, C] with contiguous channels."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def normed(o: Tensor, norm: OutputNorm, slots: Tensor | None, backend: str = "auto") -> Tensor:
    """The gated norm in a call of its own; skipped sequences stay zero whatever their gate is."""
    o = gated_rms_norm(o, norm.weight, norm.gate.reshape(o.shape), norm.eps, backend=backend)
    return o if slots is None else o.masked_fill((slots < 0).view(-1, *[1] * (o.dim() - 1)), 0.0)


def launch_step(
    x: tuple[Tensor, ...],
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    conv: ConvState,
    lower_bound: float | None,
    slots: Tensor | None,
    accepted: Tensor | None,
    norm: OutputNorm | None,
    out: Tensor | None,
    config: StepConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Checked arguments of `kda_step`; `state` is updated in place. Returns the outputs and the window to keep."""
    heads, width, value = state.shape[-3:]
    tokens, taps = (g.shape[1] if g.dim() == 4 else 1), conv.taps()[0].shape[-1]
    parts = (heads * width, heads * width, heads * value)
    o = x[0].new_empty(*g.shape[:-1], value) if out is None else out
    if not o.is_contiguous():
        raise ValueError("kda_step: out must be contiguous")
    fused = norm is not None and width * value <= FUSED_STATE
    fresh = None if conv.position is not None else conv.window.new_empty(g.shape[0], *conv.window.shape[1:])
    gate, weight, eps = (norm.gate.contiguous(), norm.weight, norm.eps) if fused and norm is not None else (None, None, 0.0)
    config = config or step_config(g.shape[0], heads, width, value, fused)
    arguments = (
        [_rows(t) for t in _apart(x, parts, -1)], [t.contiguous() for t in _apart(conv.taps(), parts, 0)],
        g.contiguous(), beta.contiguous(), A_log, dt_bias, state, conv.window, fresh, slots, conv.position, accepted, gate, weight, o,
        tokens, taps, lower_bound, eps, config.columns, config.warps, config.registers, config.evict,
    )  # fmt: skip
    (torch.ops.atoll.kda_step if torch.compiler.is_compiling() else _run)(*arguments)
    if norm is not None and not fused:
        o.copy_(normed(o, norm, slots, "triton"))
    return o, conv.window if fresh is None or slots is not None else fresh


def _run(
    x: list[Tensor],
    weights: list[Tensor],
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    window: Tensor,
    fresh: Tensor | None,
    slots: Tensor | None,
    position: Tensor | None,
    accepted: Tensor | None,
    gate: Tensor | None,
    norm: Tensor | None,
    out: Tensor,
    tokens: int,
    taps: int,
    lower_bound: float | None,
    eps: float,
    columns: int,
    warps: int,
    registers: int,
    evict: str,
) -> None:
    from atoll.ops.kda import step_kernels

    count("kda_step triton")
    heads, width, value = state.shape[-3:]
    sequences = g.shape[0]
    drafts = state.dim() == 5
    launch(
        step_kernels.step_kernel, (value // columns, heads, sequences), state,
        *x, *weights, g, beta, A_log, dt_bias, state, window, fresh, slots, position, accepted, gate, norm, out,
        *(t.stride(0) for t in x), state.stride(0), state.stride(1) if drafts else 0, *state.stride()[-3:],
        heads, width**-0.5, lower_bound or 0.0, eps,
        K=width, V=value, BV=columns, T=tokens, W=taps, TAPS=1 << (taps - 1).bit_length(), ROWS=window.shape[1],
        MAJOR=state.stride()[-2:] == (1, width), RING=position is not None, DRAFTS=drafts, HAS_SLOTS=slots is not None,
        HAS_ACCEPTED=accepted is not None, BOUNDED=lower_bound is not None, FUSED=gate is not None, EVICT=evict,
        num_warps=warps, maxnreg=registers or None,
    )  # fmt: skip
    if fresh is not None and slots is not None:
        size = window[:1].numel()
        launch(step_kernels.commit_kernel, (-(-size // 1024), sequences), state, fresh, window, slots, size, BLOCK=1024, num_warps=4)


_op = torch.library.custom_op("atoll::kda_step", _run, mutates_args=("state", "window", "fresh", "out"))


@_op.register_fake
def _fake(*_: object) -> None:
    return None
