"""`config.json`: both forms, what absence means, what is refused."""

from __future__ import annotations

import copy
import json

import pytest
from hub.golden import GOLDEN

from atoll.config import ModelConfig, UserError, load_config, presets
from atoll.hub.config_json import from_json, is_kimi_linear, to_json
from atoll.hub.load import read_config

LINEAR = ModelConfig(
    residual="plain",
    routed_expert_hidden_size=None,
    latent_moe_use_norm=False,
    hidden_act="silu",
    gate_lower_bound=None,
    use_full_rank_gate=False,
    mla_use_output_gate=False,
    q_lora_rank=None,
    full_attn_layers=(4, 5),
)


BOILERPLATE = {
    "_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "length_penalty", "max_length", "num_beam_groups", "num_beams",
    "num_return_sequences", "repetition_penalty", "return_dict", "temperature", "top_k", "top_p", "transformers_version", "typical_p",
}  # fmt: skip


def released(folder: str) -> dict:
    return json.loads((GOLDEN / folder / "config.json").read_text())


@pytest.mark.parametrize("name", presets())
def test_presets_come_back(name):
    m = load_config(name).model
    back = from_json(json.loads(json.dumps(to_json(m))))
    assert back.full_attention() == m.full_attention()
    # A_log's padding is read off the weights, not the file
    assert {**vars(back), "full_attn_layers": None, "a_log_storage": None} == {**vars(m), "full_attn_layers": None, "a_log_storage": None}


@pytest.mark.parametrize("change", [{}, {"router_weights": "biased"}, {"latent_norm_eps": 1e-5}, {"routed_scaling_factor": 2.446}])
def test_flat_form_comes_back(change):
    m = ModelConfig(**{**vars(LINEAR), **change})
    tree = to_json(m)
    assert tree["model_type"] == "kimi_linear"
    assert "text_config" not in tree
    assert from_json(tree) == m


@pytest.mark.parametrize(
    "change",
    [
        {"residual": "full"},
        {"residual": "block", "attn_res_block_size": 3},
        {"gate_lower_bound": -2.0},
        {"hidden_act": "situ", "activation_situ_linear_beta": None},
        {"mla_use_output_gate": True},
        {"use_full_rank_gate": True},
        {"routed_expert_hidden_size": 32},
    ],
)
def test_one_later_mechanism_makes_it_nested(change):
    m = ModelConfig(**{**vars(LINEAR), **change})
    tree = to_json(m)
    assert tree["model_type"] == "kimi_k3"
    assert from_json(tree) == m


def test_released_nested_file():
    m = read_config(GOLDEN / "k3_tiny")
    assert m.full_attention() == (3, 5, 6)
    assert (m.residual, m.attn_res_block_size, m.hidden_act, m.gate_lower_bound) == ("block", 4, "situ", -5.0)
    assert (m.q_lora_rank, m.routed_expert_hidden_size, m.a_log_storage) == (40, 32, 128)
    assert (m.bos_token_id, m.eos_token_id, m.pad_token_id) == (1, 2, 0)


def test_released_flat_file():
    """Absent keys of the flat form switch the later mechanisms off; head_dim and rope_theta say nothing."""
    m = read_config(GOLDEN / "kimi_linear_tiny")
    assert is_kimi_linear(m)
    assert (m.gate_lower_bound, m.q_lora_rank, m.residual, m.routed_expert_hidden_size) == (None, None, "plain", None)
    assert (m.routed_scaling_factor, m.num_shared_experts, m.hidden_act) == (2.446, 1, "silu")


@pytest.mark.parametrize("folder", ["k3_tiny", "k3_tiny_mxfp4", "kimi_linear_tiny"])
def test_every_released_key_with_a_meaning_is_written_as_released(folder):
    theirs = released(folder)
    mine = to_json(read_config(GOLDEN / folder), theirs["dtype"], max_length=4096)
    if folder.startswith("k3_tiny"):
        assert {k: mine[k] for k in mine if k in theirs and k != "text_config"} == {k: theirs[k] for k in mine if k != "text_config"}
        mine, theirs = mine["text_config"], theirs["text_config"]
    assert {k: theirs.get(k) for k in mine} == mine
    missing = {k for k, v in theirs.items() if k not in mine and v not in (None, False, {}, 0, 0.0)}
    assert missing <= BOILERPLATE


