"""A whole run with quantised experts: the loss falls, a resumed run is the same bits, and model/ is what was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import assert_same_run, metrics, micro_config, tensors
from safetensors.torch import load_file

from atoll import cli
from atoll.config import Config
from atoll.model import load
from atoll.ops.mxfp4 import mxfp4_fake
from atoll.train import run

STEPS = 12
WIDE = {"model__quantization": "mxfp4+mxfp8", "model__moe_intermediate_size": 32, "model__routed_expert_hidden_size": 32}


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


def settings(tmp: Path, **changes: object) -> Config:
    return micro_config(tmp, **{**WIDE, **changes})


@pytest.fixture(scope="module")
def finished(tmp: Path) -> Path:
    return run(settings(tmp, train__export=True), tmp / "finished")


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics(out) if "loss" in line]


@pytest.mark.parametrize("experts", ["adamw", "muon"])
def test_the_loss_falls_under_both_rules(finished: Path, tmp: Path, experts: str) -> None:
    out = finished if experts == "adamw" else run(settings(tmp, optim__experts="muon"), tmp / experts)
    fallen = losses(out)
    assert len(fallen) == STEPS
    assert sum(fallen[-3:]) < sum(fallen[:3]) - 0.5


def test_a_resumed_run_is_the_same_bits(finished: Path, tmp: Path) -> None:
    shutil.copytree(finished, tmp / "resumed")
    shutil.rmtree(tmp / "resumed" / "model")
    shutil.rmtree(tmp / "resumed" / "checkpoints" / f"step-{STEPS}")
    run(None, tmp / "resumed", resume=True)
    assert_same_run(finished, tmp / "resumed", STEPS)
    for file in (finished / "model").iterdir():
        assert file.read_bytes() == (tmp / "resumed" / "model" / file.name).read_bytes(), file.name


def test_recomputed_layers_train_the_same(finished: Path, tmp: Path) -> None:
    out = run(settings(tmp, train__gradient_checkpointing=True), tmp / "recomputed")
    assert losses(out) == losses(finished)


def test_the_exported_model_is_what_was_trained(finished: Path) -> None:
    model = load(finished)
    assert model.config.quantization == "mxfp4+mxfp8"
    trained = {n.removeprefix("model."): t for n, t in tensors(finished, STEPS).items() if n.startswith("model.")}
    experts = {n: p for n, p in model.named_parameters() if ".block_sparse_moe.experts." in n}
    assert len(experts) == 6
    for name, p in experts.items():
        assert torch.equal(p, mxfp4_fake(trained[name])), name
        assert not torch.equal(p, trained[name]), name
    stored = load_file(finished / "model" / "model.safetensors")
    assert sum(n.endswith("weight_packed") for n in stored) == sum(n.endswith("weight_scale") for n in stored) == 2 * 3 * 8


def test_other_verbs_take_the_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", str(finished), "def", "--tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("def")
    assert cli.main(["plan", str(finished / "config.toml"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["quantized"]
    assert (listed["quantization"], listed["matrices"]) == ("mxfp4+mxfp8", 2 * 3 * 8)


def test_tiny_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "tiny", "--model.quantization", "mxfp4"]) == 2
    assert "model.moe_intermediate_size = 56: model.quantization = 'mxfp4' needs a multiple of 32, as 64" in capsys.readouterr().err
