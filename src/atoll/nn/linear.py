"""Two parameter holders that give the hub's names: a bias-free linear map and a norm or filter weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.ops.norm import rms_norm


class Linear(nn.Linear):
    """`y = x Wᵀ` with weight [out, in]; the blueprint has no bias anywhere."""

    def __init__(self, in_features: int, out_features: int, **factory) -> None:
        super().__init__(in_features, out_features, bias=False, **factory)


class RMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x²) + eps)` over the last dimension, statistics in at least float32 (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float, **factory) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, **factory))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Weight(nn.Module):
    """One named tensor, for parameters whose use lies outside: convolution filters and head norms."""

    def __init__(self, *shape: int, **factory) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape, **factory))
