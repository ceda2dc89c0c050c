"""The dense gated MLP: `down( act(gate x, up x) )`, used in the first layer and as the shared experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.nn.linear import Linear
from atoll.ops.situ import situ_glu, swiglu


def glu(kind: str, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """The gated activation by name: "situ" (Kimi K3 report eq. 12) or "silu" (SwiGLU, arXiv 2002.05202)."""
    return situ_glu(gate, up, beta, linear_beta) if kind == "situ" else swiglu(gate, up)


class GatedMLP(nn.Module):
    """[..., dim] to [..., dim] through `hidden` gated channels."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: str = "situ",
        beta: float = 4.0,
        linear_beta: float | None = 25.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.beta, self.linear_beta = activation, beta, linear_beta
        weights = {"device": device, "dtype": dtype}
        self.gate_proj, self.up_proj = Linear(dim, hidden, **weights), Linear(dim, hidden, **weights)
        self.down_proj = Linear(hidden, dim, **weights)

    def reset_parameters(self, std: float = 0.02) -> None:
        """Every projection normal(0, std)."""
        for proj in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(proj.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(glu(self.activation, self.gate_proj(x), self.up_proj(x), self.beta, self.linear_beta))
