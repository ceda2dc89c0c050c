"""Phase one in plain torch: all queries of a block on its finished sources, and the gradients of both. The twin of `block_launch.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.ops.attn_res.block_launch import PhaseOne
from atoll.ops.attn_res.one_pass import inverse_rms
from atoll.ops.situ import wide


def phase_one_torch(
    sources: list[Tensor],
    queries: list[Tensor],
    norms: list[Tensor],
    eps: float,
    partial_dtype: torch.dtype,
    mean: Tensor | None = None,
) -> PhaseOne:
    """As `block_launch.phase_one`."""
    dtype = wide(sources[0].dtype)
    keys = torch.stack([q.to(dtype) * w.to(dtype) for q, w in zip(queries, norms, strict=True)])
    rows = [s.to(dtype) for s in sources]
    scales = torch.stack([inverse_rms(x, eps) for x in rows])
    scores = torch.stack([x @ keys.T for x in rows]) * scales[..., None]
    weights = scores.softmax(0)
    if mean is None:
        mean = sources[0].new_empty(len(queries), *sources[0].shape, dtype=partial_dtype)
    for i in range(len(queries)):
        out = rows[0] * weights[0, :, i, None]
        for x, p in zip(rows[1:], weights[1:], strict=True):
            out.addcmul_(x, p[:, i, None])
        mean[i] = out
    return PhaseOne(mean, scores.logsumexp(0).T.contiguous(), scores, weights, scales, keys[None])


def phase_one_backward_torch(d_mean: Tensor, d_lse: Tensor, sources: list[Tensor], held: PhaseOne) -> tuple[Tensor, Tensor]:
    """As `block_launch.phase_one_backward`; the formula stands in `block_kernels.scores_back_kernel`."""
    keys, p = held.keys[0], held.weights
    rows = [s.to(keys.dtype) for s in sources]
    ups = [up.to(keys.dtype) for up in d_mean]
    reach = torch.stack([torch.stack([torch.linalg.vecdot(up, x) for up in ups], -1) for x in rows])  # [R, N, Q]
    d_score = p * (reach - (p * reach).sum(0) + d_lse.T)
    along = d_score * held.scales[..., None]
    own = (along * held.scores).sum(-1) * held.scales / -keys.shape[-1]
    d_keys = torch.zeros_like(keys)
    d_sources = torch.empty(len(sources), *sources[0].shape, dtype=sources[0].dtype, device=sources[0].device)
    for r, x in enumerate(rows):
        d_keys.addmm_(along[r].T, x)
        d_x = (along[r] @ keys).addcmul_(x, own[r, :, None])
        for i, up in enumerate(ups):
            d_x.addcmul_(up, p[r, :, i, None])
        d_sources[r] = d_x
    return d_sources, d_keys
