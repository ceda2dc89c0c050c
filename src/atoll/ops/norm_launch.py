"""Launches the norm kernels and registers them with torch: fake shapes, gradients. Triton is imported at the first launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.ops.dispatch import count, launch

LARGEST = 8192


class NormConfig(NamedTuple):
    """Tile of a program: rows, columns a piece, pieces; and its warps."""

    rows: int
    block: int
    pieces: int
    warps: int


def norm_config(width: int) -> NormConfig:
    """Pieces that waste the fewest lanes, the widest such, at most 8; narrow rows share a program."""
    least = 1 << max(0, (-(-width // 8) - 1).bit_length())  # 8 pieces must hold the row
    most = min(1024, 1 << max(0, (width - 1).bit_length()))
    blocks = [1 << e for e in range(4, 11) if min(max(least, 64), most) <= 1 << e <= max(most, 16)]
    block = min(blocks, key=lambda b: (-(-width // b) * b, -b))
    pieces = -(-width // block)
    rows = max(1, 2048 // (block * pieces))
    rows = 1 << (rows.bit_length() - 1)
    size = rows * block * pieces
    return NormConfig(rows, block, pieces, 8 if size > 4096 else 4)


def _back_programs(groups: int, config: NormConfig) -> int:
    """As many as 132 multiprocessors hold at once, whatever the card: the weight's gradient keeps one order of sums."""
    if config.block * config.pieces <= 512:
        return min(groups, 1056)
    return min(groups, 2112 // config.warps)


def norm_refusal(*tensors: Tensor) -> str:
    """Why the kernels do not take these tensors, the first of them the input; empty when they do."""
    if any(t.dtype not in (torch.bfloat16, torch.float32) for t in tensors):
        return "an input is neither bfloat16 nor float32"
    if not 1 <= tensors[0].shape[-1] <= LARGEST:
        return f"rows of {tensors[0].shape[-1]} are not 1 to {LARGEST} wide"
    return ""


def norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool) -> Tensor:
    """The norm of `x` [..., D] by the kernels; arguments as in `norm.py`. `mean`: eps joins the mean of the squares, else their sum."""
    tensors = [t for t in (x, weight, gate) if t is not None]
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return _op(x, weight, gate, eps, mean)[0]
    return _forward(x, weight, gate, eps, mean, keep=False)[0]


def _forward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, keep: bool = True, config: NormConfig | None = None
) -> tuple[Tensor, Tensor]:
    from atoll.ops import norm_kernels

    count("l2_norm triton" if weight is None else "rms_norm triton" if gate is None else "gated_rms_norm triton")
    x, width = x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    y, rstd = torch.empty_like(x), x.new_empty(rows if keep else 0, dtype=torch.float32)
    c = config or norm_config(width)
    launch(
        norm_kernels.norm_kernel, (-(-rows // c.rows),), x,
        x, weight, None if gate is None else gate.contiguous(), y, rstd if keep else None, rows, eps,
        D=width, COUNT=width if mean else 1, ROWS=c.rows, BLOCK=c.block, PIECES=c.pieces,
        WEIGHT=weight is not None, GATED=gate is not None, CAST=weight is not None and gate is None, KEEP=keep,
        num_warps=c.warps,
    )  # fmt: skip
    return y, rstd


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, gate: Tensor | None, rstd: Tensor, mean: bool, config: NormConfig | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    from atoll.ops import norm_kernels

    x, width = x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    dx = torch.empty_like(x)
    gate = None if gate is None else gate.contiguous()
    dgate = dy.new_empty(0) if gate is None else torch.empty_like(gate)
    c = config or norm_config(width)
    groups = -(-rows // c.rows)
    programs = _back_programs(groups, c)
    partial = x.new_empty(0 if weight is None else programs, width, dtype=torch.float32)
    launch(
        norm_kernels.norm_back_kernel, (programs,), x,
        x, weight, gate, rstd, dy.contiguous(), dx, dgate, partial, rows, groups, programs,
        D=width, COUNT=width if mean else 1, ROWS=c.rows, BLOCK=c.block, PIECES=c.pieces,
        WEIGHT=weight is not None, GATED=gate is not None, num_warps=c.warps,
    )  # fmt: skip
    return dx, partial.sum(0).to(x.dtype if weight is None else weight.dtype), dgate


def _norm_forward(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool) -> tuple[Tensor, Tensor]:
    return _forward(x, weight, gate, eps, mean)


def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, gate: Tensor | None, rstd: Tensor, mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(dy, x, weight, gate, rstd, mean)


_op = torch.library.custom_op("atoll::norm", _norm_forward, mutates_args=())
_back = torch.library.custom_op("atoll::norm_backward", _norm_backward, mutates_args=())


@_op.register_fake
def _fake(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@_back.register_fake
def _back_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, gate: Tensor | None, rstd: Tensor, mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dgate = dy.new_empty(0) if gate is None else torch.empty_like(gate, memory_format=torch.contiguous_format)
    return dx, x.new_empty(x.shape[-1], dtype=x.dtype if weight is None else weight.dtype), dgate


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, gate, _, mean = inputs
    ctx.save_for_backward(x, weight, gate, output[1])
    ctx.mean = mean


def _gradients(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, gate, rstd = ctx.saved_tensors
    dx, dweight, dgate = _back(dy, x, weight, gate, rstd, ctx.mean)
    return dx, None if weight is None else dweight, None if gate is None else dgate, None, None


_op.register_autograd(_gradients, setup_context=_setup)
