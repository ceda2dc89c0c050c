"""Each way in which a folder can be wrong gets one line, the same through `atoll.load` and every verb that reads a folder."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from hub.golden import GOLDEN
from hub.models import FLAT, SMALL, build
from safetensors.torch import load_file, save_file

from atoll import cli
from atoll.config import ModelConfig, UserError
from atoll.data.tokenizer import train_tokenizer
from atoll.hub import export
from atoll.hub.config_json import from_json
from atoll.hub.load import read_config
from atoll.model import Model, load

GATE = "language_model.model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight"
VOCAB = {"vocab_size": 300}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same model in one file and in shards, with a tokenizer, and another model's folder."""
    folder = tmp_path_factory.mktemp("saved")
    words = train_tokenizer(["some text"], ModelConfig(**{**SMALL, **VOCAB}))
    export.save(build(**VOCAB), folder / "single", words)
    export.save(build(**VOCAB), folder / "sharded", words, shard_bytes=20_000)
    export.save(build(**VOCAB, hidden_size=24), folder / "narrow", words, shard_bytes=20_000)
    export.save(build(**VOCAB, num_hidden_layers=2), folder / "shallow", words, shard_bytes=20_000)
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_json(folder: Path, name: str, change) -> None:
    tree = json.loads((folder / name).read_text())
    change(tree)
    (folder / name).write_text(json.dumps(tree))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path, _saved: Path) -> None:
    path = shards(folder)[2]
    path.write_bytes(path.read_bytes()[:-7])


def drop_shard(folder: Path, _saved: Path) -> None:
    shards(folder)[2].unlink()


def swap_wide(folder: Path, saved: Path) -> None:
    for path in shards(folder):
        shutil.copy(shards(saved / "narrow")[0], path)


def swap_one(folder: Path, saved: Path) -> None:
    shutil.copy(shards(saved / "shallow")[-1], shards(folder)[-1])


def header(length: int):
    def change(folder: Path, _saved: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])

    return change


def index(file: str):
    def change(folder: Path, _saved: Path) -> None:
        edit_json(folder, "model.safetensors.index.json", lambda t: t["weight_map"].update({GATE: file}))

    return change


def link(name: str):
    def change(folder: Path, saved: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(saved / "single" / name)

    return change


def link_shard(folder: Path, saved: Path) -> None:
    path = shards(folder)[2]
    path.unlink()
    path.symlink_to(saved / "sharded" / path.name)


def pickled(folder: Path, _saved: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def tensors(change):
    return lambda folder, _saved: edit_tensors(folder, change)


def settings(change):
    return lambda folder, _saved: edit_json(folder, "config.json", change)


def other_tokenizer(folder: Path, _saved: Path) -> None:
    train_tokenizer(["other words, other words"], ModelConfig(**{**SMALL, **VOCAB})).save(folder / "tokenizer.json")


CASES = {
    "truncated shard": ("sharded", truncate, ["-00003-of-", "not a whole safetensors file"]),
    "missing shard": ("sharded", drop_shard, ["index.json", "-00003-of-", "not in the folder"]),
    "shards of a narrower model": ("sharded", swap_wide, ["missing", "lists it here"]),
    "last shard of a shallower model": ("sharded", swap_one, ["tensor", "index.json"]),
    "header length too long": ("single", header(1 << 40), ["model.safetensors: not a whole safetensors file"]),
    "header length too short": ("single", header(16), ["model.safetensors: not a whole safetensors file"]),
    "header length zero": ("single", header(0), ["model.safetensors: not a whole safetensors file"]),
    "index out of the folder": ("sharded", index("../single/model.safetensors"), ["outside the folder"]),
    "index by a full path": ("sharded", index("/etc/passwd"), ["outside the folder"]),
    "linked shard": ("sharded", link_shard, ["-00003-of-", "a link out of the folder"]),
    "linked weights": ("single", link("model.safetensors"), ["a link out of the folder"]),
    "linked config": ("single", link("config.json"), ["config.json", "a link out of the folder"]),
    "pickled weights": ("single", pickled, ["pytorch_model.bin", "never opened"]),
    "integers": ("single", tensors(lambda t: t.update({GATE: t[GATE].int()})), [GATE, "I32", "BF16, F16, F32, F64"]),
    "8-bit floats": ("single", tensors(lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)})), [GATE, "F8_E4M3"]),
    "NaN": ("single", tensors(lambda t: t[EXPERT].fill_(float("nan"))), [EXPERT, "NaN"]),
    "one infinity": ("single", tensors(lambda t: t[EXPERT].view(-1)[3].fill_(float("inf"))), [EXPERT, "infinity"]),
    "unknown architecture": ("single", settings(lambda t: t.update(model_type="kimi_k33")), ["kimi_k33", "did you mean 'kimi_k3'?"]),
    "another architecture": (
        "single",
        settings(lambda t: (t.clear(), t.update(model_type="mixtral", hidden_size=64, num_local_experts=8))),
        ["model_type = 'mixtral'", "'kimi_k3' or 'kimi_linear' is expected"],
    ),
    "misspelt setting": (
        "single",
        settings(lambda t: t["text_config"].update(attn_res_blok_size=t["text_config"].pop("attn_res_block_size"))),
        ["attn_res_blok_size: no such key; did you mean attn_res_block_size?"],
    ),
    "other shapes": ("single", settings(lambda t: t["text_config"].update(moe_intermediate_size=24)), ["experts", "the config asks for"]),
}  # fmt: skip


