"""Small models with every number at random, in each form that another engine is asked to load."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atoll.config import ModelConfig
from atoll.model import Model

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "kda_num_heads": 4, "kda_head_dim": 16,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "intermediate_size": 96,
    "num_experts": 8, "num_experts_per_token": 3, "moe_intermediate_size": 24, "routed_expert_hidden_size": 32, "attn_res_block_size": 4,
}  # fmt: skip
NESTED: dict[str, dict[str, Any]] = {
    "blueprint": {},
    "plain residual": {"residual": "plain"},
    "one layer a block": {"attn_res_block_size": 1},
    "softplus decay": {"gate_lower_bound": None},
    "another bound": {"gate_lower_bound": -2.0},
    "low-rank output gate": {"use_full_rank_gate": False},
    "full-width experts": {"routed_expert_hidden_size": None},
    "no latent norm": {"latent_moe_use_norm": False},
    "direct query, no MLA gate": {"q_lora_rank": None, "mla_use_output_gate": False},
    "uncapped linear half": {"activation_situ_linear_beta": None},
    "no shared expert": {"num_shared_experts": 0},
    "scaled router": {"routed_scaling_factor": 2.446},
    "router not renormalised": {"moe_renormalize": False},
    "no dense layer": {"first_k_dense_replace": 0},
    "three dense layers, MLA first": {"first_k_dense_replace": 3, "full_attn_layers": (1, 4, 6)},
    "padded A_log": {"a_log_storage": 128},
    "all the older choices": {
        "residual": "plain", "gate_lower_bound": None, "use_full_rank_gate": False, "routed_expert_hidden_size": None, "q_lora_rank": None,
        "mla_use_output_gate": False, "latent_moe_use_norm": False, "routed_scaling_factor": 2.446, "num_shared_experts": 1,
    },
}  # fmt: skip
FLAT: dict[str, Any] = {**NESTED["all the older choices"], "hidden_act": "silu"}


def random_model(seed: int = 0, **change: Any) -> Model:
    """Every tensor of the order that moves the logits by about 1: norms and gates off their starts, router biases and all."""
    m = Model(ModelConfig(**{**SMALL, **change}))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in [*m.named_parameters(), *((n, b) for n, b in m.named_buffers() if n.endswith("correction_bias"))]:
            noise = torch.randn(t.shape, generator=g)
            if t.dim() == 1 and "norm" in name:
                t.copy_(1 + 0.2 * noise)
            elif name.endswith(("A_log", "dt_bias")):
                t.copy_(0.5 * noise)
            elif "embed_tokens" in name:
                t.copy_(noise)
            elif "_res_proj" in name:
                t.copy_(noise / t.shape[-1] ** 0.5)
            elif name.endswith("correction_bias"):
                t.copy_(0.1 * noise)
            else:  # matrices, experts, convolutions: keep the size of what passes through
                t.copy_(noise / t.shape[-1] ** 0.5)
    return m.eval()


def tokens(rows: int, length: int, vocab: int = 96, seed: int = 1) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
