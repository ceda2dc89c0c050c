"""Whole folders: saving gives back what was loaded, byte for byte; a wrong folder is refused in one line."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hub.golden import GOLDEN
from hub.models import FLAT, SMALL, build
from safetensors.torch import load_file, save_file

from atoll.config import ModelConfig, UserError
from atoll.data.tokenizer import train_tokenizer
from atoll.hub import export
from atoll.hub.load import load_into, load_tokenizer, read_config
from atoll.model import load


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("change", [{}, {"a_log_storage": 16}, {"residual": "full"}, FLAT], ids=["k3", "padded", "full", "flat"])
@pytest.mark.parametrize("shard_bytes", [5e9, 20_000], ids=["single", "sharded"])
def test_save_load_save_is_the_same_bytes(tmp_path, dtype, change, shard_bytes):
    m = build(dtype, **change)
    export.save(m, tmp_path / "a", shard_bytes=shard_bytes)
    again = load(tmp_path / "a", dtype=dtype)
    export.save(again, tmp_path / "b", shard_bytes=shard_bytes)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    sharded = (tmp_path / "a" / "model.safetensors.index.json").exists()
    assert sharded == (shard_bytes < 5e9)
    mine = {**dict(m.named_parameters()), **dict(m.named_buffers())}
    for name, tensor in {**dict(again.named_parameters()), **dict(again.named_buffers())}.items():
        assert torch.equal(tensor, mine[name]), name
        assert tensor.dtype == mine[name].dtype


@pytest.mark.parametrize(("folder", "dtype"), [("k3_tiny", torch.bfloat16), ("kimi_linear_tiny", torch.float32)])
def test_released_tensors_are_written_back_byte_for_byte(tmp_path, folder, dtype):
    """Loaded in float32, written in the stored types: names, shapes, types and bytes as they came, A_log's padding too."""
    export.save(load(GOLDEN / folder), tmp_path / "out", dtype=dtype)
    before, after = load_file(GOLDEN / folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert tensor.shape == after[name].shape, name
        assert torch.equal(tensor.contiguous().view(torch.uint8), after[name].view(torch.uint8)), name


def test_a_dense_layer_under_the_name_of_sparse_ones_is_read(tmp_path):
    """As transformers 5.24 saves its own kimi_linear class; a dense layer with both names is still an error."""
    m = build(**FLAT)
    export.save(m, tmp_path / "a")
    dense = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]

    def rename(tensors):
        for name in dense:
            tensors[name.replace(".mlp.", ".block_sparse_moe.")] = tensors.pop(name)

    edit(tmp_path / "a", rename)
    again = load(tmp_path / "a")
    assert torch.equal(again.language_model.model.layers[0].mlp.up_proj.weight, m.language_model.model.layers[0].mlp.up_proj.weight)
    edit(tmp_path / "a", lambda t: t.update({dense[0]: t["model.layers.0.block_sparse_moe.gate_proj.weight"].clone()}))
    assert "model.layers.0.block_sparse_moe.gate_proj.weight is not part of the model" in refusal(lambda: load(tmp_path / "a"))


def test_float32_tensors_stay_float32_in_a_bfloat16_folder(tmp_path):
    export.save(build(torch.bfloat16), tmp_path / "a")
    kinds = {name: t.dtype for name, t in load_file(tmp_path / "a" / "model.safetensors").items()}
    exact = {name.split(".", 4)[-1] for name, kind in kinds.items() if kind == torch.float32}
    mixer = {f"self_attn.{x}" for x in ("A_log", "dt_bias", "o_norm.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")}
    assert exact == {*mixer, "block_sparse_moe.gate.e_score_correction_bias"}
    assert set(kinds.values()) == {torch.float32, torch.bfloat16}


def test_shards_stay_under_their_size_and_the_index_is_whole(tmp_path):
    export.save(build(), tmp_path / "a", shard_bytes=20_000)
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    shards = {file: load_file(tmp_path / "a" / file) for file in set(index["weight_map"].values())}
    assert {name: file for file, tensors in shards.items() for name in tensors} == index["weight_map"]
    sizes = {file: sum(t.nbytes for t in tensors.values()) for file, tensors in shards.items()}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert all(size <= 20_000 for size in sizes.values())


