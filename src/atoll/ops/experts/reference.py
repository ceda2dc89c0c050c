"""The naive twin: one expert at a time, over the tokens that chose it. Says the formula; for tests and comparison."""

from __future__ import annotations

from torch import Tensor

from atoll.ops.situ import situ_glu, swiglu, wide


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
) -> Tensor:
    """As `experts_mlp`, by a loop over the experts; every dtype rule the same, the order of the sum by expert."""
    out = x.new_zeros(x.shape, dtype=wide(x.dtype))
    for expert, (v1, v3, v2) in enumerate(zip(w1.unbind(0), w3.unbind(0), w2.unbind(0), strict=True)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        rows = x.index_select(0, token)
        gate, up = rows @ v1.T, rows @ v3.T
        hidden = situ_glu(gate, up, beta, linear_beta) if activation == "situ" else swiglu(gate, up)
        weight = weights.reshape(-1).index_select(0, token * ids.shape[1] + choice).to(out.dtype)
        out = out.index_add(0, token, (hidden @ v2.T).to(out.dtype) * weight[:, None])
    return out.to(x.dtype)
