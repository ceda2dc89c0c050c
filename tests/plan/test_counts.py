"""The closed-form count against the published table, and against hand-written sums for the options."""

import dataclasses

import pytest

from atoll.config import ModelConfig, VisionConfig, load_config, presets
from atoll.plan import memory, parameters

BLUEPRINT = load_config("blueprint").model
TINY = load_config("tiny").model


def changed(**settings) -> int:
    """Parameters gained by `tiny` under other settings."""
    return parameters.count(dataclasses.replace(TINY, **settings)).total - parameters.count(TINY).total


@pytest.mark.parametrize(
    ("figure", "published"),
    [
        (parameters.kda_mixer(BLUEPRINT, 128), 443_740_416),
        (parameters.mla_mixer(BLUEPRINT), 232_196_096),
        (parameters.dense_mlp(BLUEPRINT), 726_663_168),
        (parameters.routed_expert(BLUEPRINT), 33_030_144),
        (parameters.shared_experts(BLUEPRINT), 132_120_576),
        (parameters.latent_projections(BLUEPRINT), 51_383_808),
        (parameters.router(BLUEPRINT), 6_423_424),
        (parameters.moe_layer(BLUEPRINT)[0], 29_784_936_832),
        (parameters.moe_layer(BLUEPRINT)[1], 718_410_112),
        (2 * BLUEPRINT.hidden_size + 2 * parameters.residual_mix(BLUEPRINT), 43_008),
    ],
)
def test_each_part_of_the_blueprint_has_its_published_size(figure, published):
    assert figure == published


def test_the_blueprint_has_its_published_totals():
    counts = parameters.count(BLUEPRINT)
    assert counts.total == 2_779_484_478_208
    assert counts.active == 104_189_612_640
    assert counts.active_without_head == 103_015_207_520
    assert counts.active_with_embedding == 105_364_017_760
    assert counts[parameters.EMBEDDING].total == counts[parameters.LM_HEAD].total == 1_174_405_120
    assert counts[parameters.ROUTED].total == 2_722_740_830_208


def test_the_blueprint_with_its_tower_has_its_published_totals():
    config = load_config("blueprint-vl").model
    counts = parameters.count(config)
    assert counts[parameters.TOWER].total == parameters.vision_tower(config) == 401_214_464
    assert counts[parameters.PROJECTOR].total == parameters.projector(config) == 46_144_512
    assert counts.total == 2_779_931_837_184
    assert counts.total - counts[parameters.ROUTED].total == 57_191_006_976
    assert counts.active == parameters.count(BLUEPRINT).active == 104_189_612_640  # a token of text meets no tower
    assert dataclasses.replace(config, vision=None) == BLUEPRINT
    assert memory.weight_bytes(config)["mxfp4"] == 1_560_860_324_864  # the released checkpoint's size


def test_options_of_the_tower():
    assert changed(vision=None) == 0
    v = VisionConfig()
    small = changed(vision=v)
    grown = {
        "vt_num_hidden_layers": 5, "qkv_hidden_size": 108, "vt_intermediate_size": 300, "patch_size": 16, "init_pos_emb_height": 20,
        "init_pos_emb_width": 20, "merge_kernel_size": (2, 3), "init_pos_emb_time": 9,
    }  # fmt: skip
    gained = {key: changed(vision=dataclasses.replace(v, **{key: value})) - small for key, value in grown.items()}
    block = 64 * (2 + 4 * 96 + 2 * 256)
    assert gained == {
        "vt_num_hidden_layers": block, "qkv_hidden_size": 4 * 4 * 64 * 12, "vt_intermediate_size": 4 * 2 * 64 * 44,
        "patch_size": 64 * 3 * (256 - 196), "init_pos_emb_height": 64 * 4 * 16, "init_pos_emb_width": 64 * 4 * 16,
        "merge_kernel_size": 384 * (384 + 128) - 256 * (256 + 128), "init_pos_emb_time": 0,
    }  # fmt: skip


def test_the_blueprint_has_69_kda_and_24_mla_layers():
    counts = parameters.count(BLUEPRINT)
    assert (counts[parameters.KDA].number, counts[parameters.MLA].number) == (69, 24)
    mla = [i for i in range(93) if not BLUEPRINT.is_kda(i)]
    assert mla == [*range(3, 92, 4), 92]