@pytest.fixture(scope="module")
def words():
    """A tokenizer with ids 0, 1, 2 special and no merges."""
    return train_tokenizer(["some text"], ModelConfig(**{**SMALL, "vocab_size": 300}))


def test_tokenizer_goes_along(tmp_path, words):
    m = build(vocab_size=300)
    export.save(m, tmp_path / "a", tokenizer=words)
    assert set(files(tmp_path / "a")) == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        *export.REMOTE,
    }  # fmt: skip
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    assert {key: config[f"{key}_token"] for key in ("bos", "eos", "pad")} == {key: f"<|{key}|>" for key in ("bos", "eos", "pad")}
    again = load_tokenizer(tmp_path / "a")
    assert again.fingerprint == words.fingerprint
    export.save(load(tmp_path / "a"), tmp_path / "b", tokenizer=again)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_another_tokenizer_in_the_folder_is_refused(tmp_path, words):
    export.save(build(vocab_size=300), tmp_path / "a", tokenizer=words)
    train_tokenizer(["other words, other words"], ModelConfig(**{**SMALL, "vocab_size": 300})).save(tmp_path / "a" / "tokenizer.json")
    assert "not the tokenizer that these weights were saved with" in refusal(lambda: load_tokenizer(tmp_path / "a"))
    (tmp_path / "a" / "tokenizer.json").write_text("{")
    assert "tokenizer.json" in refusal(lambda: load_tokenizer(tmp_path / "a"))
    (tmp_path / "a" / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(lambda: load_tokenizer(tmp_path / "a"))


# ---------------------------------------------------------------- refusals


def refusal(call) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    export.save(build(), folder / "single")
    export.save(build(), folder / "sharded", shard_bytes=20_000)
    return folder


@pytest.fixture
def single(saved, tmp_path):
    return Path(shutil.copytree(saved / "single", tmp_path / "single"))


@pytest.fixture
def sharded(saved, tmp_path):
    return Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


GATE = "language_model.model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight"
A_LOG = "language_model.model.layers.0.self_attn.A_log"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(EXPERT), [EXPERT, "missing"]),
        (lambda t: t.update({"language_model.model.layers.9.extra": torch.zeros(2)}), ["layers.9.extra", "not part"]),
        (lambda t: t.update({GATE: torch.zeros(6, 31)}), [GATE, "[6, 31]", "[6, 32]"]),
        (lambda t: t.update({GATE: torch.zeros(6, 32, dtype=torch.int32)}), [GATE, "I32"]),
        (lambda t: t.update({GATE: t[GATE] * float("nan")}), [GATE, "NaN"]),
        (lambda t: t.update({A_LOG: torch.ones(5)}), [A_LOG]),
        (lambda t: t.update({"vision_tower.x": torch.zeros(2)}), ["vision_tower.x"]),
    ],
)
def test_wrong_tensors_are_named(single, change, says):
    edit(single, change)
    message = refusal(lambda: load(single))
    assert all(word in message for word in says), message


def test_nothing_is_copied_when_a_name_or_shape_is_wrong(single):
    edit(single, lambda t: t.update({EXPERT: torch.zeros(1, 1)}))
    m = build()
    before = {name: p.clone() for name, p in m.named_parameters()}
    refusal(lambda: load_into(m, single))
    assert all(torch.equal(p, before[name]) for name, p in m.named_parameters())


def test_truncated_file(single):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors: not a whole safetensors file" in refusal(lambda: load(single))


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 4096])
def test_not_safetensors_at_all(single, content):
    (single / "model.safetensors").write_bytes(content)
    assert "model.safetensors: not a whole safetensors file" in refusal(lambda: load(single))