def wrong(saved: Path, tmp_path: Path, case: str) -> tuple[Path, list[str]]:
    source, change, says = CASES[case]
    folder = Path(shutil.copytree(saved / source, tmp_path / "it"))
    change(folder, saved)
    return folder, says


@pytest.mark.parametrize("case", CASES)
def test_loading_says_it_in_one_line(saved, tmp_path, case):
    folder, says = wrong(saved, tmp_path, case)
    with pytest.raises(UserError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in says), message
    assert len(message) < 400


@pytest.mark.parametrize("words", ["export IT OUT", "import IT OUT", "import IT --check", "sample IT x --tokens 2"])
@pytest.mark.parametrize("case", CASES)
def test_every_verb_says_it_in_one_line(saved, tmp_path, case, words, capsys):
    folder, says = wrong(saved, tmp_path, case)
    out = tmp_path / "out"
    assert cli.main([{"IT": str(folder), "OUT": str(out)}.get(word, word) for word in words.split()]) == 2
    printed, message = capsys.readouterr()
    assert printed == ""
    assert message.startswith("atoll: ")
    assert message.count("\n") == 1
    assert all(word in message for word in says), message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["it"]


def test_shapes_are_compared_before_memory_is_taken(saved, tmp_path, monkeypatch):
    """A width that is wrong by far is told from the files' headers: no model of that width is built."""
    folder = Path(shutil.copytree(saved / "single", tmp_path / "it"))
    edit_json(folder, "config.json", lambda t: t["text_config"].update(hidden_size=200_000, intermediate_size=200_000))

    def built(*_args, **_kwargs):
        raise AssertionError("weights were drawn")

    monkeypatch.setattr(Model, "reset_parameters", built)
    with pytest.raises(UserError, match="the config asks for"):
        load(folder)


@pytest.mark.parametrize("words", ["export IT OUT", "import IT OUT", "import IT --check", "sample IT x"])
def test_a_tokenizer_of_other_weights(saved, tmp_path, words, capsys):
    folder = Path(shutil.copytree(saved / "single", tmp_path / "it"))
    other_tokenizer(folder, saved)
    assert cli.main([{"IT": str(folder), "OUT": str(tmp_path / "out")}.get(word, word) for word in words.split()]) == 2
    assert "not the tokenizer that these weights were saved with" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_a_tokenizer_text_is_refused_and_an_export_warns(saved, tmp_path, capsys):
    folder = Path(shutil.copytree(saved / "single", tmp_path / "it"))
    (folder / "tokenizer.json").unlink()
    assert cli.main(["sample", str(folder), "x"]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err
    for verb in ("export", "import"):
        assert cli.main([verb, str(folder), str(tmp_path / verb)]) == 0
        assert "warning: no tokenizer.json" in capsys.readouterr().out
        assert "tokenizer_fingerprint" not in (tmp_path / verb / "config.json").read_text()


def test_an_empty_name_is_no_folder(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(saved / "single"), ""]) == 2
    assert capsys.readouterr().err == "atoll: folder = '': a name is expected\n"
    assert not list(tmp_path.iterdir())


