"""The mix in plain torch with its gradients by hand, on [N, D] rows: sources are never stacked, nothing is kept but what came in.

The twin of `mix_launch.py`, argument by argument: `mean` and `lse` are one more row, the finished sources already mixed
(`two_phase.py`), whose score is `lse`; `delta` is added to the last source first; `out_norm` is the weight of an RMSNorm after.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.ops.attn_res.mix_launch import MixGradients
from atoll.ops.situ import wide


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean x² + eps) of each row of [N, D]."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    return norm.square_().div_(max(x.shape[-1], 1)).add_(eps).rsqrt_()


class _Mixed(NamedTuple):
    rows: list[Tensor]  # sources, then the carried mean, in at least float32
    scale: Tensor  # [R, N]
    score: Tensor  # [R, N]
    p: Tensor  # [rows, N]
    keys: Tensor  # [D], query * norm


def _weigh(sources: list[Tensor], mean: Tensor | None, lse: Tensor | None, query: Tensor, norm: Tensor, eps: float) -> _Mixed:
    like = sources[0] if sources else mean
    assert like is not None
    dtype = wide(like.dtype)
    keys = query.to(dtype) * norm.to(dtype)
    rows = [s.to(dtype) for s in sources]
    empty = keys.new_empty(0, like.shape[0])
    scale = torch.stack([inverse_rms(x, eps) for x in rows]) if rows else empty
    score = scale * torch.stack([x @ keys for x in rows]) if rows else empty
    carried = [] if mean is None else [mean.to(dtype)]
    mixed = _Mixed([*rows, *carried], scale, score, score, keys)
    return mixed._replace(p=_all_scores(mixed, lse).softmax(0))


def _all_scores(mixed: _Mixed, lse: Tensor | None) -> Tensor:
    return mixed.score if lse is None else torch.cat([mixed.score, lse.to(mixed.score.dtype)[None]])


def _average(rows: list[Tensor], p: Tensor) -> Tensor:
    out = rows[0] * p[0, :, None]
    for x, weight in zip(rows[1:], p[1:], strict=True):
        out.addcmul_(x, weight[:, None])
    return out


def mix_forward_torch(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """As `mix_launch.mix_forward`."""
    like = sources[0] if sources else mean
    assert like is not None
    last = like.new_empty(0) if delta is None else sources[-1] + delta
    if delta is not None:
        sources = [*sources[:-1], last]
    mixed = _weigh(sources, mean, lse, query, norm, eps)
    h = _average(mixed.rows, mixed.p)
    out_lse = _all_scores(mixed, lse).logsumexp(0) if keep else h.new_empty(0)
    if out_norm is None:
        return h.to(dtype), last, out_lse
    # the release casts to the input's dtype before it multiplies by the weight
    return ((h * inverse_rms(h, out_eps)[:, None]).to(dtype) * out_norm).to(dtype), last, out_lse


def mix_backward_torch(
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
) -> MixGradients:
    """As `mix_launch.mix_backward`; the formula stands in `mix_kernels.mix_back_kernel`."""
    rows, scale, score, p, keys = _weigh(sources, mean, lse, query, norm, eps)
    d_h = d_out.to(keys.dtype)
    d_out_norm = keys.new_empty(0)
    if out_norm is not None:
        h = _average(rows, p)
        rstd = inverse_rms(h, out_eps)
        d_out_norm = (d_h * h * rstd[:, None]).sum(0).to(out_norm.dtype)
        d_h = d_h * out_norm * rstd[:, None]
        d_h.addcmul_(h, (torch.linalg.vecdot(d_h, h) * rstd.square() / -keys.numel())[:, None])
    d_p = torch.stack([torch.linalg.vecdot(d_h, x) for x in rows])
    inner = (p * d_p).sum(0)
    d_score = p * (d_p - (inner if d_out_lse is None else inner - d_out_lse))
    along_keys = d_score[: len(sources)] * scale  # of d score / d x = scale keys - scale² score x / D, the two factors
    along_x = along_keys * scale * score / -keys.numel()
    d_keys = torch.zeros_like(keys)
    d_sources = []
    for i, (x, source) in enumerate(zip(rows, sources, strict=False)):
        d_keys += along_keys[i] @ x
        d_x = (d_h * p[i, :, None]).addcmul_(x, along_x[i, :, None]).addcmul_(along_keys[i, :, None], keys)
        if d_last is not None and i == len(sources) - 1:
            d_x += d_last
        d_sources.append(d_x.to(source.dtype))
    d_mean, d_lse = keys.new_empty(0), keys.new_empty(0)
    if mean is not None and lse is not None:
        d_mean, d_lse = (d_h * p[-1, :, None]).to(mean.dtype), d_score[-1].to(lse.dtype)
        d_mean = d_mean if into is None else into.copy_(d_mean)
    return MixGradients(
        d_sources, d_mean, d_lse, (d_keys * norm).to(query.dtype), (d_keys * query).to(norm.dtype), d_out_norm
    )  # fmt: skip