def test_truncated_shard(sharded):
    path = sorted(sharded.glob("model-*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path.name}: not a whole safetensors file" in refusal(lambda: load(sharded))


def test_missing_shard(sharded):
    path = sorted(sharded.glob("model-*.safetensors"))[1]
    path.unlink()
    assert path.name in refusal(lambda: load(sharded))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b"])
def test_index_may_not_lead_out_of_the_folder(sharded, name):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][GATE] = name
    path.write_text(json.dumps(index))
    assert "outside the folder" in refusal(lambda: load(sharded))


def test_index_that_disagrees_with_its_shards(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].pop(GATE)
    path.write_text(json.dumps(index))
    assert GATE in refusal(lambda: load(sharded))


@pytest.mark.parametrize("content", ["{", "[1]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_broken_index(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(lambda: load(sharded))


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b'{"model_type": "llama"}', b"[" * 100_000])
def test_broken_config(single, content):
    (single / "config.json").write_bytes(content)
    assert "config.json" in refusal(lambda: load(single))


def test_pickles_are_never_opened(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    message = refusal(lambda: load(single))
    assert "pytorch_model.bin" in message
    assert "pickle" in message


def test_folder_without_weights_or_config(single, tmp_path):
    (single / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(lambda: load(single))
    (single / "config.json").unlink()
    assert "config.json" in refusal(lambda: read_config(single))
    assert "no such folder" in refusal(lambda: read_config(tmp_path / "nowhere"))


def test_padding_that_is_not_zero(tmp_path):
    export.save(build(a_log_storage=16), tmp_path / "a")
    edit(tmp_path / "a", lambda t: t[A_LOG].__setitem__(15, 0.5))
    assert A_LOG in refusal(lambda: load(tmp_path / "a"))


# ---------------------------------------------------------------- writing safely


def test_an_older_export_is_replaced_whole(tmp_path, words):
    export.save(build(), tmp_path / "a", tokenizer=words, shard_bytes=20_000)
    export.save(build(), tmp_path / "a")
    assert set(files(tmp_path / "a")) == {"config.json", "generation_config.json", "model.safetensors", *export.REMOTE}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("years of work")
    assert "thesis.tex" in refusal(lambda: export.save(build(), tmp_path / "a"))
    assert files(tmp_path / "a") == {"thesis.tex": b"years of work"}
    assert "is a file" in refusal(lambda: export.save(build(), tmp_path / "a" / "thesis.tex"))


def test_a_file_that_only_begins_like_weights_is_left_alone(tmp_path):
    export.save(build(), tmp_path / "a")
    (tmp_path / "a" / "model-of-mine.safetensors").write_bytes(b"years of work")
    assert "model-of-mine.safetensors" in refusal(lambda: export.save(build(), tmp_path / "a"))
    assert (tmp_path / "a" / "model-of-mine.safetensors").read_bytes() == b"years of work"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_a_folder_stays_one(tmp_path, there):
    (tmp_path / "disk").mkdir()
    if there:
        export.save(build(torch.bfloat16), tmp_path / "disk" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "a")
    export.save(build(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "disk" / "a").language_model.lm_head.weight.equal(build().language_model.lm_head.weight)
    assert [sorted(p.name for p in folder.iterdir()) for folder in (tmp_path, tmp_path / "disk")] == [["disk", "link"], ["a"]]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.EBUSY, "Device or resource busy")])
@pytest.mark.parametrize("at", [0, 1])
def test_stopped_at_a_rename_the_old_export_stands(tmp_path, monkeypatch, stop, at):
    export.save(build(torch.bfloat16), tmp_path / "a")
    before, rename, calls = files(tmp_path / "a"), os.replace, itertools.count()

    def replace(source, target):
        if next(calls) == at:
            raise stop
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises((KeyboardInterrupt, UserError)):
        export.save(build(), tmp_path / "a")
    assert files(tmp_path / "a") == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_full_disk_leaves_the_old_export_and_nothing_half_written(tmp_path, monkeypatch):
    export.save(build(), tmp_path / "a")
    before = files(tmp_path / "a")

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "write_shard", full)
    assert "No space left on device" in refusal(lambda: export.save(build(), tmp_path / "a"))
    assert files(tmp_path / "a") == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
