"""Latent mixture of experts: routed experts work in a narrow latent, shared experts at full width.

LatentMoE, arXiv 2601.18089; routing, the norm on the summed latent and quantile balancing: Kimi K3 report §2.3, arXiv 2607.24653.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.config import BalanceConfig, validate_balance
from atoll.nn.layer_balance import LayerBalance
from atoll.nn.linear import Linear, RMSNorm
from atoll.nn.mlp import GatedMLP
from atoll.ops import experts_mlp, route
from atoll.ops.microscaling import GROUP, NAN_SCALE, scale_shape
from atoll.ops.routing import route_weights


@dataclass
class Routing:
    """Experts of one layer's tokens, ids [T,k]. Set before the call, it forces them; empty, the call fills it.

    A recomputed layer finds what its first pass chose, so near-tied experts cannot flip and nothing is counted twice.
    Under the rule "aux" a training call leaves its auxiliary loss, a scalar to be added to the loss, in `balance_loss`.
    """

    ids: Tensor | None = None
    balance_loss: Tensor | None = None


class Router(nn.Module):
    """Sigmoid scores in at least float32, and the bias that selects but never weighs."""

    e_score_correction_bias: Tensor

    def __init__(self, dim: int, experts: int, *, device=None, dtype=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim, device=device, dtype=dtype))
        exact = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, device=device, dtype=exact))

    def forward(self, x: Tensor) -> Tensor:
        """Scores [T,E] of x [T,dim], in the bias' type, autocast or not. Raises ValueError where that type is below float32."""
        exact = self.e_score_correction_bias.dtype
        if torch.finfo(exact).bits < 32:
            raise ValueError(
                f"gate.e_score_correction_bias is {exact}: below float32 near-tied experts change places; convert by building the module "
                "with dtype=, or put that buffer back to float32"
            )
        with torch.autocast(x.device.type, enabled=False):
            return torch.sigmoid(F.linear(x.to(exact), self.weight.to(exact)))


class Experts(nn.Module):
    """Weights of all routed experts, stacked: w1 (gate) and w3 (up) [E,I,L], w2 (down) [E,L,I].

    Quantised, each has beside it the scales it was read with, `w1_scale` uint8 [E,I,L/32] and so on, 255 where there is none: the values
    do not depend on them, but a group that still is what its scale says is written back under it, byte for byte.
    """

    def __init__(self, experts: int, dim: int, hidden: int, quantized: bool = False, **factory) -> None:
        super().__init__()
        if quantized and (dim % GROUP or hidden % GROUP):
            raise ValueError(f"dim = {dim} and hidden = {hidden}: must be multiples of {GROUP} to be quantised")
        self.w1, self.w3 = (nn.Parameter(torch.empty(experts, hidden, dim, **factory)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden, **factory))
        if quantized:
            for name, w in (("w1", self.w1), ("w3", self.w3), ("w2", self.w2)):
                self.register_buffer(f"{name}_scale", torch.full(scale_shape(w), NAN_SCALE, dtype=torch.uint8, device=w.device))

    def reset_parameters(self, std: float = 0.02) -> None:
        """Every matrix normal(0, std), no scale kept."""
        for weight in (self.w1, self.w3, self.w2):
            nn.init.normal_(weight, std=std)
        for scale in self.buffers():
            scale.fill_(NAN_SCALE)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
        """`experts_mlp` with these weights."""
        return experts_mlp(x, ids, weights, self.w1, self.w3, self.w2, **options)