def test_a_nested_file_without_text_config_is_read_too():
    tree = released("k3_tiny")
    flat = {**tree["text_config"], "model_type": "kimi_k3"}
    assert from_json(flat) == from_json(tree)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("model_type",), "kimi_k2", ["model_type", "kimi_k2", "kimi_k3"]),
        (("model_type",), None, ["model_type", "None"]),
        (("vision_config",), {"vt_hidden_size": 4}, ["vision_config.vt_num_hidden_layers", "missing"]),
        (("text_config",), [], ["text_config"]),
        (("text_config", "hidden_size"), ..., ["hidden_size", "missing"]),
        (("text_config", "hidden_size"), "wide", ["hidden_size", "wide"]),
        (("text_config", "hidden_size"), -3, ["hidden_size", "-3"]),
        (("text_config", "num_experts_per_token"), 9, ["num_experts_per_token", "9"]),
        (("text_config", "num_key_value_heads"), 2, ["num_key_value_heads", "2"]),
        (("text_config", "hidden_act"), "gelu", ["hidden_act", "gelu"]),
        (("text_config", "moe_layer_freq"), 2, ["moe_layer_freq", "2"]),
        (("text_config", "moe_router_activation_func"), "softmax", ["moe_router_activation_func"]),
        (("text_config", "quantization_config"), {"format": "nvfp4-pack-quantized"}, ["nvfp4-pack-quantized", "mxfp4-pack-quantized"]),
        (("quantization_config",), {"quant_method": "fp8"}, ["quantization_config", "fp8", "mxfp4-pack-quantized"]),
        (("text_config", "quantization_config"), 3, ["quantization_config", "3"]),
        (("text_config", "expert_activations"), "int8", ["expert_activations", "int8", "mxfp8"]),
        (("text_config", "linear_attn_config"), ..., ["linear_attn_config", "missing"]),
        (("text_config", "linear_attn_config"), 3, ["linear_attn_config", "3"]),
        (("text_config", "linear_attn_config", "full_attn_layers"), [0, 5], ["full_attn_layers"]),
        (("text_config", "linear_attn_config", "full_attn_layers"), "3,5", ["full_attn_layers"]),
        (("text_config", "linear_attn_config", "kda_layers"), [1, 2], ["kda_layers", "1, 2, 4"]),
        (("text_config", "linear_attn_config", "kda_layers"), 4, ["kda_layers", "1, 2, 4"]),
        (("text_config", "linear_attn_config", "kda_layers"), [None, "1"], ["kda_layers"]),
        (("text_config", "linear_attn_config", "use_full_rank_gate"), "yes", ["use_full_rank_gate", "true or false"]),
        (("text_config", "mla_use_output_gate"), 1, ["mla_use_output_gate", "true or false"]),
        (("text_config", "num_hidden_layers"), None, ["num_hidden_layers", "None"]),
        (("text_config", "num_hidden_layers"), "six", ["num_hidden_layers", "six"]),
        (("text_config", "num_hidden_layers"), [6], ["num_hidden_layers", "[6]"]),
        (("text_config", "num_hidden_layers"), 10**30, ["num_hidden_layers", "at most 4,096"]),
        (("text_config", "num_experts"), 10**12, ["num_experts", "at most 262,144"]),
        (("text_config", "linear_attn_config", "gate_lower_bound"), -50, ["gate_lower_bound", "-50"]),
    ],
)
def test_refused_in_one_line(path, value, says):
    tree = copy.deepcopy(released("k3_tiny"))
    *inner, last = path
    at = tree
    for key in inner:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    with pytest.raises(UserError) as caught:
        from_json(tree, "config.json")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("config.json: ")
    assert all(word in message for word in says), message
