"""Top-k selection on biased scores, mixture weights from the unbiased ones."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.ops.dispatch import use_triton
from atoll.ops.routing.route_launch import route_counted, route_only, route_refusal


class Histogram(Protocol):
    """What `route` needs of a `QuantileHistogram` to count while it routes."""

    counts: Tensor  # int64 [E, bins]
    low: Tensor
    width: Tensor

    def observe(self, scores: Tensor, cutoff: Tensor, mask: Tensor | None = None) -> Any: ...


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


_COLUMNS = 128  # of the two-stage selection; the fastest on a CPU at 896 experts


def _top(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """`torch.topk`, sorted. On a CPU in two stages where that halves the time: among many columns' maxima, then in the n best columns."""
    rows, experts = values.shape
    if values.device.type != "cpu" or experts % _COLUMNS or experts < 4 * n or n > _COLUMNS // 4:
        return values.topk(n, dim=-1)
    # The n largest lie in the n columns with the largest maxima: a value outside is no larger than n maxima.
    columns = values.view(rows, -1, _COLUMNS)
    best = columns.amax(1).topk(n, dim=-1, sorted=False).indices
    top, place = columns.gather(2, best[:, None].expand(-1, columns.shape[1], -1)).view(rows, -1).topk(n, dim=-1)
    return top, place.div(n, rounding_mode="floor").mul_(_COLUMNS).add_(best.gather(1, place % n))


def top_by_index(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each row [T, E], descending, equal values in order of their index: the same answer on every device and run.

    `torch.topk` leaves the order of equal values open. One value more than asked shows whether a row holds a tie that could
    matter; only such rows are sorted in full.
    """
    asked = min(n + 1, values.shape[-1])
    top, ids = _top(values, asked)
    tied = (top[:, 1:] == top[:, :-1]).any(-1).nonzero().squeeze(-1)
    if tied.numel():
        full, order = values.index_select(0, tied).sort(dim=-1, descending=True, stable=True)
        top.index_copy_(0, tied, full[:, :asked])
        ids.index_copy_(0, tied, order[:, :asked])
    return top[:, :n], ids[:, :n]


def route(
    scores: Tensor,
    bias: Tensor,
    k: int,
    *,
    histogram: Histogram | None = None,
    load: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose k experts a token by `scores + bias`; weigh them by `scores` alone.

    scores [T, E] after the sigmoid, bias [E] -> ids int64 [T, k] by falling biased score (ties: lowest index first),
    weights [T, k] (differentiable in scores; sum to 1), cutoff [T], the (k+1)-th biased score. Weights and cutoff are float32,
    or float64 for float64 scores. Source: Kimi K3 report, arXiv 2607.24653, eq. 13, app. C.
    histogram: a `QuantileHistogram` that observes these tokens; load: int64 [E], to which each expert's tokens are added. mask [T]
    bool: False rows (padding) are routed but in neither. backend: "auto", "triton" or "torch": the same ids, cutoffs and counts,
    bit for bit. Raises ValueError unless 1 <= k < E and shapes fit.
    """
    if scores.dim() != 2 or bias.shape != scores.shape[1:]:
        raise ValueError(f"scores must be [T, E] and bias [E], not {list(scores.shape)} and {list(bias.shape)}")
    if not 1 <= k < scores.shape[1]:
        raise ValueError(f"k = {k} must be at least 1 and below the number of experts, {scores.shape[1]}")
    if mask is not None and mask.shape != scores.shape[:1]:
        raise ValueError(f"mask must be [{scores.shape[0]}], not {list(mask.shape)}")
    refusal = route_refusal(scores, k) if scores.is_cuda or backend == "triton" else ""
    if use_triton("route", backend, scores.is_cuda, refusal):
        if histogram is None and load is None:
            ids, weights, cutoff = route_only(scores, bias, k)
        else:
            counted = (None, None, None) if histogram is None else (histogram.counts, histogram.low, histogram.width)
            ids, weights, cutoff = route_counted(scores, bias, k, *counted, load, mask)
        return ids, route_weights(scores, ids) if scores.requires_grad and torch.is_grad_enabled() else weights, cutoff
    scores = _wide(scores)
    with torch.no_grad():
        top, ids = top_by_index(scores.detach() + bias.to(scores.dtype), k + 1)
        ids, cutoff = ids[:, :k].contiguous(), top[:, k].contiguous()
        if histogram is not None:
            histogram.observe(scores.detach(), cutoff, mask)
        if load is not None:
            counted = ids if mask is None else ids[mask]
            load += torch.bincount(counted.reshape(-1), minlength=load.numel())
    return ids, route_weights(scores, ids), cutoff


def route_weights(scores: Tensor, ids: Tensor) -> Tensor:
    """Mixture weights [T, k] of given experts: their scores over (the scores' sum + 1e-20). For forced or replayed routing.

    scores [T, E], ids int64 [T, k]; float32, or float64 for float64 scores. Source: Kimi K3 report, arXiv 2607.24653, eq. 13.
    """
    chosen = _wide(scores).gather(1, ids)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
