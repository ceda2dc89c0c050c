"""Launches phase one's kernels, forward and backward, on [N, D] rows. Triton is imported at the first launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.ops.attn_res.mix_launch import FLOATS
from atoll.ops.dispatch import count, launch

MOST_FINISHED = 16  # sources whose tiles a program holds at once
MOST_QUERIES = 64


class PhaseOne(NamedTuple):
    """All queries of a block on the finished sources. mean [Q, N, D]: the mix over them alone; lse [Q, N]: log of the sum of
    exp(score). The rest is what the backward pass wants: scores and weights [R, N, Q], 1 / rms of the sources [R, N], and the keys,
    query * norm, [parts, Q, D] (see `block_kernels.py`)."""

    mean: Tensor
    lse: Tensor
    scores: Tensor
    weights: Tensor
    scales: Tensor
    keys: Tensor


class BlockConfig(NamedTuple):
    """Tokens, columns, stages and warps of the scores (few tokens, many tokens); columns and warps of the values; columns, stages
    and warps of the scores' gradient; and tokens, columns, stages and warps of the sources' and of the keys'."""

    few: tuple[int, int, int, int] = (16, 128, 4, 2)
    many: tuple[int, int, int, int] = (64, 64, 4, 4)
    values: tuple[int, int] = (1024, 4)
    scores_back: tuple[int, int, int] = (128, 4, 2)
    sources_back: tuple[int, int, int, int] = (64, 256, 3, 4)
    keys_back: tuple[int, int, int, int] = (32, 128, 3, 4)


def block_refusal(sources: Sequence[Tensor], vectors: Sequence[Tensor]) -> str:
    """Why the kernels do not take this block; empty when they do."""
    if any(t.dtype not in FLOATS for t in (*sources, *vectors)):
        return "an input is neither bfloat16 nor float32"
    if len(sources) > MOST_FINISHED:
        return f"{len(sources)} finished sources are more than {MOST_FINISHED}"
    if len(vectors) > 2 * MOST_QUERIES:
        return f"{len(vectors) // 2} queries are more than {MOST_QUERIES}"
    return ""


def _padded(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _columns(width: int, most: int) -> int:
    return min(most, _padded(width))


def _narrowed(most: int, queries: int, *dtypes: torch.dtype) -> int:
    """Columns of a tile for 32 queries and two bytes a number, or as many fewer as keep its bytes."""
    return most * 32 // max(32, _padded(queries)) * 2 // max(d.itemsize for d in dtypes)


def _precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.bfloat16 else "tf32x3"  # the first is not read for bfloat16


def phase_one(
    sources: list[Tensor],
    queries: list[Tensor],
    norms: list[Tensor],
    eps: float,
    partial_dtype: torch.dtype,
    mean: Tensor | None = None,
    config: BlockConfig | None = None,
) -> PhaseOne:
    """Four launches. `mean` [Q, N, D] may be given to be written."""
    from atoll.ops.attn_res import block_kernels as kernels

    count("attn_res phase one triton")
    c, like = config or BlockConfig(), sources[0]
    (tokens, width), R, Q = like.shape, len(sources), len(queries)
    parts = 1 if like.dtype == torch.float32 else 2 if all(t.dtype == torch.bfloat16 for t in (*queries, *norms)) else 3
    keys = like.new_empty(parts, Q, width)
    block = _columns(width, 1024)
    launch(
        kernels.keys_kernel, (-(-width // block), Q), like, tuple(queries), tuple(norms), keys, Q=Q, D=width, BLOCK=block, PARTS=parts,
    )  # fmt: skip
    scores, weights = (like.new_empty(R, tokens, Q, dtype=torch.float32) for _ in range(2))
    scales = like.new_empty(R, tokens, dtype=torch.float32)
    rows, columns, stages, warps = c.many if tokens > 256 else c.few
    launch(
        kernels.scores_kernel, (-(-tokens // rows), R), like,
        tuple(sources), keys, scores, scales, tokens, eps, R=R, Q=Q, D=width, QP=_padded(Q), BM=rows,
        BK=_columns(width, columns), PARTS=parts, STAGES=stages, PRECISION=_precision(like.dtype), num_warps=warps,
    )  # fmt: skip
    lse = like.new_empty(Q, tokens, dtype=torch.float32)
    launch(kernels.weights_kernel, (-(-tokens * Q // 256),), like, scores, weights, lse, tokens, Q, R=R, BLOCK=256, num_warps=2)
    if mean is None:
        mean = like.new_empty(Q, tokens, width, dtype=partial_dtype)
    block, lines = _tile(width, c.values[0])
    launch(
        kernels.values_kernel, (-(-width // block) * -(-tokens // lines),), like,
        tuple(sources), weights, mean, tokens, Q, R=R, D=width, ROWS=lines, BLOCK=block, num_warps=c.values[1],
    )  # fmt: skip
    return PhaseOne(mean, lse, scores, weights, scales, keys)


def _tile(width: int, size: int) -> tuple[int, int]:
    """Columns and rows of a tile of `size` elements that wastes few columns."""
    block = min(size, _padded(width))
    while block > 64 and -(-width // block) * block > 1.15 * width:
        block //= 2
    return block, size // block


def phase_one_backward(
    d_mean: Tensor, d_lse: Tensor, sources: list[Tensor], held: PhaseOne, config: BlockConfig | None = None
) -> tuple[Tensor, Tensor]:
    """d_mean [Q, N, D], d_lse [Q, N] -> gradients of the sources [R, N, D] and of the keys [Q, D] float32."""
    from atoll.ops.attn_res import block_kernels as kernels

    c, like = config or BlockConfig(), sources[0]
    (tokens, width), R, Q = like.shape, len(sources), held.keys.shape[1]
    flags: dict[str, Any] = {"R": R, "Q": Q, "D": width, "QP": _padded(Q), "PRECISION": _precision(like.dtype)}
    along, own = torch.empty_like(held.weights), torch.empty_like(held.scales)
    columns, stages, warps = c.scores_back
    columns = _columns(width, _narrowed(columns, Q, like.dtype, d_mean.dtype))
    launch(
        kernels.scores_back_kernel, (tokens,), like,
        d_mean, d_lse, tuple(sources), held.scores, held.weights, held.scales, along, own, tokens, RP=_padded(R),
        BK=columns, STAGES=stages, num_warps=warps, **flags,
    )  # fmt: skip
    d_sources = like.new_empty(R, tokens, width)
    lines, columns, stages, warps = c.sources_back
    columns = _columns(width, _narrowed(columns, Q, like.dtype, d_mean.dtype))
    launch(
        kernels.sources_back_kernel, (-(-width // columns) * -(-tokens // lines),), like,
        d_mean, tuple(sources), held.keys, held.weights, along, own, d_sources, tokens, lines, RP=_padded(R), BK=columns, STAGES=stages,
        num_warps=warps, **flags,
    )  # fmt: skip
    rows, columns, stages, warps = c.keys_back
    columns = _columns(width, columns)
    across = -(-width // columns)
    steps = -(-tokens // rows)
    chunk = rows * max(1, steps * across // 528)  # about 528 programs
    partial = like.new_empty(-(-tokens // chunk), Q, width, dtype=torch.float32)
    launch(
        kernels.keys_back_kernel, (across, partial.shape[0]), like,
        tuple(sources), along, partial, tokens, chunk, BM=rows, BK=columns, PARTS=1 if like.dtype == torch.float32 else 2,
        STAGES=stages, num_warps=warps, **flags,
    )  # fmt: skip
    return d_sources, partial.sum(0)
