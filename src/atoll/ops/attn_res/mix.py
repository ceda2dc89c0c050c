"""The mix as an operation of torch: checks, the choice of path, fake shapes and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.ops.attn_res.mix_launch import MOST_SOURCES, MixGradients, mix_backward, mix_forward, mix_refusal
from atoll.ops.attn_res.one_pass import mix_backward_torch, mix_forward_torch
from atoll.ops.dispatch import use_triton
from atoll.ops.situ import wide


def check(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor) -> None:
    """ValueError unless there are sources of one shape [..., D] and dtype, and two vectors [D]."""
    if not sources or any(s.shape != sources[0].shape or s.dtype != sources[0].dtype for s in sources):
        raise ValueError(f"sources must be one or more tensors of one shape and dtype, not {[(tuple(s.shape), s.dtype) for s in sources]}")
    width = sources[0].shape[-1:]
    if query.shape != width or norm_weight.shape != width:
        raise ValueError(f"query {list(query.shape)} and norm_weight {list(norm_weight.shape)} must be [{width[0]}], the sources' width")


def rows_of(x: Tensor) -> Tensor:
    """[..., D] -> contiguous [N, D]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def apply_mix(
    sources: Sequence[Tensor],
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
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op on [N, D] rows; straight to the path where no gradient is wanted."""
    given = [t for t in (*sources, delta, mean, lse, query, norm, out_norm) if t is not None]
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
        return _op(list(sources), delta, mean, lse, query, norm, out_norm, eps, out_eps, dtype, keep, triton)
    return _forward(list(sources), delta, mean, lse, query, norm, out_norm, eps, out_eps, dtype, keep, triton)


def choose(sources: Sequence[Tensor], vectors: Sequence[Tensor | None], backend: str, op: str = "attn_res") -> bool:
    """Whether this mix runs in Triton."""
    on_card = sources[0].is_cuda
    refusal = mix_refusal(list(sources), [v for v in vectors if v is not None]) if on_card or backend == "triton" else ""
    return use_triton(op, backend, on_card, refusal)


def attn_res_sum(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-5,
    *,
    delta: Tensor | None = None,
    out_norm: Tensor | None = None,
    out_eps: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`attn_res` after `sources[-1] + delta`, which comes back too, written once: the mix [..., D] and that sum [..., D].

    `delta` None adds nothing; the second result is then `sources[-1]` itself. Other arguments as in `attn_res`.
    """
    check(sources, query, norm_weight)
    for name, x, shape in (("delta", delta, sources[0].shape), ("out_norm", out_norm, query.shape)):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} {list(x.shape)} must be {list(shape)}")
    if delta is not None and delta.dtype != sources[0].dtype:
        raise ValueError(f"delta is {delta.dtype}; it must be {sources[0].dtype}, as the sources")
    triton, shape, dtype = choose(sources, (query, norm_weight, out_norm), backend), sources[0].shape, sources[0].dtype
    out_eps = eps if out_eps is None else out_eps
    rows = [rows_of(s) for s in sources]
    step = None if delta is None else rows_of(delta)
    mean, lse, vectors = None, None, (query.contiguous(), norm_weight.contiguous())
    while triton and len(rows) > MOST_SOURCES:  # mixed in groups, in float32, and carried on
        mean, _, lse = apply_mix(rows[:MOST_SOURCES], None, mean, lse, *vectors, None, eps, eps, torch.float32, True, True)
        rows = rows[MOST_SOURCES:]
    out, last, _ = apply_mix(rows, step, mean, lse, *vectors, out_norm, eps, out_eps, dtype, False, triton)
    return out.view(shape), sources[-1] if delta is None else last.view(shape)


# ---------------------------------------------------------------- registration


def _forward(
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
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    path = mix_forward if triton else mix_forward_torch
    return path(sources, delta, mean, lse, query, norm, out_norm, eps, out_eps, dtype, keep)


def mix_gradients(
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
    triton: bool,
    into: Tensor | None = None,
) -> MixGradients:
    """The gradients of `apply_mix`, by the same path; `into` takes the mean's."""
    d_last, d_out_lse = (None if t is None else t.contiguous() for t in (d_last, d_out_lse))
    path = mix_backward if triton else mix_backward_torch
    return path(d_out.contiguous(), d_last, d_out_lse, sources, mean, lse, query, norm, out_norm, eps, out_eps, into)


def _backward(
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
    triton: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(mix_gradients(d_out, d_last, d_out_lse, sources, mean, lse, query, norm, out_norm, eps, out_eps, triton))  # type: ignore[return-value]


_op = torch.library.custom_op("atoll::attn_res", _forward, mutates_args=())
_back = torch.library.custom_op("atoll::attn_res_backward", _backward, mutates_args=())


@_op.register_fake
def _fake(
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
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    like = sources[0] if sources else mean
    assert like is not None
    last = like.new_empty(0) if delta is None else torch.empty_like(sources[-1])
    return like.new_empty(like.shape, dtype=dtype), last, like.new_empty(like.shape[0] if keep else 0, dtype=wide(like.dtype))


@_back.register_fake
def _back_fake(
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
    triton: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(x: Tensor | None) -> Tensor:
        return d_out.new_empty(0) if x is None else torch.empty_like(x)

    return [torch.empty_like(s) for s in sources], like(mean), like(lse), torch.empty_like(query), torch.empty_like(norm), like(out_norm)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    sources, delta, mean, lse, query, norm, out_norm, ctx.eps, ctx.out_eps, _, ctx.keep, ctx.triton = inputs
    ctx.count, ctx.summed = len(sources), delta is not None
    if ctx.summed:  # the sum exists anyway; its parts need not be kept
        sources = [*sources[:-1], output[1]]
    ctx.save_for_backward(*sources, mean, lse, query, norm, out_norm)


def _gradients(ctx: Any, d_out: Tensor, d_last: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    *sources, mean, lse, query, norm, out_norm = ctx.saved_tensors
    d_last, d_lse = d_last if ctx.summed else None, d_lse if ctx.keep else None
    d_sources, d_mean, d_lse, d_query, d_norm, d_out_norm = _back(
        d_out, d_last, d_lse, sources, mean, lse, query, norm, out_norm, ctx.eps, ctx.out_eps, ctx.triton
    )
    some = d_sources[-1] if ctx.summed else None
    carried = (None, None) if mean is None else (d_mean, d_lse)
    return d_sources, some, *carried, d_query, d_norm, None if out_norm is None else d_out_norm, *[None] * 5


_op.register_autograd(_gradients, setup_context=_setup)


def depth_weights(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The softmax itself, [R, ...], for looking at; no gradient."""
    with torch.no_grad():
        dtype = wide(sources[0].dtype)
        keys = query.to(dtype) * norm_weight.to(dtype)
        scores = [(s.to(dtype) @ keys) * (s.to(dtype).square().mean(-1) + eps).rsqrt() for s in sources]
        return torch.stack(scores).softmax(0)
