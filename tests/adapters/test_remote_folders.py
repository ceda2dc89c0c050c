"""Folders through transformers and back: what it saves is the layout that Atoll writes, and other readers take it."""

from __future__ import annotations

import json

import pytest
import torch
from adapters.remote_models import FORMS, SMALL, build, hugging, pair, tokens
from hub.golden import GOLDEN
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig

from atoll import cli
from atoll.hub import export
from atoll.model import load

IDS = tokens(2, 40)


def differs(a, b) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_what_transformers_saves_is_what_atoll_wrote(tmp_path, form, dtype):
    """The weights byte for byte, A_log's padding too; Atoll reads the folder, and writes the first one again."""
    ours, theirs = pair(tmp_path / "a", dtype, **FORMS[form])
    theirs.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    again = load(tmp_path / "b", dtype=dtype)
    assert {**vars(again.config), "full_attn_layers": None} == {**vars(ours.config), "full_attn_layers": None}
    assert again.config.full_attention() == ours.config.full_attention()
    assert torch.equal(again(IDS).logits, ours(IDS).logits)
    export.save(again, tmp_path / "c")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes(), name
    hugging(tmp_path / "b", dtype)  # the code went along


def test_eval_runs_the_code_that_atoll_wrote_and_no_other(tmp_path, capsys):
    folder = export.save(build(), tmp_path / "a", dtype=torch.float32)
    words = ["eval", str(folder), "--against", "transformers"]
    assert cli.main(words) == 0
    assert "agrees within 0.001" in capsys.readouterr().out
    code = folder / "modeling_kimi_k3.py"
    written = code.read_bytes()
    code.write_bytes(written + b"\n")
    assert cli.main(words) == 2
    assert "is not run; write it anew by atoll export" in capsys.readouterr().err
    code.write_bytes(written)
    (folder / "custom_generate").mkdir()
    assert cli.main(words) == 2


def test_shards_of_both_sides(tmp_path):
    ours = build()
    export.save(ours, tmp_path / "a", shard_bytes=100_000)
    theirs = hugging(tmp_path / "a")
    theirs.save_pretrained(tmp_path / "b", max_shard_size="100KB")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 3
    assert torch.equal(load(tmp_path / "b", dtype=torch.float64)(IDS).logits, ours.eval()(IDS).logits)