class LatentMoE(nn.Module):
    """A drop-in mixture of experts, [..., dim] to [..., dim].

    In training it counts, over every call, the tokens each expert got (`load`) and what the balancer needs. Once after each
    optimizer step call `Balancer(model).step()` (kept over steps; all layers, all ranks), or with one layer `balance_step()`.
    In evaluation, in a recomputed pass and for masked tokens it counts nothing, and the bias stays.

    Args:
        dim: width of the input. latent_dim: width the routed experts work in, or None for the full width.
        experts, top_k: E and k. hidden: inner width of one expert. shared: shared experts, fused into one MLP.
        renormalize, scale: mixture weights are scores over their sum, times `scale`.
        weights_from: "unbiased" scores, or "biased" as the released Kimi-Linear code does.
        quantization: "none", "mxfp4" or "mxfp4+mxfp8": how the routed experts compute, in training and evaluation alike; see `experts_mlp`.
        balance: a `BalanceConfig`, or its kind alone: "quantile", "local_quantile", "sign", "aux", "capacity", "none".
        init_std: standard deviation of the matrices at the start, or None to leave memory as it is until `reset_parameters`.

    Raises ValueError for shapes and settings that cannot be.
    """

    def __init__(
        self,
        dim: int,
        latent_dim: int | None,
        experts: int,
        top_k: int,
        hidden: int,
        *,
        shared: int = 2,
        latent_norm: bool = True,
        renormalize: bool = True,
        scale: float = 1.0,
        weights_from: str = "unbiased",
        quantization: str = "none",
        activation: str = "situ",
        beta: float = 4.0,
        linear_beta: float | None = 25.0,
        eps: float = 1e-5,
        balance: BalanceConfig | str = "quantile",
        init_std: float | None = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if top_k >= experts:
            raise ValueError(f"top_k = {top_k}: must be below experts = {experts}")
        self.top_k, self.renormalize, self.scale, self.weights_from = top_k, renormalize, scale, weights_from
        self.activation, self.beta, self.linear_beta = activation, beta, linear_beta
        self.quantization = quantization
        weights = {"device": device, "dtype": dtype}
        self.gate = Router(dim, experts, **weights)
        settings = BalanceConfig(kind=balance) if isinstance(balance, str) else balance  # pyright: ignore[reportArgumentType]
        validate_balance(settings)
        self.balance = LayerBalance(settings, experts, top_k, device=device, dtype=self.gate.e_score_correction_bias.dtype)
        self.experts = Experts(experts, latent_dim or dim, hidden, quantization != "none", **weights)
        self.routed_expert_down_proj = Linear(dim, latent_dim, **weights) if latent_dim else None
        self.routed_expert_norm = RMSNorm(latent_dim, eps, **weights) if latent_dim and latent_norm else None
        self.routed_expert_up_proj = Linear(latent_dim, dim, **weights) if latent_dim else None
        act = {"activation": activation, "beta": beta, "linear_beta": linear_beta}
        self.shared_experts = GatedMLP(dim, shared * hidden, **act, **weights) if shared else None
        self._balancer: Any = None  # of `balance_step`
        if init_std is not None and self.gate.weight.device.type != "meta":
            self.reset_parameters(init_std)

    @property
    def num_experts(self) -> int:
        return self.gate.weight.shape[0]

    def reset_parameters(self, std: float = 0.02) -> None:
        """Every matrix normal(0, std), norm weight 1, bias 0."""
        nn.init.normal_(self.gate.weight, std=std)
        self.experts.reset_parameters(std)
        for proj in (self.routed_expert_down_proj, self.routed_expert_up_proj):
            if proj is not None:
                nn.init.normal_(proj.weight, std=std)
        if self.routed_expert_norm is not None:
            nn.init.ones_(self.routed_expert_norm.weight)
        if self.shared_experts is not None:
            self.shared_experts.reset_parameters(std)
        nn.init.zeros_(self.gate.e_score_correction_bias)
        self.balance.reset()

    def forward(self, x: Tensor, *, mask: Tensor | None = None, routing: Routing | None = None) -> Tensor:
        """`mask` [...] is false where a token is padding and must not be counted; `routing` records or forces experts."""
        flat = x.reshape(-1, x.shape[-1])
        out = self._routed(flat, None if mask is None else mask.reshape(-1), routing)
        if self.shared_experts is not None:
            out = out + self.shared_experts(flat)
        return out.view_as(x)

    def _routed(self, x: Tensor, mask: Tensor | None, routing: Routing | None) -> Tensor:
        """What the routed experts make of tokens [T,dim]."""
        ids, weights = self._route(x, mask, routing)
        latent = x if self.routed_expert_down_proj is None else self.routed_expert_down_proj(x)
        act = {"activation": self.activation, "beta": self.beta, "linear_beta": self.linear_beta}
        out = self.experts(latent, ids, weights, **act, quantization=self.quantization)
        if self.routed_expert_norm is not None:
            out = self.routed_expert_norm(out)
        return out if self.routed_expert_up_proj is None else self.routed_expert_up_proj(out)

    def _route(self, x: Tensor, mask: Tensor | None, routing: Routing | None) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        first = routing is None or routing.ids is None
        if routing is not None and routing.ids is not None:
            ids, cutoff = routing.ids, None
        else:
            ids, _, cutoff = route(scores.detach(), self.gate.e_score_correction_bias, self.top_k)
            if routing is not None:
                routing.ids = ids
        weights = self._weights(scores, ids)
        if not self.training:
            return ids, weights
        keep, loss = self.balance.keep(ids, mask), self.balance.loss(scores, mask)
        self._hand_over(loss, routing)
        if first and cutoff is not None and not _in_backward():
            self.balance.observe(scores.detach(), self.gate.e_score_correction_bias, ids, cutoff, mask, keep, loss)
        return ids, weights if keep is None else weights * keep

    def _hand_over(self, loss: Tensor | None, routing: Routing | None) -> None:
        if routing is not None:
            routing.balance_loss = loss
        elif loss is not None and torch.is_grad_enabled():
            raise ValueError('balance "aux" in training: give routing=Routing() and add its balance_loss to the loss')

    def _weights(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Mixture weights [T,k] of the chosen experts; their gradient is the router's only one."""
        source = scores if self.weights_from == "unbiased" else scores + self.gate.e_score_correction_bias
        weights = route_weights(source, ids) if self.renormalize else source.gather(1, ids)
        return weights if self.scale == 1.0 else weights * self.scale

    # -------------------------------------------------- balancing

    @property
    def load(self) -> Tensor | None:
        """Tokens each expert got since the last balancing step, int64 [E]; None before the first training call."""
        return None if self.balance.tally is None else self.balance.tally.load

    def counts(self) -> Tensor | None:
        """What a quantile rule counted, integers to be summed over ranks ([E,bins] of a histogram); None where there is nothing."""
        tally = self.balance.tally
        return None if tally is None or tally.estimator is None else tally.estimator.counts

    def balance_step(self) -> None:
        """`Balancer.step` of this layer alone, in one process."""
        from atoll.nn.balancer import Balancer

        if self._balancer is None:
            self._balancer = Balancer([self])
        self._balancer.step()


def _in_backward() -> bool:
    """Whether a checkpointed layer is being computed again: what it counts was counted in its first pass."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
