"""The mix in two phases: all queries of a block on the finished sources at once, then each with the block's running sum.

Queries do not depend on activations, so the finished sources are read once a block instead of once a sublayer. The halves join
as softmax's do (online softmax). Source: Attention Residuals, arXiv 2603.15031, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.ops.attn_res.one_pass import check, flatten


class Finished(NamedTuple):
    """Phase one of Q queries: the running maximum and sum of exp(score - peak), and the sum of exp(score - peak) * source."""

    peak: Tensor  # [Q, ...]
    total: Tensor  # [Q, ...]
    value: Tensor  # [Q, ..., D]

    def of(self, query: int) -> Finished:
        """The part of one query, without the leading Q."""
        return Finished(*(t[query] for t in self))

    def mean(self) -> Tensor:
        """The mix over the finished sources alone, as a block's first sublayer sees it: [..., D] per query, in at least float32."""
        return self.value / self.total[..., None]


def finished_sources(sources: Sequence[Tensor], queries: Tensor, norm_weights: Tensor, eps: float = 1e-5) -> Finished:
    """Phase one: sources as in `attn_res`, queries and norm_weights [Q, D] -> `Finished` of [Q, ...], in at least float32."""
    check(sources, queries, norm_weights)
    rows = [flatten(s) for s in sources]
    keys = (queries.to(rows[0].dtype) * norm_weights.to(rows[0].dtype)).T
    scores = torch.stack([(x @ keys) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) for x in rows])  # [R, N, Q]
    peak = scores.amax(0)
    e = (scores - peak).exp()
    value = sum(w.T[..., None] * x for w, x in zip(e, rows, strict=True))  # [Q, N, D]
    assert isinstance(value, Tensor)
    lead = sources[0].shape[:-1]
    return Finished(peak.T.reshape(-1, *lead), e.sum(0).T.reshape(-1, *lead), value.reshape(-1, *lead, value.shape[-1]))


def merge_partial(finished: Finished, partial: Tensor, query: Tensor, norm_weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Phase two of one query: join `finished.of(i)` with the running sum partial [..., D] -> the mix [..., D] in partial's dtype."""
    check([partial], query, norm_weight)
    x = flatten(partial)
    score = (x @ (query.to(x.dtype) * norm_weight.to(x.dtype))) * torch.rsqrt(x.square().mean(-1) + eps)
    before = finished.peak.reshape(-1)
    peak = torch.maximum(before, score)
    old, new = (before - peak).exp(), (score - peak).exp()
    value = old[:, None] * finished.value.reshape(x.shape) + new[:, None] * x
    return (value / (old * finished.total.reshape(-1) + new)[:, None]).view(partial.shape).to(partial.dtype)
