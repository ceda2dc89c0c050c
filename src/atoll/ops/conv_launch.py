"""Launches the short convolution's kernels and registers them with torch: fake shapes, gradients. Triton is imported at first use."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.ops.dispatch import count, launch

_FLOATS = (torch.bfloat16, torch.float32)


class ConvConfig(NamedTuple):
    """Forward tile of rows and channels; backward channels, least rows of a segment, rows fetched together; warps of both."""

    rows: int = 16
    channels: int = 256
    warps: int = 4
    back_channels: int = 512
    back_rows: int = 64
    back_group: int = 4
    back_warps: int = 4


_SEGMENTS = 4096  # programs of the backward pass that are enough; longer segments have fewer partial sums and overlaps


def conv_refusal(x: Tensor, weight: Tensor, state: Tensor | None) -> str:
    """Why the kernels do not take this call; empty when they do."""
    if any(t.dtype not in _FLOATS for t in (x, weight, *(() if state is None else (state,)))):
        return "an input is neither bfloat16 nor float32"
    if not 2 <= weight.shape[-1] <= 8:
        return f"{weight.shape[-1]} taps are not 2 to 8"
    if x.shape[0] * x.shape[1] >= 2**31:
        return f"{x.shape[0] * x.shape[1]} tokens are 2^31 or more"
    return ""


def conv(x: Tensor, weight: Tensor, state: Tensor | None, edges: Tensor | None, length: int, final: bool) -> tuple[Tensor, Tensor]:
    """x [T, C], weight [C, W], state [N, W-1, C]; documents at `edges` int [N+1], or rows of `length` tokens.

    Returns y and, if wanted, the final state, else an empty tensor.
    """
    given = [t for t in (x, weight, state) if t is not None]
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
        return _op(x, weight, state, edges, length, final)
    return _forward(x, weight, state, edges, length, final)


def _documents(x: Tensor, edges: Tensor | None, length: int) -> int:
    return edges.numel() - 1 if edges is not None else x.shape[0] // length if length else 0


def _table(x: Tensor, edges: Tensor | None, length: int) -> tuple[int, int, int, int, int]:
    """T, C, LENGTH, DOCUMENTS, and the steps of a search among them."""
    documents = _documents(x, edges, length)
    return x.shape[0], x.shape[1], max(length, 1), documents, documents.bit_length()


def _columns(channels: int, most: int) -> int:
    return min(most, max(16, 1 << (channels - 1).bit_length()))


def _forward(
    x: Tensor, weight: Tensor, state: Tensor | None, edges: Tensor | None, length: int, final: bool, config: ConvConfig | None = None
) -> tuple[Tensor, Tensor]:
    from atoll.ops import conv_kernels

    count("short_conv triton")
    c = config or ConvConfig()
    x, weight = x.contiguous(), weight.contiguous()
    state = None if state is None else state.contiguous()
    table = _table(x, edges, length)
    tokens, channels, taps = *x.shape, weight.shape[1]
    block = _columns(channels, c.channels)
    y = torch.empty_like(x)
    last = x.new_empty(table[3] if final else 0, taps - 1, channels)
    flags: dict[str, Any] = {"W": taps, "PACKED": edges is not None, "HAS_STATE": state is not None}
    rows, columns = 1 << (taps - 2).bit_length(), -(-channels // block)
    launch(
        conv_kernels.conv_kernel, (-(-tokens // c.rows) * columns,), x,
        x, weight, state, edges, y, *table, BT=c.rows, BC=block, num_warps=c.warps, **flags,
    )  # fmt: skip
    launch(conv_kernels.final_kernel, (last.shape[0], columns), x, x, state, edges, last, *table[:3], ROWS=rows, BC=block, **flags)
    return y, last


def _backward(
    dy: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    state: Tensor | None,
    edges: Tensor | None,
    length: int,
    config: ConvConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from atoll.ops import conv_kernels

    c = config or ConvConfig()
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    state, dfinal = (None if t is None else t.contiguous() for t in (state, dfinal))
    table = _table(x, edges, length)
    tokens, channels, taps = *x.shape, weight.shape[1]
    block = _columns(channels, c.back_channels)
    blocks = -(-channels // block)
    segment = max(c.back_rows, -(-tokens * blocks // _SEGMENTS))
    segments = -(-tokens // segment)
    dx, partial = torch.empty_like(x), x.new_empty(segments, taps, channels, dtype=torch.float32)
    dstate = x.new_empty(0) if state is None else torch.empty_like(state)
    flags: dict[str, Any] = {"W": taps, "PACKED": edges is not None, "HAS_DFINAL": dfinal is not None}
    launch(
        conv_kernels.conv_back_kernel, (segments * blocks,), x,
        x, weight, state, edges, dy, dfinal, dx, partial, *table, segment, BC=block, GROUP=c.back_group, HAS_STATE=state is not None,
        num_warps=c.back_warps, **flags,
    )  # fmt: skip
    if state is not None:
        rows = 1 << (taps - 2).bit_length()
        launch(
            conv_kernels.initial_back_kernel, (state.shape[0], blocks), x,
            x, weight, state, edges, dy, dfinal, dstate, *table[:3], ROWS=rows, BC=block, **flags,
        )  # fmt: skip
    return dx, partial.sum(0).t().to(weight.dtype).contiguous(), dstate


def _conv_forward(x: Tensor, weight: Tensor, state: Tensor | None, edges: Tensor | None, length: int, final: bool) -> tuple[Tensor, Tensor]:
    return _forward(x, weight, state, edges, length, final)


def _conv_backward(
    dy: Tensor, dfinal: Tensor | None, x: Tensor, weight: Tensor, state: Tensor | None, edges: Tensor | None, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(dy, dfinal, x, weight, state, edges, length)


_op = torch.library.custom_op("atoll::short_conv", _conv_forward, mutates_args=())
_back = torch.library.custom_op("atoll::short_conv_backward", _conv_backward, mutates_args=())


@_op.register_fake
def _fake(x: Tensor, weight: Tensor, state: Tensor | None, edges: Tensor | None, length: int, final: bool) -> tuple[Tensor, Tensor]:
    documents = _documents(x, edges, length) if final else 0
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(documents, weight.shape[1] - 1, x.shape[1])


@_back.register_fake
def _back_fake(
    dy: Tensor, dfinal: Tensor | None, x: Tensor, weight: Tensor, state: Tensor | None, edges: Tensor | None, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight))
    return dx, dweight, x.new_empty(0) if state is None else torch.empty_like(state, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, state, edges, length, final = inputs
    ctx.save_for_backward(x, weight, state, edges)
    ctx.length, ctx.final = length, final


def _gradients(ctx: Any, dy: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, state, edges = ctx.saved_tensors
    dx, dweight, dstate = _back(dy, dfinal if ctx.final else None, x, weight, state, edges, ctx.length)
    return dx, dweight, None if state is None else dstate, None, None, None


_op.register_autograd(_gradients, setup_context=_setup)
