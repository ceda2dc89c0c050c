"""The naive twin: one expert at a time, over the tokens that chose it. Says the formula; for tests and comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.ops.mxfp4 import mxfp4_fake
from atoll.ops.mxfp8 import mxfp8_fake
from atoll.ops.situ import situ_glu, swiglu, wide


class _Straight(torch.autograd.Function):
    """round(x) forward, the identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def _straight(x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    return _Straight.apply(x, rounding)  # type: ignore[no-any-return]


def experts_mlp_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    *,
    activation: str = "situ",
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
    quantization: str = "none",
) -> Tensor:
    """As `experts_mlp`, by a loop over the experts; every dtype rule the same, the order of the sum by expert."""
    activations = quantization == "mxfp4+mxfp8"
    if quantization != "none":
        w1, w3, w2 = (_straight(w, mxfp4_fake) for w in (w1, w3, w2))
    x = _straight(x, mxfp8_fake) if activations else x
    out = x.new_zeros(x.shape, dtype=wide(x.dtype))
    for expert, (v1, v3, v2) in enumerate(zip(w1.unbind(0), w3.unbind(0), w2.unbind(0), strict=True)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        rows = x.index_select(0, token)
        gate, up = rows @ v1.T, rows @ v3.T
        hidden = situ_glu(gate, up, beta, linear_beta) if activation == "situ" else swiglu(gate, up)
        hidden = _straight(hidden, mxfp8_fake) if activations else hidden
        weight = weights.reshape(-1).index_select(0, token * ids.shape[1] + choice).to(out.dtype)
        out = out.index_add(0, token, (hidden @ v2.T).to(out.dtype) * weight[:, None])
    return out.to(x.dtype)
