"""Quantile balancing: each expert's bias becomes the quantile of what it would have needed to be chosen by its share of the tokens.

With m tokens, E experts, k choices and cutoff a_i (the (k+1)-th biased score of token i), expert j needs bias above
r_ij = a_i - s_ij to win token i. The bias that wins q = m k / E tokens is the q-quantile of r_:j; the mean over experts is
removed. Source: Kimi K3 report, arXiv 2607.24653, §2.3.3 and appendices C and D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.ops.routing.select import route


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
    m, experts = scores.shape
    cutoff = route(scores, bias, k)[2]
    if bins is not None:
        histogram = QuantileHistogram(experts, bins, device=scores.device)
        histogram.set_range(bias)
        histogram.observe(scores, cutoff)
        return histogram.solve(k).to(bias.dtype)
    required = cutoff[:, None] - scores
    new = required.kthvalue(m * k // experts + 1, dim=0).values
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
        if scores.shape != (*cutoff.shape, self.experts):
            raise ValueError(f"scores {list(scores.shape)} must be [T, {self.experts}] and cutoff {list(cutoff.shape)} [T]")
        if mask is not None:
            rows = mask.reshape(-1).nonzero().squeeze(-1)
            scores, cutoff = scores.index_select(0, rows), cutoff.index_select(0, rows)
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

        Per expert: the first bin whose cumulative count reaches ceil(q), linear inside it (app. D). Error at most one bin width.
        """
        tokens = int(self.counts[0].sum())
        if tokens == 0:
            return self.bias.clone()
        q = tokens * k / self.experts
        reach = -(-tokens * k // self.experts)
        cumulative = self.counts.cumsum(1)
        first = (cumulative < reach).sum(1, keepdim=True)
        inside = self.counts.gather(1, first).double()
        before = cumulative.gather(1, first) - inside
        part = ((q - before) / inside).clamp_(0.0, 1.0)
        new = (self.low + (first + part) * self.width).squeeze(1)
        return (new - new.mean()).to(self.bias.dtype)

    def clear(self) -> None:
        """Forget the counts; the range stays until `set_range`."""
        self.counts.zero_()
