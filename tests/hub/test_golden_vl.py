"""The multimodal golden folder: strict load, tower, projector, merged embeddings, logits, and the same bytes written back."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hub.golden import ATOL, GOLDEN, arrays, distance
from safetensors.torch import load_file

from atoll.config import UserError
from atoll.hub import export
from atoll.hub.config_json import from_json, to_json
from atoll.hub.load import load_into, read_config
from atoll.model import Model, load

FOLDER = "k3_tiny_vl"
FEATURES = 2e-5  # two right implementations differ by at most 3.3e-6; columns and rows swapped by 2.4
EPS32, EPS16 = 2.0**-23, 2.0**-7


@pytest.fixture(scope="module")
def io():
    return arrays(FOLDER, "io")


def build(dtype: torch.dtype, eps: float | None) -> Model:
    config = read_config(GOLDEN / FOLDER)
    m = Model(dataclasses.replace(config, vision=dataclasses.replace(config.vision, norm_eps=eps)), dtype=dtype).eval()
    load_into(m, GOLDEN / FOLDER)
    return m


CASES = [(torch.float32, None, ""), (torch.float64, EPS32, ""), (torch.float32, EPS16, "_eps_bf16"), (torch.float64, EPS16, "_eps_bf16")]


@pytest.mark.parametrize(("dtype", "eps", "golden"), CASES)
def test_tower_and_projector(io, dtype, eps, golden):
    m = build(dtype, eps)
    with torch.no_grad():
        merged = m.vision_tower(io["pixel_values"], io["grid_thws"])
        features = m.mm_projector(merged)
        video = m.mm_projector(m.vision_tower(io["video.pixel_values"], io["video.grid_thws"]))
    assert distance(merged, io[f"tower_features{golden}"]) < FEATURES
    assert distance(features, io[f"image_features{golden}"]) < FEATURES
    assert distance(video, io[f"video.image_features{golden}"]) < FEATURES
    assert m.vision_tower.feature_lengths(io["grid_thws"]) == io["feature_lengths"].tolist()


def test_the_two_epsilons_are_told_apart(io):
    assert distance(io["image_features"], io["image_features_eps_bf16"]) > 1000 * FEATURES


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, None), (torch.float64, EPS32)])
def test_merged_embeddings_and_logits(io, dtype, eps):
    m, read = build(dtype, eps), []
    hook = m.language_model.model.layers[0].register_forward_pre_hook(lambda _m, args: read.append(args[0].rows()[-1]))
    images = {"pixel_values": io["pixel_values"], "grid_thws": io["grid_thws"]}
    with torch.no_grad():
        out = m(io["input_ids"], **images)
        cache = m.new_cache(1)
        first = m(io["input_ids"][:, :20], cache=cache, **images).logits
        rest = [m(io["input_ids"][:, t : t + 1], cache=cache).logits for t in range(20, 23)]
    hook.remove()
    assert distance(read[0], io["inputs_embeds"]) < FEATURES
    assert distance(out.logits, io["logits"]) < ATOL
    assert distance(torch.cat([first, *rest], 1), io["logits"]) < ATOL
    assert cache.length == 43


def test_one_placeholder_a_feature_is_the_same(io):
    m, ids = build(torch.float64, EPS32), io["input_ids"][0]
    counts = torch.ones_like(ids).masked_scatter(ids == 250, io["feature_lengths"])
    with torch.no_grad():
        out = m(ids.repeat_interleave(counts)[None], pixel_values=io["pixel_values"], grid_thws=io["grid_thws"])
    assert distance(out.logits, io["logits"]) < ATOL


def test_released_tensors_are_written_back_byte_for_byte(tmp_path):
    """Loaded in float32, written in the stored types; and saved, loaded and saved again every file is the same."""
    export.save(load(GOLDEN / FOLDER), tmp_path / "a", dtype=torch.bfloat16)
    before, after = load_file(GOLDEN / FOLDER / "model.safetensors"), load_file(tmp_path / "a" / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert torch.equal(tensor.contiguous().view(torch.uint8), after[name].view(torch.uint8)), name
    again = load(tmp_path / "a", dtype=torch.bfloat16)
    assert again.vision_tower.encoder.blocks[0].wqkv.weight.dtype == torch.bfloat16
    export.save(again, tmp_path / "b")
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "b").iterdir())
    assert set(names) == {"config.json", "generation_config.json", "model.safetensors", *export.REMOTE}
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_folder_comes_back(tmp_path, dtype):
    m = build(dtype, None)
    export.save(m, tmp_path / "a", shard_bytes=50_000)
    again = load(tmp_path / "a", dtype=dtype)
    for (name, a), b in zip(m.state_dict().items(), again.state_dict().values(), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


# ---------------------------------------------------------------- config.json


def released() -> dict:
    return json.loads((GOLDEN / FOLDER / "config.json").read_text())


def test_every_released_key_with_a_meaning_is_written_as_released():
    mine, theirs = to_json(read_config(GOLDEN / FOLDER), "float32", max_length=4096), released()
    assert {k: mine[k] for k in mine if k != "text_config"} == {
        **{k: v for k, v in theirs.items() if k != "text_config"},
        "vision_config": {k: v for k, v in theirs["vision_config"].items() if k != "_attn_implementation"},
    }
    assert {k: theirs["text_config"].get(k) for k in mine["text_config"]} == mine["text_config"]


def test_an_explicit_epsilon_comes_back_and_the_released_form_does_not_know_it():
    m = read_config(GOLDEN / FOLDER)
    assert "norm_eps" not in to_json(m)["vision_config"]
    fixed = dataclasses.replace(m, vision=dataclasses.replace(m.vision, norm_eps=EPS16, merge_kernel_size=(2, 4)))
    assert from_json(json.loads(json.dumps(to_json(fixed)))).vision == fixed.vision


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("media_placeholder_token_id",), ..., ["media_placeholder_token_id", "missing"]),
        (("media_placeholder_token_id",), 256, ["media_placeholder_token_id", "256", "vocab_size"]),
        (("media_placeholder_token_id",), 2, ["media_placeholder_token_id", "eos_token_id"]),
        (("model_type",), "kimi_linear", ["vision_config", "kimi_k3"]),
        (("vision_config",), 3, ["vision_config", "3"]),
        (("vision_config", "vt_hidden_size"), ..., ["vision_config.vt_hidden_size", "missing"]),
        (("vision_config", "vt_hidden_size"), 31, ["mm_hidden_size", "31"]),
        (("vision_config", "text_hidden_size"), 64, ["text_hidden_size", "64", "48"]),
        (("vision_config", "qkv_hidden_size"), 50, ["qkv_hidden_size", "50", "multiple"]),
        (("vision_config", "qkv_hidden_size"), 54, ["qkv_hidden_size", "54", "multiple of 4"]),
        (("vision_config", "merge_kernel_size"), [2], ["merge_kernel_size", "2 values"]),
        (("vision_config", "merge_kernel_size"), [2, 0], ["merge_kernel_size", "1 or more"]),
        (("vision_config", "patch_size"), "wide", ["patch_size", "wide"]),
        (("vision_config", "attn_bias"), True, ["attn_bias", "True"]),
        (("vision_config", "mm_projector_type"), "mlp", ["mm_projector_type", "patchmergerv2"]),
        (("vision_config", "pos_emb_interpolation_mode"), "bicubic", ["pos_emb_interpolation_mode", "bilinear"]),
    ],
)
def test_refused_in_one_line(path, value, says):
    tree = released()
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


def test_a_tower_makes_even_the_plainest_text_model_nested():
    """The flat form has no place for a tower."""
    plain = {
        "residual": "plain", "routed_expert_hidden_size": None, "hidden_act": "silu", "gate_lower_bound": None, "use_full_rank_gate": False,
        "mla_use_output_gate": False, "latent_moe_use_norm": False, "attn_res_block_size": 2,
    }  # fmt: skip
    m = dataclasses.replace(read_config(GOLDEN / FOLDER), **plain)
    tree = to_json(m)
    assert tree["model_type"] == "kimi_k3"
    assert from_json(json.loads(json.dumps(tree))) == dataclasses.replace(m, a_log_storage=None)
    assert to_json(dataclasses.replace(m, vision=None))["model_type"] == "kimi_linear"


@pytest.mark.parametrize("absent", [None, {}])
def test_a_file_without_a_tower_is_a_text_model(absent):
    tree = {**released(), "vision_config": absent}
    assert from_json(tree).vision is None


def test_a_tower_that_the_config_does_not_name_is_refused(tmp_path):
    export.save(load(GOLDEN / FOLDER), tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "vision_config": None}))
    with pytest.raises(UserError, match=r"mm_projector\.post_norm\.weight is not part of the model"):
        load(tmp_path / "a")
