"""Quantile balancing: each expert's bias becomes the quantile of what it would have needed to be chosen by its share of the tokens.

With m tokens, E experts, k choices and cutoff a_i (the (k+1)-th biased score of token i), expert j needs bias above
r_ij = a_i - s_ij to win token i. The bias that wins q = m k / E tokens is the q-quantile of r_:j; the mean over experts is
removed. Source: Kimi K3 report, arXiv 2607.24653, §2.3.3 and appendices C and D.

Three estimators share one life of a step: `observe` a micro-batch, and another; sum `counts` over ranks, once; `solve`.
`QuantileHistogram` is the one to train with, `QuantileMargins` its exact twin, `QuantileMean` what it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.ops.routing.select import route


def _rows(scores: Tensor, cutoff: Tensor, mask: Tensor | None, experts: int) -> tuple[Tensor, Tensor]:
    """The rows of scores [T, E] and cutoff [T] that count. Raises ValueError on shapes."""
    if scores.shape != (*cutoff.shape, experts):
        raise ValueError(f"scores {list(scores.shape)} must be [T, {experts}] and cutoff {list(cutoff.shape)} [T]")
    if mask is None:
        return scores, cutoff
    rows = mask.reshape(-1).nonzero().squeeze(-1)
    return scores.index_select(0, rows), cutoff.index_select(0, rows)


def _exact(required: Tensor, k: int) -> Tensor:
    """The (floor(q)+1)-th smallest required bias [E] of required [m, E], m at least 1; its mean is left in."""
    m, experts = required.shape
    return required.kthvalue(m * k // experts + 1, dim=0).values


@torch.no_grad()
def quantile_bias(scores: Tensor, bias: Tensor, k: int, *, bins: int | None = None, mask: Tensor | None = None) -> Tensor:
    """The next step's bias [E] from one batch's scores [m, E] (after the sigmoid) and the bias [E] it was routed with.

    Exact (the (floor(q)+1)-th smallest required bias) when `bins` is None, else by a histogram of `bins` bins: within one bin
    width plus one order statistic of the exact answer. mask [m] bool: False rows (padding) do not count. Mean zero.
    Returned in bias' dtype. Raises ValueError as `route` does.
    """
    if mask is not None:
        scores = scores[mask]
    if scores.shape[0] == 0:
        return bias.clone()
    cutoff = route(scores, bias, k)[2]
    if bins is not None:
        histogram = QuantileHistogram(scores.shape[1], bins, device=scores.device)
        histogram.set_range(bias)
        histogram.observe(scores, cutoff)
        return histogram.solve(k).to(bias.dtype)
    new = _exact(cutoff[:, None] - scores, k)
    return (new - new.mean()).to(bias.dtype)


class QuantileHistogram:
    """Integer counts [E, bins] of the required biases of one step, pooled over micro-batches and ranks, and their quantile.

    Counts add: any split of the step's tokens over micro-batches, ranks or order gives the same counts, hence the same bias.
    A step is: `set_range(bias)`; `observe` per micro-batch; `reduce` once; `solve` -> the next bias; `clear`.
    """

    def __init__(self, experts: int, bins: int = 1000, *, device: torch.device | str | None = None) -> None:
        if experts < 2 or bins < 1:
            raise ValueError(f"experts = {experts} must be at least 2 and bins = {bins} at least 1")
        self.experts, self.bins = experts, bins
        self.counts = torch.zeros(experts, bins, dtype=torch.int64, device=device)
        self.set_range(torch.zeros(experts, device=device))

    def set_range(self, bias: Tensor) -> None:
        """Fix the bins for this step from the bias [E] it is routed with: r lies in [min b - 1, max b + 1]. Call before `observe`."""
        self.bias = bias.detach().clone()
        wide = self.bias.double()
        self.low = wide.min() - 1.0
        self.width = (wide.max() - wide.min() + 2.0) / self.bins

    @torch.no_grad()
    def observe(self, scores: Tensor, cutoff: Tensor, mask: Tensor | None = None) -> None:
        """Count one micro-batch: scores [T, E] after the sigmoid, cutoff [T] from `route`, mask [T] bool (False: padding, not counted)."""
        scores, cutoff = _rows(scores, cutoff, mask, self.experts)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        offsets = torch.arange(self.experts, device=scores.device, dtype=torch.int32) * self.bins
        low, width = self.low.to(dtype), self.width.to(dtype)
        flat = self.counts.view(-1)
        for part, edge in zip(scores.split(2048), cutoff.split(2048), strict=True):  # bounds the memory
            bin_ = (edge[:, None] - part).to(dtype).sub_(low).div_(width).int()
            bin_ = bin_.clamp_(0, self.bins - 1).add_(offsets)
            flat.add_(torch.bincount(bin_.view(-1), minlength=flat.numel()))

    def reduce(self, over: Callable[[Tensor], Any] | Any) -> None:
        """Sum the counts over ranks: a process group (one integer all-reduce), or a callable that changes them or returns new ones."""
        if callable(over):
            result = over(self.counts)
            if isinstance(result, Tensor) and result is not self.counts:
                self.counts.copy_(result)
            return
        torch.distributed.all_reduce(self.counts, group=over)

    @torch.no_grad()
    def solve(self, k: int) -> Tensor:
        """The next bias [E], mean zero, in the dtype of the bias given to `set_range`, which comes back unchanged when nothing was counted.

        Per expert: the first bin whose cumulative count reaches ceil(q), linear inside it (app. D). Error at most one bin width. Does
        not wait for the device.
        """
        tokens = self.counts[0].sum()
        q = tokens.double() * k / self.experts
        reach = (tokens * k + self.experts - 1) // self.experts
        cumulative = self.counts.cumsum(1)
        first = (cumulative < reach).sum(1, keepdim=True)
        inside = self.counts.gather(1, first).double()
        before = cumulative.gather(1, first) - inside
        part = ((q - before) / inside).clamp_(0.0, 1.0)
        new = (self.low + (first + part) * self.width).squeeze(1)
        return torch.where(tokens > 0, (new - new.mean()).to(self.bias.dtype), self.bias)

    def clear(self) -> None:
        """Forget the counts; the range stays until `set_range`."""
        self.counts.zero_()


class QuantileMargins:
    """The exact rule over a step's micro-batches: every required bias is kept, [m, E], so ranks cannot be pooled by adding."""

    counts = None

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.required: list[Tensor] = []

    @torch.no_grad()
    def observe(self, scores: Tensor, cutoff: Tensor, mask: Tensor | None = None) -> None:
        """As `QuantileHistogram.observe`."""
        scores, cutoff = _rows(scores, cutoff, mask, self.experts)
        self.required.append(cutoff[:, None] - scores)

    def solve(self, k: int) -> Tensor | None:
        """The next bias [E], mean zero, in the margins' dtype; None when nothing was seen."""
        required = torch.cat(self.required) if self.required else torch.empty(0, self.experts)
        if required.shape[0] == 0:
            return None
        new = _exact(required, k)
        return new - new.mean()


