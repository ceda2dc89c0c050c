"""Launches the routing kernel and registers it with torch. Triton is imported at the first launch. Its ops have no gradient: whoever
needs one takes the weights from `route_weights`."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.ops.dispatch import count, launch

MOST_EXPERTS, MOST_CHOICES = 1024, 32  # what one warp's registers hold, and what a search per choice stays fast for


def route_refusal(scores: Tensor, k: int) -> str:
    """Why the kernel does not take these scores; empty when it does."""
    if scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "the scores are wider than float32"
    if scores.shape[1] > MOST_EXPERTS or k > MOST_CHOICES:
        return f"{k} of {scores.shape[1]} experts are more than {MOST_CHOICES} of {MOST_EXPERTS}"
    return ""


def _route(
    scores: Tensor,
    bias: Tensor,
    k: int,
    counts: Tensor | None = None,
    low: Tensor | None = None,
    width: Tensor | None = None,
    load: Tensor | None = None,
    mask: Tensor | None = None,
    warps: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """ids int64 [T, k], weights float32 [T, k], cutoff float32 [T]; adds to counts [E, bins] and load [E], contiguous int64."""
    from atoll.ops.routing import route_kernels

    count("route triton")
    tokens, experts = scores.shape
    ids = scores.new_empty(tokens, k, dtype=torch.int64)
    weights, cutoff = (scores.new_empty(*shape, dtype=torch.float32) for shape in ((tokens, k), (tokens,)))
    launch(
        route_kernels.route_kernel, (tokens,), scores,
        scores.contiguous(), bias.contiguous(), None if mask is None else mask.contiguous(), low, width, ids, weights, cutoff, counts, load,
        E=experts, LANES=1 << (experts - 1).bit_length(), K=k, PLACES=1 << (k - 1).bit_length(),
        BINS=0 if counts is None else counts.shape[1], MASKED=mask is not None, COUNTED=counts is not None, LOADED=load is not None,
        num_warps=warps,
    )  # fmt: skip
    return ids, weights, cutoff


def route_only(scores: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return _op(scores.detach(), bias.detach(), k)
    return _route(scores.detach(), bias.detach(), k)


def route_counted(
    scores: Tensor,
    bias: Tensor,
    k: int,
    counts: Tensor | None,
    low: Tensor | None,
    width: Tensor | None,
    load: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `route_only`, and counts what is not masked. Raises ValueError where counts or load are not contiguous int64 of E rows."""
    for name, t in (("the histogram's counts", counts), ("load", load)):
        if t is not None and (t.dtype != torch.int64 or not t.is_contiguous() or t.shape[0] != scores.shape[1]):
            raise ValueError(f"{name} must be contiguous int64 with {scores.shape[1]} rows, not {t.dtype} {list(t.shape)}")
    scores, bias = scores.detach(), bias.detach()
    if torch.compiler.is_compiling():
        return _counted_op(scores, bias, k, counts, low, width, load, mask)
    return _route(scores, bias, k, counts, low, width, load, mask)


def _route_op(scores: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return _route(scores, bias, k)


def _route_counted_op(
    scores: Tensor,
    bias: Tensor,
    k: int,
    counts: Tensor | None,
    low: Tensor | None,
    width: Tensor | None,
    load: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _route(scores, bias, k, counts, low, width, load, mask)


_op = torch.library.custom_op("atoll::route", _route_op, mutates_args=())
_counted_op = torch.library.custom_op("atoll::route_counted", _route_counted_op, mutates_args=("counts", "load"))


def _shapes(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = scores.shape[0]
    return (
        scores.new_empty(tokens, k, dtype=torch.int64),
        scores.new_empty(tokens, k, dtype=torch.float32),
        scores.new_empty(tokens, dtype=torch.float32),
    )


@_op.register_fake
def _fake(scores: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return _shapes(scores, k)


@_counted_op.register_fake
def _counted_fake(
    scores: Tensor,
    bias: Tensor,
    k: int,
    counts: Tensor | None,
    low: Tensor | None,
    width: Tensor | None,
    load: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _shapes(scores, k)
