"""The naive twin: the formula on stacked sources, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attn_res_reference(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float = 1e-5) -> Tensor:
    """softmax over sources of <x / sqrt(mean x² + eps) * norm_weight, query>, times the raw sources. Shapes as in `attn_res`."""
    rows = torch.stack([s.to(torch.promote_types(s.dtype, torch.float32)) for s in sources])
    keys = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * norm_weight.to(rows.dtype)
    p = (keys * query.to(rows.dtype)).sum(-1, keepdim=True).softmax(0)
    return (p * rows).sum(0).to(sources[0].dtype)