class QuantileMean:
    """The mean, over micro-batches and ranks, of each one's own exact quantile: what is commonly done in place of pooling.

    It depends on the split: the mean of small batches' quantiles is not the quantile of all their tokens. Sums are integers in units
    of 2^-40, counts [E + 1] with the number of micro-batches last, so that ranks add up to the same bits in any order.
    """

    UNIT = 2.0**-40

    def __init__(self, experts: int, k: int, device: torch.device | str | None = None) -> None:
        self.experts, self.k = experts, k
        self.counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def observe(self, scores: Tensor, cutoff: Tensor, mask: Tensor | None = None) -> None:
        """As `QuantileHistogram.observe`; a micro-batch in which nothing counts is none."""
        scores, cutoff = _rows(scores, cutoff, mask, self.experts)
        if scores.shape[0]:
            quantile = _exact(cutoff[:, None] - scores, self.k).double()
            self.counts[:-1] += (quantile / self.UNIT).round().long()
            self.counts[-1] += 1

    def solve(self, k: int) -> Tensor | None:
        """The next bias [E], float64, mean zero; None when nothing was seen. k as at the start."""
        if k != self.k:
            raise ValueError(f"k = {k}: the quantiles were taken for k = {self.k}")
        if not int(self.counts[-1]):
            return None
        new = self.counts[:-1].double() * self.UNIT / self.counts[-1]
        return new - new.mean()
