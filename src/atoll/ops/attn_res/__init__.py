"""Attention over depth: mix the block sums a token has seen so far (Attention Residuals, arXiv 2603.15031; Kimi K3 report, eq. 8-10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from atoll.ops.attn_res.block import Block, open_block, two_phase_pays
from atoll.ops.attn_res.block_launch import block_refusal
from atoll.ops.attn_res.mix import attn_res_sum, depth_weights
from atoll.ops.attn_res.reference import attn_res_reference

__all__ = ["Block", "attn_res", "attn_res_reference", "attn_res_sum", "block_refusal", "depth_weights", "open_block", "two_phase_pays"]


@overload
def attn_res(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-5,
    *,
    return_weights: Literal[False] = False,
    out_norm: Tensor | None = None,
    out_eps: float | None = None,
    backend: str = "auto",
) -> Tensor: ...
@overload
def attn_res(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-5,
    *,
    return_weights: Literal[True],
    out_norm: Tensor | None = None,
    out_eps: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def attn_res(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-5,
    *,
    return_weights: bool = False,
    out_norm: Tensor | None = None,
    out_eps: float | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """sum_r p_r sources[r], p = softmax over r of <sources[r] / sqrt(mean sources[r]² + eps) * norm_weight, query>, token by token.

    sources: list of R tensors [..., D] of one dtype (any order gives the same value up to rounding); query, norm_weight [D]
    -> [..., D] in the sources' dtype, computed in at least float32. No 1/sqrt(D); a zero query is the plain average.
    `return_weights=True` also returns p [R, ...] (no gradient). Differentiable once, in all inputs; keeps the sources, not copies.
    `out_norm` [D]: an RMSNorm with that weight and `out_eps` (`eps` by default) follows, in the same pass.
    `backend`: "auto", "triton" or "torch". A token's result depends on its own rows only.
    Source: Attention Residuals, arXiv 2603.15031; Kimi K3 report, eq. 8-10.
    Raises ValueError when shapes or dtypes do not fit, or the kernels are asked for and refuse.
    """
    out, _ = attn_res_sum(sources, query, norm_weight, eps, out_norm=out_norm, out_eps=out_eps, backend=backend)
    return (out, depth_weights(sources, query, norm_weight, eps)) if return_weights else out
