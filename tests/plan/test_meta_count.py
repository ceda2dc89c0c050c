"""The model built on the meta device agrees with the closed form, group by group."""

import dataclasses

import pytest

from atoll.config import VisionConfig, load_config, presets
from atoll.plan import meta, parameters, render, report

TINY = load_config("tiny").model


@pytest.mark.parametrize("preset", presets())
def test_every_preset_agrees(preset):
    assert meta.disagreements(load_config(preset).model) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"use_full_rank_gate": False},
        {"q_lora_rank": None, "mla_use_output_gate": False},
        {"routed_expert_hidden_size": None},
        {"latent_moe_use_norm": False, "num_shared_experts": 0},
        {"residual": "plain"},
        {"vision": VisionConfig()},
        {"vision": VisionConfig(qkv_hidden_size=60, patch_size=8, init_pos_emb_width=5, merge_kernel_size=(2, 3)), "hidden_size": 96},
        {"residual": "full"},
        {"first_k_dense_replace": 3},
        {"first_k_dense_replace": 0, "full_attn_layers": (2, 3)},
        {"gate_lower_bound": None, "hidden_act": "silu", "short_conv_kernel_size": 3},
    ],
)
def test_every_option_agrees(settings):
    assert meta.disagreements(dataclasses.replace(TINY, **settings)) == {}


def test_the_padding_is_all_that_parts_model_and_files():
    config = load_config("blueprint").model
    built = meta.measure(config)
    assert sum(built.values()) + meta.a_log_padding(config) == parameters.count(config).total == 2_779_484_478_208
    assert meta.a_log_padding(config) == 2_208


def test_the_plan_says_that_it_was_built():
    plan = report(TINY)
    assert plan["built"] == {"agrees": True, "differs": {}}
    assert "every group agrees" in render(plan)


def test_an_unknown_name_is_not_counted_silently():
    with pytest.raises(KeyError, match="something_new"):
        meta.group_of("language_model.model.something_new.weight", TINY)
