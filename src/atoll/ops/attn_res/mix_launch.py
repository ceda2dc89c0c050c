"""Launches the mix's kernels on [N, D] rows. Triton is imported at the first launch; settings depend on the shape alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.ops.dispatch import count, launch
from atoll.ops.norm_launch import LARGEST, norm_config

MOST_SOURCES = 64  # of one kernel: a source more is a stretch of code more
FLOATS = (torch.bfloat16, torch.float32)


class MixConfig(NamedTuple):
    """Tokens, columns a piece and pieces of a program, as in the norms; warps and stages forward; warps, stages, the most registers
    a thread may have (0: as many as it likes) and programs backward."""

    rows: int
    block: int
    pieces: int
    warps: int
    stages: int
    back_warps: int
    back_stages: int
    back_registers: int
    programs: int


def mix_config(width: int, sources: int, out_norm: bool) -> MixConfig:
    """One setting a shape, whatever the card: the gradients of the vectors keep one order of sums.

    Backward a thread holds, a column, the keys, their share, the gradient and a source, with `out_norm` also its share and the mix:
    twice the warps then, so that 16 warps of at most 128 registers fill a multiprocessor either way.
    """
    rows, block, pieces, warps = norm_config(width)
    back_warps = 2 * warps if out_norm else warps
    stages = 3 if sources > 1 else 1
    return MixConfig(rows, block, pieces, warps, stages, back_warps, stages, 128, 2112 // back_warps)


def mix_refusal(sources: Sequence[Tensor], vectors: Sequence[Tensor]) -> str:
    """Why the kernels do not take this mix; empty when they do."""
    if any(t.dtype not in FLOATS for t in (*sources, *vectors)):
        return "an input is neither bfloat16 nor float32"
    if not 1 <= sources[0].shape[-1] <= LARGEST:
        return f"rows of {sources[0].shape[-1]} are not 1 to {LARGEST} wide"
    return ""


def mix_forward(
    sources: list[Tensor],
    delta: Tensor | None,
    mean: Tensor | None,
    lse: Tensor | None,
    query: Tensor,
    norm: Tensor,
    out_norm: Tensor | None,
    eps: float,
    out_eps: float,
    dtype: torch.dtype,
    keep: bool,
    config: MixConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mix [N, D] in `dtype`; the last source with delta added; with `keep` the log of the sum of exp(score) [N]. Else empty."""
    from atoll.ops.attn_res import mix_kernels

    count("attn_res triton" if mean is None else "attn_res phase two triton")
    like = sources[0] if sources else mean
    assert like is not None
    tokens, width = like.shape
    c = config or mix_config(width, len(sources), out_norm is not None)
    out = like.new_empty(tokens, width, dtype=dtype)
    last = like.new_empty(0) if delta is None else torch.empty_like(sources[-1])
    out_lse = like.new_empty(tokens if keep else 0, dtype=torch.float32)
    launch(
        mix_kernels.mix_kernel, (-(-tokens // c.rows),), like,
        tuple(sources) or (mean,), delta, last, mean, lse, query, norm, out_norm, out, out_lse, tokens, eps, out_eps,
        R=len(sources), D=width, ROWS=c.rows, BLOCK=c.block, PIECES=c.pieces, STAGES=c.stages, HAS_DELTA=delta is not None,
        CARRY=mean is not None, OUT_NORM=out_norm is not None, KEEP=keep, num_warps=c.warps,
    )  # fmt: skip
    return out, last, out_lse


class MixGradients(NamedTuple):
    """Gradients of one mix; empty tensors for what did not take part."""

    sources: list[Tensor]
    mean: Tensor
    lse: Tensor
    query: Tensor
    norm: Tensor
    out_norm: Tensor


def mix_backward(
    d_out: Tensor,
    d_last: Tensor | None,
    d_out_lse: Tensor | None,
    sources: list[Tensor],
    mean: Tensor | None,
    lse: Tensor | None,
    query: Tensor,
    norm: Tensor,
    out_norm: Tensor | None,
    eps: float,
    out_eps: float,
    into: Tensor | None = None,
    config: MixConfig | None = None,
) -> MixGradients:
    """`sources` with delta added already. `into` takes the mean's gradient and may be `mean` itself."""
    from atoll.ops.attn_res import mix_kernels

    like = sources[0] if sources else mean
    assert like is not None
    tokens, width = like.shape
    c = config or mix_config(width, len(sources), out_norm is not None)
    groups = -(-tokens // c.rows)
    programs = min(groups, c.programs)
    d_sources = [torch.empty_like(s) for s in sources]
    d_mean = like.new_empty(0) if mean is None else torch.empty_like(mean) if into is None else into
    d_lse = like.new_empty(0) if lse is None else torch.empty_like(lse)
    partial = like.new_empty(1 if out_norm is None else 2, programs, width, dtype=torch.float32)
    launch(
        mix_kernels.mix_back_kernel, (programs,), like,
        tuple(sources) or (mean,), mean, lse, query, norm, out_norm, d_out, d_last, d_out_lse, tuple(d_sources) or (d_mean,), d_mean,
        d_lse, partial, tokens, groups, programs, eps, out_eps, R=len(sources), D=width, RP=max(2, 1 << (len(sources) - 1).bit_length()),
        ROWS=c.rows, BLOCK=c.block, PIECES=c.pieces, STAGES=c.back_stages, HAS_LAST=d_last is not None, HAS_LSE=d_out_lse is not None,
        CARRY=mean is not None, OUT_NORM=out_norm is not None, num_warps=c.back_warps, maxnreg=c.back_registers or None,
    )  # fmt: skip
    d_query, d_norm = torch.empty_like(query), torch.empty_like(norm)
    d_out_norm = like.new_empty(0) if out_norm is None else torch.empty_like(out_norm)
    block = 64 if width >= 64 else 16
    launch(
        mix_kernels.vectors_back_kernel, (-(-width // block),), like,
        partial, query, norm, d_query, d_norm, d_out_norm, programs, D=width, BLOCK=block, STEP=32, OUT_NORM=out_norm is not None,
    )  # fmt: skip
    return MixGradients(d_sources, d_mean, d_lse, d_query, d_norm, d_out_norm)
