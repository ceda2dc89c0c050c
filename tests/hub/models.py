"""Small models in every form that a folder can hold."""

from __future__ import annotations

from typing import Any

import torch

from atoll.config import ModelConfig
from atoll.model import Model

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "kda_num_heads": 2, "kda_head_dim": 8,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 48,
    "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16,
}  # fmt: skip
FLAT: dict[str, Any] = {
    "residual": "plain", "routed_expert_hidden_size": None, "hidden_act": "silu", "gate_lower_bound": None,
    "use_full_rank_gate": False, "mla_use_output_gate": False, "latent_moe_use_norm": False, "q_lora_rank": None,
}  # fmt: skip


def build(dtype: torch.dtype = torch.float32, **change: Any) -> Model:
    """A small model with no two tensors alike."""
    m = Model(ModelConfig(**{**SMALL, **change}), dtype=dtype)
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in [*m.parameters(), *m.buffers()]:
            tensor.copy_(torch.randn(tensor.shape))
    return m
