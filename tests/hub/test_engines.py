"""Every key that other engines read stands in what Atoll writes, by name; and what is said of each engine."""

from __future__ import annotations

import pytest
from hub.models import FLAT, SMALL

from atoll.config import ModelConfig, load_config, presets
from atoll.hub.config_json import to_json
from atoll.hub.engines import engines, missing_keys

# Read in text_config by both vLLM and mlx-lm.
NESTED = """
hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size moe_intermediate_size rms_norm_eps vocab_size
hidden_act activation_situ_beta activation_situ_linear_beta attn_res_block_size q_lora_rank kv_lora_rank qk_nope_head_dim
qk_rope_head_dim v_head_dim mla_use_nope mla_use_output_gate num_experts num_experts_per_token num_shared_experts
moe_router_activation_func moe_renormalize routed_scaling_factor first_k_dense_replace moe_layer_freq num_expert_group topk_group
topk_method routed_expert_hidden_size latent_moe_use_norm linear_attn_config
""".split()  # noqa: SIM905
LINEAR = "num_heads head_dim short_conv_kernel_size kda_layers full_attn_layers gate_lower_bound use_full_rank_gate".split()  # noqa: SIM905
# Without a default in mlx-lm 0.32.2's kimi_linear, or read by it or by transformers 5.24's.
FLAT_KEYS = """
model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size head_dim rope_theta
rms_norm_eps linear_attn_config model_max_length num_experts moe_intermediate_size kv_lora_rank rope_scaling tie_word_embeddings
qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope num_experts_per_token num_shared_experts moe_router_activation_func
moe_renormalize routed_scaling_factor first_k_dense_replace moe_layer_freq use_grouped_topk num_expert_group topk_group
q_lora_rank hidden_act initializer_range bos_token_id eos_token_id pad_token_id use_cache
""".split()  # noqa: SIM905
FORMS = [{}, {"residual": "plain"}, {"gate_lower_bound": None}, {"routed_expert_hidden_size": None}, {"activation_situ_linear_beta": None}]


@pytest.mark.parametrize("change", FORMS, ids=str)
@pytest.mark.parametrize("key", NESTED)
def test_each_key_of_the_nested_form(key, change):
    assert key in to_json(ModelConfig(**{**SMALL, **change}))["text_config"]


@pytest.mark.parametrize("key", LINEAR)
def test_each_key_of_the_linear_attention(key):
    assert key in to_json(ModelConfig(**SMALL))["text_config"]["linear_attn_config"]


@pytest.mark.parametrize("key", FLAT_KEYS)
def test_each_key_of_the_flat_form(key):
    assert key in to_json(ModelConfig(**{**SMALL, **FLAT}))


def test_what_marks_the_forms():
    nested, flat = to_json(ModelConfig(**SMALL)), to_json(ModelConfig(**{**SMALL, **FLAT}))
    assert (nested["model_type"], nested["architectures"]) == ("kimi_k3", ["KimiK3ForConditionalGeneration"])
    assert nested["text_config"]["model_type"] == flat["model_type"] == "kimi_linear"
    assert flat["architectures"] == ["KimiLinearForCausalLM"]
    assert nested["text_config"]["linear_attn_config"]["kda_layers"] == [1, 2, 3]  # counted from 1
    assert nested["text_config"]["linear_attn_config"]["full_attn_layers"] == [4]


@pytest.mark.parametrize("name", presets())
def test_no_preset_lacks_a_key_and_each_has_an_engine(name):
    tree = to_json(load_config(name).model)
    assert missing_keys(tree) == []
    assert [] in engines(tree).values()


@pytest.mark.parametrize(
    ("change", "engine", "says"),
    [
        ({}, "mlx-lm", None),
        ({"residual": "plain", "gate_lower_bound": None, "routed_expert_hidden_size": None}, "mlx-lm", None),
        ({"hidden_act": "silu"}, "mlx-lm", "situ alone"),
        ({"latent_norm_eps": 1e-5}, "mlx-lm", "latent norms"),
        ({"residual": "full"}, "mlx-lm", "full attention residual"),
        ({}, "transformers", "no class of its own"),
        ({"router_weights": "biased"}, "vLLM", "unbiased scores"),
        (FLAT, "transformers", None),
        ({**FLAT, "q_lora_rank": 8}, "transformers", None),
        ({**FLAT, "latent_norm_eps": 1e-5}, "transformers", "latent norms"),
        ({**FLAT, "num_shared_experts": 0}, "transformers", "num_shared_experts"),
        ({**FLAT, "router_weights": "biased"}, "transformers", "unbiased scores"),
        ({**FLAT, "quantization": "mxfp4", "moe_intermediate_size": 32}, "transformers", "quantised experts"),
        ({**FLAT, "quantization": "mxfp4", "moe_intermediate_size": 32, "latent_norm_eps": 1e-5}, "mlx-lm", "quantised experts"),
        ({**FLAT, "full_attn_layers": ()}, "transformers", "use_cache=False"),
        (FLAT, "mlx-lm", "rms_norm_eps = 1e-05"),
        ({**FLAT, "latent_norm_eps": 1e-5}, "mlx-lm", None),
        ({**FLAT, "latent_norm_eps": 1e-5, "q_lora_rank": 8}, "mlx-lm", "direct query"),
    ],
)
def test_what_is_said_of_an_engine(change, engine, says):
    reasons = engines(to_json(ModelConfig(**{**SMALL, **change})))[engine]
    assert (says is None) == (not reasons), reasons
    assert says is None or says in "; ".join(reasons)


def test_a_key_that_was_taken_out_is_missed():
    tree = to_json(ModelConfig(**SMALL))
    del tree["text_config"]["topk_method"]
    del tree["text_config"]["linear_attn_config"]["gate_lower_bound"]
    assert missing_keys(tree) == ["topk_method", "linear_attn_config.gate_lower_bound"]
    assert "topk_method is missing" in engines(tree)["vLLM"]
