"""The mix with its gradients by hand: sources are never stacked, and only they and three numbers a source and token are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.situ import wide


def check(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor) -> None:
    """ValueError unless there are sources of one shape [..., D] and dtype, and the vectors end in D."""
    if not sources or any(s.shape != sources[0].shape or s.dtype != sources[0].dtype for s in sources):
        raise ValueError(f"sources must be one or more tensors of one shape and dtype, not {[(tuple(s.shape), s.dtype) for s in sources]}")
    width = sources[0].shape[-1:]
    if query.shape[-1:] != width or norm_weight.shape != query.shape:
        raise ValueError(f"query {list(query.shape)} and norm_weight {list(norm_weight.shape)} must fit sources of width {width[0]}")


def flatten(source: Tensor) -> Tensor:
    """[..., D] -> [N, D] in at least float32."""
    return source.reshape(-1, source.shape[-1]).to(wide(source.dtype))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean x² + eps) of each row of [N, D], outside autograd."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, norm_weight: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        dtype = wide(sources[0].dtype)
        v = query.to(dtype) * norm_weight.to(dtype)
        rows = [flatten(s) for s in sources]
        scale = torch.stack([inverse_rms(x, eps) for x in rows])
        dot = torch.stack([x @ v for x in rows])
        p = (scale * dot).softmax(0)
        out = rows[0] * p[0, :, None]
        for x, weight in zip(rows[1:], p[1:], strict=True):
            out.addcmul_(x, weight[:, None])
        ctx.save_for_backward(query, norm_weight, scale, dot, p, *sources)
        depth = p.view(len(sources), *sources[0].shape[:-1])
        ctx.mark_non_differentiable(depth)
        return out.view(sources[0].shape).to(sources[0].dtype), depth

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, norm_weight, scale, dot, p, *sources = ctx.saved_tensors
        d_out = flatten(grads[0])
        q, w = query.to(d_out.dtype), norm_weight.to(d_out.dtype)
        v = q * w
        rows = [flatten(s) for s in sources]
        d_p = torch.stack([torch.linalg.vecdot(d_out, x) for x in rows])
        d_score = p * (d_p - (p * d_p).sum(0))
        along_v = d_score * scale  # of d score / d x = scale v - scale³ dot x / D, the two factors
        along_x = along_v * scale.square() * dot / -v.numel()
        d_v = sum(a @ x for a, x in zip(along_v, rows, strict=True))
        d_sources = []
        for x, source, weight, a, b in zip(rows, sources, p, along_v, along_x, strict=True):
            d_x = (d_out * weight[:, None]).addcmul_(x, b[:, None]).addcmul_(a[:, None], v)
            d_sources.append(d_x.view(source.shape).to(source.dtype))
        return (d_v * w).to(query.dtype), (d_v * q).to(norm_weight.dtype), None, *d_sources


@overload
def attn_res(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float = 1e-5, *, return_weights: Literal[False] = False
) -> Tensor: ...
@overload
def attn_res(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float = 1e-5, *, return_weights: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def attn_res(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float = 1e-5, *, return_weights: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """sum_r p_r sources[r], p = softmax over r of <sources[r] / sqrt(mean sources[r]² + eps) * norm_weight, query>, token by token.

    sources: list of R tensors [..., D] of one dtype (any order gives the same value up to rounding); query, norm_weight [D]
    -> [..., D] in the sources' dtype, computed in at least float32. No 1/sqrt(D); a zero query is the plain average.
    `return_weights=True` also returns p [R, ...] (no gradient). Differentiable once, in all inputs; keeps the sources, not copies.
    A token's result depends on its own rows only. Source: Attention Residuals, arXiv 2603.15031; Kimi K3 report, eq. 8-10.
    Raises ValueError when shapes or dtypes do not fit.
    """
    check(sources, query, norm_weight)
    if query.dim() != 1:
        raise ValueError(f"query must be [D], not {list(query.shape)}")
    out, weights = _Mix.apply(query, norm_weight, eps, *sources)  # type: ignore[misc]
    return (out, weights) if return_weights else out
