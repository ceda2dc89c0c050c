"""Small models for the remote code's tests: built and exported by Atoll, loaded by transformers from the folder alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="hf-home-"))  # copied code lands there, not in the owner's cache

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from atoll.config import ModelConfig
from atoll.hub import export
from atoll.hub.layout import slots
from atoll.model import Model

SMALL = {
    "vocab_size": 320, "hidden_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2, "kda_num_heads": 2, "kda_head_dim": 8,
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 40,
    "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16, "attn_res_block_size": 2,
}  # fmt: skip

# Every way in which an exported model may differ from the blueprint, in few models.
FORMS = {
    "blueprint": {},
    "padded A_log": {"a_log_storage": 16, "full_attn_layers": (2, 5)},
    "full residual": {"residual": "full", "latent_moe_use_norm": False, "activation_situ_linear_beta": None},
    "plain residual": {"residual": "plain", "gate_lower_bound": -2.0, "num_shared_experts": 0, "use_full_rank_gate": False},
    "legacy parts": {
        "gate_lower_bound": None,
        "use_full_rank_gate": False,
        "mla_use_output_gate": False,
        "q_lora_rank": None,
        "routed_expert_hidden_size": None,
        "hidden_act": "silu",
        "attn_res_block_size": 3,
        "first_k_dense_replace": 2,
    },
    "other router": {
        "router_weights": "biased",
        "routed_scaling_factor": 2.446,
        "moe_renormalize": False,
        "latent_norm_eps": 1e-5,
        "short_conv_kernel_size": 3,
    },
}


def build(dtype: torch.dtype = torch.float64, seed: int = 0, **changes) -> Model:
    """A small model in which every term counts: no norm, filter, bias or pseudo-query is at its start."""
    model = Model(ModelConfig(**{**SMALL, "initializer_range": 0.2, **changes}), dtype=dtype)
    model.reset_parameters(seed)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "_res_proj" in name:
                p.normal_(std=0.5)
            elif "norm" in name or "A_log" in name:
                p.add_(0.2 * torch.randn_like(p))
            elif "e_score_correction_bias" in name:
                p.normal_(std=0.1)
    return model


def hugging(folder: Path, dtype: torch.dtype = torch.float64, **options) -> PreTrainedModel:
    """What a user of transformers gets from `folder`; every tensor of it must be used, and none missed."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


def pair(folder: Path, dtype: torch.dtype = torch.float64, **changes) -> tuple[Model, PreTrainedModel]:
    """The same model twice: as Atoll holds it, and as transformers loads what Atoll saved."""
    ours = build(dtype, **changes).eval()
    export.save(ours, folder)
    return ours, hugging(folder, dtype).eval()


def tokens(rows: int, length: int, seed: int = 1, vocab: int = SMALL["vocab_size"]) -> Tensor:
    """Random ids without the special ones."""
    return torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def stored_gradients(model: Model) -> dict[str, Tensor]:
    """The gradient of every stored parameter, under its name in the folder."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    out = {}
    for slot in slots(model):
        if (grad := grads.get(slot.inner)) is not None:
            start = slot.tensor.storage_offset()
            out[slot.name] = grad.flatten()[start : start + slot.tensor.numel()].view(slot.tensor.shape)
    return out


def hugging_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """The same of the model in transformers: experts taken apart."""
    out = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        stem, _, last = name.rpartition(".")
        if stem.endswith(".experts"):
            out |= {f"{stem}.{e}.{last}.weight": part for e, part in enumerate(p.grad)}
        else:
            out[name] = p.grad
    return out