def test_released_weights_survive_the_round_trip(tmp_path):
    export.save(load(GOLDEN / "k3_tiny"), tmp_path / "a", dtype=torch.bfloat16)
    hugging(tmp_path / "a", torch.bfloat16).save_pretrained(tmp_path / "b")
    before, after = load_file(GOLDEN / "k3_tiny" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name


def test_mlx_lm_takes_what_transformers_saved(tmp_path):
    """Strictly. The router's margins in this checkpoint are wide enough for float32."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    export.save(load(GOLDEN / "k3_tiny"), tmp_path / "a")
    hugging(tmp_path / "a", torch.float32).save_pretrained(tmp_path / "b")
    model, _ = load_model(tmp_path / "b", strict=True)
    io = load_file(GOLDEN / "k3_tiny" / "io.safetensors")
    logits = torch.from_numpy(np.array(model(mx.array(io["input_ids"].numpy())).astype(mx.float32)))
    assert differs(logits, io["logits"]) < 1e-4


def test_a_model_made_in_transformers_is_read_by_atoll(tmp_path):
    """From a few settings alone: what it saves says every setting and holds every tensor."""
    _, theirs = pair(tmp_path / "a")
    kind, linear = type(theirs.config), {"num_heads": 2, "head_dim": 8}
    small = {key: value for key, value in SMALL.items() if not key.startswith("kda_")}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = kind(text_config={**small, **ids, "linear_attn_config": linear, "hidden_act": "situ", "initializer_range": 0.2}, **ids)
    fresh = type(theirs)(config).eval()
    fresh.save_pretrained(tmp_path / "b")
    back = load(tmp_path / "b", dtype=torch.float64)
    assert back.config.gate_lower_bound is None
    assert differs(back(IDS).logits, fresh.double()(IDS).logits) < 1e-9


def test_a_missing_or_foreign_tensor_is_named(tmp_path, caplog):
    export.save(build(), tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    norm = "language_model.model.layers.1.block_sparse_moe.routed_expert_norm.weight"
    del tensors[norm]
    save_file({**tensors, "language_model.model.stray": torch.zeros(1)}, path, metadata={"format": "pt"})
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", trust_remote_code=True, output_loading_info=True)
    assert info["missing_keys"] == {norm}
    assert info["unexpected_keys"] == {"language_model.model.stray"}


def test_padding_of_a_log_that_is_not_zero_is_refused(tmp_path):
    export.save(build(a_log_storage=16), tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    tensors["language_model.model.layers.0.self_attn.A_log"][9] = 1.0
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(RuntimeError):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a", trust_remote_code=True)


# ---------------------------------------------------------------- initial values


def assert_as_initialised(theirs) -> None:
    """Every tensor is where `_init_weights` puts it: nothing is what the memory held."""
    for name, tensor in theirs.state_dict().items():
        value = tensor.double()
        assert bool(torch.isfinite(value).all()), name
        if "_res_proj" in name or name.endswith(("A_log", "e_score_correction_bias")):
            assert bool((value == 0).all()), name
        elif "norm" in name:
            assert bool((value == 1).all()), name
        elif name.endswith("dt_bias"):
            assert -7 < float(value.min()) <= float(value.max()) < -2.2, name
        elif "conv1d" in name:
            bound = tensor.shape[-1] ** -0.5
            assert bound / 2 < float(value.abs().max()) <= bound, name
        else:
            assert abs(float(value.std()) / 0.2 - 1) < 0.25, name
            assert float(value.abs().max()) < 1.5, name


@pytest.fixture
def dirty(monkeypatch):
    """Uninitialised memory that shows: `torch.empty` gives NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("meta", [False, True])
def test_no_tensor_is_left_uninitialised(tmp_path, dirty, form, meta):
    export.save(build(**FORMS[form]), tmp_path / "a")
    config = AutoConfig.from_pretrained(tmp_path / "a", trust_remote_code=True)
    with torch.device("meta" if meta else "cpu"):
        theirs = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    if meta:
        theirs.to_empty(device="cpu")
        theirs.apply(theirs._init_weights)
    assert_as_initialised(theirs)


def test_tensors_missing_in_a_folder_start_as_new_ones(tmp_path, dirty):
    export.save(build(), tmp_path / "a")
    config = AutoConfig.from_pretrained(tmp_path / "a", trust_remote_code=True)
    save_file({"language_model.model.norm.weight": torch.ones(24)}, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", trust_remote_code=True, config=config, output_loading_info=True)
    assert len(info["missing_keys"]) > 50
    assert_as_initialised(theirs)


# ---------------------------------------------------------------- generation


def test_greedy_text_is_atolls_own(tmp_path):
    ours, theirs = pair(tmp_path / "a")
    expected = ours.generate(IDS, max_new_tokens=64, temperature=0)
    found = theirs.generate(IDS, max_new_tokens=64, do_sample=False, eos_token_id=None)
    assert torch.equal(found, expected)
    uncached = theirs.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None, use_cache=False)
    assert torch.equal(uncached, expected[:, :48])


def test_greedy_text_of_padded_prompts(tmp_path):
    ours, theirs = pair(tmp_path / "a")
    short = tokens(1, 11, seed=4)
    ids = torch.stack([torch.cat([torch.full((29,), 2), short[0]]), IDS[0]])
    mask = ids.ne(2).long()
    found = theirs.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None)
    for row, prompt in ((0, short), (1, IDS[:1])):
        expected = ours.generate(prompt, max_new_tokens=24, temperature=0)[0, prompt.shape[1] :]
        assert torch.equal(found[row, 40:], expected)


def test_beams_keep_their_own_states(tmp_path):
    """What a beam scored while it grew and moved between rows is what its text scores when read at once."""
    _, theirs = pair(tmp_path / "a")
    options = {"max_new_tokens": 8, "num_beams": 4, "num_return_sequences": 4, "do_sample": False, "eos_token_id": None}
    out = theirs.generate(IDS, **options, length_penalty=1.0, return_dict_in_generate=True, output_scores=True)
    logp = theirs(out.sequences).logits.log_softmax(-1)[:, 39:-1]
    read = logp.gather(2, out.sequences[:, 40:, None]).sum((1, 2)) / 8
    torch.testing.assert_close(out.sequences_scores.double(), read, rtol=0, atol=1e-5)


def test_generation_settings_come_along(tmp_path):
    _, theirs = pair(tmp_path / "a", eos_token_id=7)
    assert isinstance(theirs.generation_config, GenerationConfig)
    assert theirs.generation_config.eos_token_id == 7
    torch.manual_seed(0)
    assert theirs.generate(IDS, max_new_tokens=6, do_sample=True, num_return_sequences=2).shape[0] == 4


# ---------------------------------------------------------------- embeddings


def test_embeddings_can_be_resized(tmp_path):
    _, theirs = pair(tmp_path / "a")
    before = theirs(IDS).logits
    theirs.resize_token_embeddings(333)
    assert theirs.get_input_embeddings().weight.shape[0] == theirs.get_output_embeddings().weight.shape[0] == 333
    after = theirs(IDS).logits
    assert differs(after[..., : SMALL["vocab_size"]], before) < 1e-12
    theirs.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["text_config"]["vocab_size"] == 333
    assert differs(load(tmp_path / "b", dtype=torch.float64)(IDS).logits, after) < 1e-9


def test_auto_model_gives_the_same_class(tmp_path):
    _, theirs = pair(tmp_path / "a")
    other = AutoModel.from_pretrained(tmp_path / "a", trust_remote_code=True, dtype=torch.float64)
    assert type(other).__name__ == type(theirs).__name__ == "KimiK3ForConditionalGeneration"
    assert type(theirs.base_model).__name__ == "KimiK3TextModel"
    assert theirs.base_model(IDS).last_hidden_state.shape == (2, 40, 24)
