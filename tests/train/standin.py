"""A model of a few thousand parameters with the real one's interface: what the loop needs, and nothing to wait for.

Memoryless: a token predicts the next through an embedding, a matrix and eight routed experts with a selection bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.config import BalanceConfig, ModelConfig


@dataclass
class Output:
    logits: Tensor | None
    loss: Tensor | None
    num_targets: Tensor | None
    cache: Any
    routing: list[Tensor]
    balance_loss: Tensor | None = None


class Gate(nn.Module):
    def __init__(self, dim: int, experts: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, dim, **factory) * 0.1)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Mixture(nn.Module):
    def __init__(self, dim: int, experts: int, top: int, **factory: Any) -> None:
        super().__init__()
        self.gate = Gate(dim, experts, **factory)
        self.experts = nn.Module()
        self.experts.w1 = nn.Parameter(torch.randn(experts, dim, dim, **factory) * 0.1)
        self.top, self.load = top, torch.zeros(experts)

    def forward(self, x: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(x, self.gate.weight))
        ids = (scores + self.gate.e_score_correction_bias).topk(self.top, -1).indices if forced is None else forced
        if self.training:
            self.load += torch.bincount(ids.reshape(-1), minlength=len(self.load))
        weights = scores.gather(1, ids)
        every = torch.einsum("td,eod->teo", x, self.experts.w1)
        chosen = every.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))
        return x + (weights[..., None] * chosen).sum(1), ids


class Model(nn.Module):
    """Built like the real model."""

    def __init__(self, config: ModelConfig, balance: BalanceConfig | None = None, *, dtype=torch.float32, device=None) -> None:
        super().__init__()
        self.config, self.gradient_checkpointing = config, False
        d, factory = config.hidden_size, {"dtype": dtype, "device": device}
        self.embed_tokens = nn.Embedding(config.vocab_size, d, **factory)
        self.mix = nn.Linear(d, d, bias=False, **factory)
        self.block_sparse_moe = Mixture(d, config.num_experts, config.num_experts_per_token, **factory)
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False, **factory)

    def moe_layers(self) -> list[Mixture]:
        return [self.block_sparse_moe]

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def new_cache(self, batch: int) -> str:
        return "nothing to remember"

    @torch.no_grad()
    def balance_step(self, reduce: Any = None, skip: Tensor | None = None) -> dict[str, Any]:
        layer = self.block_sparse_moe
        load, bias = layer.load, layer.gate.e_score_correction_bias
        new = bias - 0.01 * (load / load.mean() - 1)
        bias.copy_(new if skip is None else torch.where(skip > 0, bias, new))
        layer.load = torch.zeros_like(load)
        return {
            "max_vio": [float(load.max() / load.mean() - 1)],
            "dead": [float((load == 0).float().mean())],
            "max_load": [float(load.max())],
            "mean_load": [float(load.mean())],
            "spread": [(load / load.mean()).quantile(torch.tensor([0, 0.1, 0.5, 0.9, 1])).tolist()],
        }

    def balance_state(self) -> dict[str, Tensor]:
        return {}

    def forward(self, input_ids, labels=None, cu_seqlens=None, cache=None, logits=None, routing=None, record=None) -> Output:
        x = torch.tanh(self.mix(self.embed_tokens(input_ids.flatten())))
        x, ids = self.block_sparse_moe(x, None if routing is None else routing[0])
        scores = self.lm_head(x).view(*input_ids.shape, -1)
        if record is not None:
            record["load"] = [torch.bincount(ids.flatten(), minlength=self.config.num_experts)]
        if labels is None:
            return Output(scores, None, None, cache, [ids])
        targets = labels[:, 1:].flatten()
        count = (targets != -100).sum()
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), targets, reduction="sum", ignore_index=-100) / count.clamp(min=1)
        return Output(None, loss, count, cache, [ids])