def test_only_the_mixed_groups_and_the_embedding_have_fewer_active_than_stored():
    fewer = {g.name for g in parameters.count(BLUEPRINT).groups if g.active != g.total}
    assert fewer == {parameters.EMBEDDING, parameters.ROUTED, parameters.KDA}
    assert parameters.count(BLUEPRINT)[parameters.KDA].total - parameters.count(BLUEPRINT)[parameters.KDA].active == 69 * 32


@pytest.mark.parametrize("preset", presets())
def test_every_presets_groups_add_up(preset):
    counts = parameters.count(load_config(preset).model)
    assert counts.total == sum(g.total for g in counts.groups) > counts.active > 0


def test_options_of_the_delta_attention():
    d, heads, k = TINY.hidden_size, TINY.kda_num_heads, TINY.kda_head_dim
    full, low_rank = heads * k * d, k * d + heads * k * k
    assert changed(use_full_rank_gate=False) == 3 * (low_rank - full)
    assert changed(short_conv_kernel_size=5) == 3 * 3 * heads * k
    assert changed(a_log_storage=128) == 3 * (128 - heads)
    assert changed(gate_lower_bound=None) == 0


def test_options_of_the_latent_attention():
    d, heads, rank = TINY.hidden_size, TINY.num_attention_heads, TINY.q_lora_rank
    queries = heads * (TINY.qk_nope_head_dim + TINY.qk_rope_head_dim)
    assert rank is not None
    assert changed(q_lora_rank=None) == 2 * (queries * d - rank * d - rank - queries * rank)
    assert changed(mla_use_output_gate=False) == -2 * heads * TINY.v_head_dim * d


def test_options_of_the_experts():
    d, experts, width, latent = TINY.hidden_size, TINY.num_experts, TINY.moe_intermediate_size, TINY.routed_expert_hidden_size
    assert latent is not None
    no_latent = experts * 3 * width * (d - latent) - (2 * latent * d + latent)
    assert changed(routed_expert_hidden_size=None) == 4 * no_latent
    assert changed(latent_moe_use_norm=False) == -4 * latent
    assert changed(num_shared_experts=0) == -4 * 3 * d * 2 * width
    moe = parameters.moe_layer(TINY)[0]
    assert changed(first_k_dense_replace=2) == parameters.dense_mlp(TINY) - moe
    assert changed(first_k_dense_replace=0) == moe - parameters.dense_mlp(TINY)


def test_options_of_the_residual():
    assert changed(residual="full") == 0
    assert changed(residual="plain") == -(4 * TINY.num_hidden_layers + 2) * TINY.hidden_size


def test_active_counts_the_visited_experts_alone():
    more = dataclasses.replace(TINY, num_experts=1000)
    gained = parameters.count(more).active - parameters.count(TINY).active
    assert gained == 4 * (1000 - 896) * (TINY.hidden_size + 1)  # the routers grow, the visits do not


def test_layer_lists_are_respected():
    listed = dataclasses.replace(TINY, full_attn_layers=(1, 5))
    assert parameters.count(listed)[parameters.MLA].number == 2
    assert [i for i in range(5) if not listed.is_kda(i)] == [0, 4]


def test_state_of_a_blueprint_sequence_has_its_published_size():
    state = memory.state_bytes(BLUEPRINT)
    assert state["kda_state"] / 2**20 == pytest.approx(414.0, abs=0.05)
    assert state["kda_state"] / 69 / 1e6 == pytest.approx(6.29, abs=0.005)
    assert state["kda_conv"] / 2**20 == pytest.approx(14.55, abs=0.005)
    assert state["mla_per_token"] == 27_648
    assert state["mla_per_token"] * 1_048_576 / 1e9 == pytest.approx(29.0, abs=0.05)
    assert state["depth_bank_per_token"] == 114_688
    assert state["depth_bank_per_token"] * 131_072 / 1e9 == pytest.approx(15.0, abs=0.05)


def test_a_plain_residual_banks_nothing_and_a_full_one_every_sublayer():
    assert memory.depth_sources(dataclasses.replace(BLUEPRINT, residual="plain")) == 0
    assert memory.depth_sources(dataclasses.replace(BLUEPRINT, residual="full")) == 186
    assert memory.depth_sources(TINY) == 3  # 5 layers in blocks of 2


def test_float32_weights_take_four_bytes_each():
    assert memory.weight_bytes(ModelConfig())["float32"] == 4 * parameters.count(ModelConfig()).total