def test_a_link_to_the_tokenizer_is_not_followed(saved, tmp_path, capsys):
    folder = Path(shutil.copytree(saved / "single", tmp_path / "it"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        original = (folder / name).read_bytes()
        link(name)(folder, saved)
        assert cli.main(["export", str(folder), str(tmp_path / "out")]) == 2
        assert f"{name}: a link out of the folder" in capsys.readouterr().err
        (folder / name).unlink()
        (folder / name).write_bytes(original)
    assert cli.main(["export", str(folder), str(tmp_path / "out")]) == 0


def test_a_hub_caches_links_are_followed(saved, tmp_path):
    """snapshots/REVISION/file → ../../blobs/hash, as huggingface_hub keeps what it fetched."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted((saved / "sharded").iterdir())):
        shutil.copy(path, blobs / f"{i:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{i:064x}")
    theirs, ours = load(snapshot).state_dict(), load(saved / "sharded").state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    ("where", "slip", "meant"),
    [
        ((), "hiden_size", "hidden_size"),
        ((), "num_expert", "num_experts"),
        ((), "num_experts_per_tok", "num_experts_per_token"),
        ((), "routed_expert_hiden_size", "routed_expert_hidden_size"),
        ((), "mla_use_outputgate", "mla_use_output_gate"),
        ((), "latent_moe_usenorm", "latent_moe_use_norm"),
        ((), "Hidden_act", "hidden_act"),
        (("linear_attn_config",), "gate_lowerbound", "linear_attn_config.gate_lower_bound"),
        (("linear_attn_config",), "full_attn_layer", "linear_attn_config.full_attn_layers"),
    ],
)
@pytest.mark.parametrize("folder", ["k3_tiny", "kimi_linear_tiny"])
def test_a_misspelt_key_is_named_with_what_was_meant(folder, where, slip, meant):
    tree = json.loads((GOLDEN / folder / "config.json").read_text())
    at = tree.get("text_config", tree)
    for key in where:
        at = at[key]
    at[slip] = at.pop(meant.split(".")[-1], None)
    with pytest.raises(UserError) as caught:
        from_json(tree, "config.json")
    assert str(caught.value) == f"config.json: {'.'.join([*where, slip])}: no such key; did you mean {meant}?"


def test_text_config_itself_misspelt():
    tree = json.loads((GOLDEN / "k3_tiny" / "config.json").read_text())
    tree["text_confg"] = tree.pop("text_config")
    with pytest.raises(UserError, match=r"text_confg: no such key; did you mean text_config\?"):
        from_json(tree)


@pytest.mark.parametrize("folder", ["k3_tiny", "kimi_linear_tiny"])
def test_the_hubs_own_boilerplate_is_no_slip(folder):
    """Released files, and those with every optional key taken out, and keys that other programs add."""
    tree = json.loads((GOLDEN / folder / "config.json").read_text())
    assert from_json(tree) == read_config_without_padding(folder)
    bare = copy.deepcopy(tree)
    text = bare.get("text_config", bare)
    for key in ("moe_renormalize", "rms_norm_eps", "initializer_range", "tie_word_embeddings", "topk_group", "num_key_value_heads"):
        text.pop(key, None)
    text |= {
        "attention_bias": False, "attention_dropout": 0.0, "pretraining_tp": 1, "n_group": 1, "qk_head_dim": 24, "norm_topk_prob": True,
        "output_router_logits": False, "layer_types": [], "mlp_layer_types": [], "max_window_layers": 4, "router_aux_loss_coef": 0.0,
        "num_local_experts": 8, "n_shared_experts": 1, "rope_parameters": None, "_attn_implementation": "eager", "auto_map": {},
    }  # fmt: skip
    from_json(bare)


def read_config_without_padding(folder: str) -> ModelConfig:
    return ModelConfig(**{**vars(read_config(GOLDEN / folder)), "a_log_storage": None})


def test_a_flat_folder_is_checked_as_strictly(tmp_path):
    export.save(build(**FLAT), tmp_path / "a")
    edit_json(tmp_path / "a", "config.json", lambda t: t.update(num_experts=7))
    with pytest.raises(UserError, match=r"experts\.6\.w1\.weight is missing"):
        load(tmp_path / "a")
