"""`atoll export` of runs: finished, stopped, at a checkpoint; what it says, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import micro_config

import atoll
from atoll import cli, exchange, train
from atoll.config import UserError
from atoll.hub.load import load_tokenizer
from atoll.train import checkpoint
from atoll.train.weights import model_at


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps with checkpoints at 8 and 12 and a model/."""
    folder = tmp_path_factory.mktemp("export")
    train.run(micro_config(folder, train__export=True), folder / "run")
    return folder / "run"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return atoll.load(folder).state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_finished_run_is_its_model_folder(run, tmp_path, capsys):
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {p.name: p.read_bytes() for p in (run / "model").iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert found["form"] == "kimi_k3"
    assert found["dtype"] == "float32"
    assert found["bytes"] == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())
    assert found["engines"]["mlx-lm"] == found["engines"]["vLLM"] == found["warnings"] == []


def test_a_checkpoint_is_the_weights_of_its_step(run, tmp_path, capsys):
    last = run / "checkpoints" / "step-12"
    assert cli.main(["export", str(last), str(tmp_path / "last")]) == 0
    assert f"exporting {last}" in capsys.readouterr().err
    assert same(weights(tmp_path / "last"), weights(run / "model"))
    assert cli.main(["export", str(run / "checkpoints" / "step-8"), str(tmp_path / "first")]) == 0
    assert not same(weights(tmp_path / "first"), weights(run / "model"))
    assert load_tokenizer(tmp_path / "first").fingerprint == load_tokenizer(run / "model").fingerprint


def test_a_run_without_a_model_gives_its_newest_whole_checkpoint(run, tmp_path, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(copy / "model")
    (copy / "checkpoints" / ".writing-99").mkdir()  # a run that goes on may be writing
    assert cli.main(["export", str(copy), str(tmp_path / "a")]) == 0
    assert same(weights(tmp_path / "a"), weights(run / "model"))
    assert (copy / "checkpoints" / ".writing-99").is_dir()
    damage(copy / "checkpoints" / "step-12")
    assert cli.main(["export", str(copy), str(tmp_path / "b")]) == 0
    assert "step-8" in capsys.readouterr().err
    assert same(weights(tmp_path / "b"), model_at(run / "checkpoints" / "step-8").state_dict())


def damage(step: Path) -> None:
    path = next(step.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def test_bfloat16_keeps_the_exact_tensors_exact(run, tmp_path):
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16", "--shard-bytes", "20000"]) == 0
    found = exchange.describe(tmp_path / "out")
    assert found["dtype"] == "bfloat16"
    assert len([n for n in found["files"] if n.startswith("model-")]) > 1
    exact, stored = weights(run / "model"), weights(tmp_path / "out")
    for name, tensor in exact.items():
        kept = name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias"))
        assert torch.equal(stored[name], tensor if kept else tensor.bfloat16().float()), name
    text = exchange.render(found)
    assert f"{len([n for n in found['files'] if n.startswith('model-')])} shards" in text


def test_an_import_of_the_export_is_the_same_folder(run, tmp_path, capsys):
    assert cli.main(["import", str(run / "model"), str(tmp_path / "out")]) == 0
    assert "experts are weighed by unbiased scores" in capsys.readouterr().out
    assert {p.name: p.read_bytes() for p in (run / "model").iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert cli.main(["sample", str(tmp_path / "out"), "def", "--tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("def")


def test_long_work_shows_how_far_it_is(monkeypatch, capsys):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(exchange.time, "monotonic", lambda: float(next(clock)))
    with exchange.progress("written") as watch:
        watch(1 << 20, 4 << 20)  # after whatever was done before, loading say: no speed yet
        watch(2 << 20, 4 << 20)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "2 MiB of 4 MiB written · ETA 0:20\n"


def test_evaluation_against_a_file(run, tmp_path, capsys):
    from safetensors.torch import save_file

    ids = torch.arange(20)[None] + 10
    with torch.no_grad():
        logits = atoll.load(run)(ids).logits
    save_file({"input_ids": ids, "logits": logits}, tmp_path / "r.safetensors")
    assert cli.main(["eval", str(run), "--against", str(tmp_path / "r.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plain"]["max_abs"] < 1e-6
    assert cli.main(["eval", str(run), "--against", str(tmp_path / "r.safetensors")]) == 0
    assert "agrees within 0.001" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("export nowhere OUT", ["nowhere", "no such folder"]),
        ("export . OUT", ["neither config.toml nor config.json"]),
        ("export RUN/checkpoints OUT", ["neither config.toml nor config.json"]),
        ("export lone/step-12 OUT", ["a checkpoint outside its run"]),
        ("export empty OUT", ["neither model/ nor a whole checkpoint", "atoll train --resume"]),
        ("export broken/checkpoints/step-12 OUT", ["step-12", "damaged", "take another step"]),
        ("export RUN foreign", ["thesis.tex", "give a new folder"]),
        ("export RUN foreign/thesis.tex", ["is a file"]),
        ("export RUN RUN/model", ["is the folder that is read"]),
        ("export RUN", ["FOLDER is missing"]),
        ("export RUN OUT --dtype float8", ["dtype", "float8"]),
        ("export RUN OUT --form video", ["form", "video"]),
        ("export RUN OUT --check vllm", ["check", "vllm"]),
        ("export RUN OUT --shard-bytes 0", ["shard_bytes"]),
        ("export RUN OUT --shard-bite 5", ["did you mean --shard-bytes?"]),
        ("import RUN OUT", ["no config.json"]),
        ("import RUN/model", ["OUT is missing", "--check"]),
        ("import RUN/model OUT --check", ["OUT does not go with --check"]),
        ("import RUN/model OUT --router-weights both", ["both"]),
        ("eval RUN --against mlx", ["against = 'mlx'", "mlx-lm, transformers"]),
        ("eval RUN --against none.safetensors", ["none.safetensors", "no such file"]),
        ("eval RUN/checkpoints/step-8 --against none.safetensors", ["not finished", "atoll export"]),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(run, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run / "checkpoints" / "step-12", tmp_path / "lone" / "step-12")
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
        shutil.copy(run / "config.toml", tmp_path / name)
    damage(Path(shutil.copytree(run / "checkpoints" / "step-12", tmp_path / "broken" / "checkpoints" / "step-12")))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("years of work")
    before = sorted(p.as_posix() for p in tmp_path.rglob("*"))
    assert cli.main([word.replace("RUN", str(run)) for word in words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("exporting ")]
    assert len(lines) == 1, err
    assert all(word in lines[0] for word in says), err
    assert sorted(p.as_posix() for p in tmp_path.rglob("*")) == before


def test_a_checkpoint_of_another_model_is_refused(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace("moe_intermediate_size = 8", "moe_intermediate_size = 16"))
    with pytest.raises(UserError, match="has shape"):
        model_at(copy / "checkpoints" / "step-12")


def test_loading_by_prefix_still_names_what_is_missing(run):
    with pytest.raises(UserError, match="not in the checkpoint"):
        checkpoint.load(run / "checkpoints" / "step-12", {"model.nothing": torch.zeros(1)}, "model.nothing")
