"""The Kimi-Linear presets: their published counts, and training in both decay forms with the same code."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import MICRO, metrics, write_corpus

import atoll
from atoll import train
from atoll.config import load_config
from atoll.hub.config_json import is_kimi_linear, to_json
from atoll.hub.layout import slots
from atoll.model import Model
from atoll.plan import parameters

RELEASED = load_config("kimi-linear-48b").model
SMALL = {k: v for k, v in MICRO.items() if k not in ("model.q_lora_rank", "model.routed_expert_hidden_size", "model.attn_res_block_size")}


def test_the_released_model_has_its_published_tensors_and_parameters():
    """20,493 tensors in the release; 48B total and 3B active by its name, exactly these from its shapes."""
    model = Model(RELEASED, device="meta")
    assert len(slots(model)) == 20_493
    counts = parameters.count(RELEASED)
    assert counts.total == model.num_parameters() == 49_122_681_728
    assert counts.active == 3_106_972_544
    assert counts.total - counts[parameters.EMBEDDING].total == 48_745_194_368
    kda = 4 * 4096 * 2304 + 3 * 4096 * 4 + 128 * (2304 + 4096) + 4096 + 32 + 32 * 2304 + 128 * (2304 + 4096) + 128
    mla = 32 * 192 * 2304 + 576 * 2304 + 512 + 32 * 256 * 512 + 4096 * 2304
    moe = 256 * 3 * 2304 * 1024 + 3 * 2304 * 1024 + 256 * 2305
    by_hand = 2 * 163840 * 2304 + 20 * kda + 7 * mla + 3 * 2304 * 9216 + 26 * moe + 55 * 2304
    assert counts.total == by_hand


def test_the_released_models_config_is_the_released_one():
    tree = to_json(RELEASED)
    expected = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16", "vocab_size": 163840,
        "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
        "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.446, "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True, "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "hidden_act": "silu",
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
        "rms_norm_eps": 1e-05, "rope_theta": 10000, "rope_scaling": None, "model_max_length": 1048576, "num_nextn_predict_layers": 0,
        "initializer_range": 0.02, "tie_word_embeddings": False, "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
        "use_cache": True,
    }  # fmt: skip
    linear = tree.pop("linear_attn_config")
    assert tree == expected
    assert linear.pop("full_attn_layers") == [4, 8, 12, 16, 20, 24, 27]
    assert len(linear.pop("kda_layers")) == 20
    assert linear == {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}


def test_the_tiny_one_is_of_the_family():
    tiny = load_config("kimi-linear-tiny").model
    assert is_kimi_linear(tiny)
    for name in ("num_experts", "num_experts_per_token", "num_shared_experts", "routed_scaling_factor", "router_weights", "hidden_act"):
        assert getattr(tiny, name) == getattr(RELEASED, name)
    assert 20e6 < parameters.count(tiny).total < 30e6


@pytest.mark.parametrize(
    ("preset", "change"),
    [
        ("kimi-linear-tiny", {}),
        ("kimi-linear-tiny", {"model.gate_lower_bound": -5.0}),
        ("tiny", {"model.gate_lower_bound": None}),
    ],
    ids=["softplus", "bounded", "blueprint-softplus"],
)
def test_it_trains_in_both_decay_forms(tmp_path, preset, change):
    shapes = MICRO if preset == "tiny" else SMALL
    settings = {**shapes, "data.source": str(write_corpus(tmp_path / "text")), "data.cache": str(tmp_path / "cache"), **change}
    config = load_config(preset, {**settings, "train.export": True})
    out = train.run(config, tmp_path / "run")
    lines = [line for line in metrics(out) if "loss" in line]
    assert len(lines) == 12
    assert not any(line["skipped"] for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    model = atoll.load(out)
    wanted = dataclasses.replace(config.model, full_attn_layers=config.model.full_attention())
    assert {**vars(model.config), "activation_situ_beta": 0} == {**vars(wanted), "activation_situ_beta": 0}
    form = (out / "model" / "config.json").read_text()
    assert ('"kimi_k3"' in form) == (preset == "tiny" or bool(change))
    ids = torch.tensor([[5, 6, 7]])
    assert model.generate(ids, 2, temperature=0).shape == (1, 5)
