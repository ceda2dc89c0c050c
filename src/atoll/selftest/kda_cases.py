"""Checks of delta attention: whole sequences, packed documents, segments, the decoding step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.ops import kda, kda_step
from atoll.ops.conv import short_conv
from atoll.ops.kda import ConvState, OutputNorm
from atoll.selftest.case import Case, Trial, Values

_NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state")
_BF16 = {"o": 0.005, "final": 0.005, **dict.fromkeys(("dq", "dk", "dv", "dstate"), 0.008), "": 0.02}
LIMITS = {torch.bfloat16: _BF16, torch.float32: {"": 2e-5}, torch.float64: {"": 1e-9}}


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, documents: int, device: torch.device) -> list[Tensor]:
    """Random inputs and states, rounded to `dtype`; what is float32 in a model (A_log, dt_bias, states) at least that."""
    batch, length, heads, width, value = shape
    draw = torch.Generator().manual_seed(1)
    lead = (batch, length, heads)
    shapes = [
        (*lead, width),
        (*lead, width),
        (*lead, value),
        (*lead, width),
        lead,
        (heads,),
        (heads, width),
        (documents, heads, width, value),
    ]
    tensors = [torch.randn(s, generator=draw) for s in shapes]
    tensors[5], tensors[6] = 0.3 * tensors[5], tensors[6] - 1.0
    wide = torch.promote_types(dtype, torch.float32)
    return [x.to(device, dtype if i < 5 else wide) for i, x in enumerate(tensors)]


def _kda(inputs: list[Tensor], edges: Tensor | None, bound: float | None, backend: str) -> Values:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, final = kda(*leaves[:7], lower_bound=bound, initial_state=leaves[7], output_final_state=True, cu_seqlens=edges, backend=backend)
    assert final is not None
    draw = torch.Generator().manual_seed(2)
    ups = [torch.randn(x.shape, generator=draw).to(torch.bfloat16).to(x) for x in (o, final)]
    grads = torch.autograd.grad((o, final), leaves, ups)
    return {"o": o.detach(), "final": final.detach(), **{f"d{name}": x for name, x in zip(_NAMES, grads, strict=True)}}


def _case(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    paths: tuple[str, str],
    edges: list[int] | None = None,
    bound: float | None = -5.0,
) -> Case:
    def build(device: torch.device) -> Trial:
        inputs = _inputs(shape, dtype, shape[0] if edges is None else len(edges) - 1, device)
        cuts = None if edges is None else torch.tensor(edges, device=device)
        return Trial(
            lambda: _kda(inputs, cuts, bound, paths[0]),
            lambda: _kda([x.double() for x in inputs], cuts, bound, paths[1]),
            LIMITS[dtype],
        )

    return Case(name, "x".join(map(str, shape)), str(dtype)[6:], build)


def _step(sequences: int, heads: int, width: int, dtype: torch.dtype) -> Case:
    """The decoding kernel with a ring, slots and the gated norm, against its twin in float64."""

    def build(device: torch.device) -> Trial:
        draw = torch.Generator().manual_seed(3)
        channels = 3 * heads * width

        def normal(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=draw).to(device, kind)

        tokens = [
            normal(sequences, channels, kind=dtype),
            normal(sequences, heads, width, kind=dtype),
            normal(sequences, heads, kind=dtype),
        ]
        rest = [0.3 * normal(heads), normal(heads, width) - 1.0]
        state = normal(sequences, heads, width, width).transpose(-1, -2)
        taps, ring = normal(channels, 1, 4), normal(sequences, 8, channels, kind=dtype)
        scale, gate = normal(width), normal(sequences, heads * width, kind=dtype)
        position = torch.arange(sequences, device=device)
        slots = torch.arange(sequences - 1, -1, -1, device=device)

        def run(kind: torch.dtype | None, backend: str) -> Values:
            def cast(x: Tensor) -> Tensor:
                return x.clone() if kind is None else x.to(kind)

            conv = ConvState(cast(taps), cast(ring), position)
            held = cast(state)
            norm = OutputNorm(cast(scale), cast(gate))
            step: Callable[..., Any] = kda_step
            with torch.no_grad():
                given = [cast(x) for x in (*tokens, *rest)]
                o, held, conv = step(*given, held, conv, slots=slots, norm=norm, backend=backend)
            return {"o": o, "state": held, "window": conv.window}

        limit = 5e-3 if dtype == torch.bfloat16 else 1e-5
        return Trial(lambda: run(None, "triton"), lambda: run(torch.float64, "torch"), {"": limit})

    return Case("kda_step", f"{sequences} x {heads}x{width}", str(dtype)[6:], build)


def _steps_equal_sequences() -> Case:
    """Token by token equals the whole sequence, convolution included."""

    def build(device: torch.device) -> Trial:
        draw = torch.Generator().manual_seed(4)
        x, g, beta, taps = (torch.randn(s, generator=draw).double().to(device) for s in ((2, 9, 72), (2, 9, 3, 8), (2, 9, 3), (72, 1, 4)))
        A_log, bias = torch.zeros(3).double().to(device), torch.randn(3, 8, generator=draw).double().to(device)

        def steps() -> Values:
            state, conv, outs = x.new_zeros(2, 3, 8, 8), ConvState(taps, x.new_zeros(2, 3, 72)), []
            for t in range(9):
                o, state, conv = kda_step(x[:, t], g[:, t], beta[:, t], A_log, bias, state, conv, backend="torch")
                outs.append(o)
            return {"o": torch.stack(outs, 1), "state": state}

        def whole() -> Values:
            q, k, v = (y.reshape(2, 9, 3, 8) for y in short_conv(x, taps, backend="torch")[0].split(24, -1))
            o, state = kda(q, k, v, g, beta, A_log, bias, output_final_state=True, backend="recurrent")
            assert state is not None
            return {"o": o, "state": state}

        return Trial(steps, whole, {"": 1e-9})

    return Case("kda_step", "9 steps, 2 x 3x8", "float64", build)


def cases(card: bool) -> list[Case]:
    """On a card the kernels against the chunks in float64; on a CPU the chunks against the recurrence."""
    if not card:
        twins, packed = ("chunk", "recurrent"), [0, 0, 40, 41, 90]
        found = [_case("kda chunks", (2, 70, 2, 16, 8), torch.float64, twins)]
        found += [_case(f"kda packed, bound {b}", (1, 90, 2, 16, 8), torch.float64, twins, packed, b) for b in (-5.0, None)]
        return [*found, _steps_equal_sequences()]
    kernels = ("triton", "chunk")
    found = []
    for dtype, (heads, length) in itertools.product((torch.bfloat16, torch.float32), ((16, 2000),)):
        found.append(_case("kda", (1, length, heads, 128, 128), dtype, kernels))
        found.append(_case("kda packed", (1, 1500, 8, 128, 128), dtype, kernels, [0, 0, 700, 701, 1500]))
        found.append(_case("kda segments", (1, 16000, 2, 128, 128), dtype, kernels, [0, 15000, 15000, 16000]))
        found.append(_step(1, 96, 128, dtype))
        found.append(_step(32, 96, 128, dtype))
    return [*found, _case("kda", (1, 1000, 4, 64, 64), torch.bfloat16, kernels)]
