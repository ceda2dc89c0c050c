"""Every balancing rule in the training loop: what a line says, and resuming to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same_run, metrics, micro_config, tensors

from atoll import train

RULES: dict[str, dict[str, Any]] = {
    "quantile": {"balance__kind": "quantile"},
    "asynchronous": {"balance__asynchronous": True},
    "sign": {"balance__kind": "sign", "balance__asynchronous": True},
    "aux": {"balance__kind": "aux", "balance__capacity_factor": 1.0},
    "capacity": {"balance__kind": "capacity"},
}


@pytest.mark.parametrize("name", RULES)
def test_resumed_from_a_checkpoint_it_is_the_same_run(tmp_path: Path, name: str) -> None:
    """Micro-batches and recomputation on: counts never span a checkpoint, what a rule carries over does."""
    config = micro_config(tmp_path, **RULES[name], train__keep=3, train__micro_batch=2, train__gradient_checkpointing=True)
    whole = train.run(config, tmp_path / "whole")
    cut = shutil.copytree(whole, tmp_path / "cut")
    for step in (8, 12):
        shutil.rmtree(cut / "checkpoints" / f"step-{step}")
    train.run(None, cut, resume=True)
    assert_same_run(whole, cut, 12)
    carried = {n.rsplit(".", 1)[-1] for n in tensors(whole, 12) if n.startswith("balance.")}
    assert carried == {"asynchronous": {"pending", "due"}, "sign": {"pending", "due"}, "aux": {"share"}}.get(name, set())


def test_a_line_says_how_level_the_experts_are(tmp_path: Path) -> None:
    out = train.run(micro_config(tmp_path, **RULES["aux"], train__steps=4), tmp_path / "run")
    for line in (line for line in metrics(out) if "kind" not in line):
        assert line["mean_load"] == 256 * 2 / 8  # tokens times top-k over experts; nothing is padded
        assert line["max_load"] == pytest.approx(line["mean_load"] * (1 + line["max_vio"]))
        assert line["dead_share"] == pytest.approx(line["dead_experts"] / 16)
        assert [len(layer) for layer in line["load_map"]] == [5, 5]
        assert all(layer == sorted(layer) for layer in line["load_map"])
        assert max(layer[-1] for layer in line["load_map"]) == pytest.approx(1 + line["max_vio"], abs=1e-4)
        assert 0 < line["dropped_share"] < 1
        assert 0 <= line["bare_tokens"] < 512
        assert 0.01 < line["balance_loss"] < 0.04  # 1e-2 for a level layer, two layers
    plain = train.run(micro_config(tmp_path, train__steps=2), tmp_path / "plain")
    assert not {"dropped_share", "balance_loss"} & set(metrics(plain)[1])


def test_the_auxiliary_loss_trains_and_is_not_in_the_loss(tmp_path: Path) -> None:
    """At a rate of almost nothing the reported loss is that of a run without it; at a high coefficient the gradient is not."""
    tiny = {"optim__lr": 1e-12, "optim__adam_lr": 1e-12, "optim__router_lr": 1e-12, "train__steps": 2, "train__validate_every": 2}
    runs = {
        "none": micro_config(tmp_path, balance__kind="none", **tiny),
        "aux": micro_config(tmp_path, balance__kind="aux", balance__aux_coefficient=50.0, **tiny),
    }
    lines = {name: [x for x in metrics(train.run(c, tmp_path / name)) if x.get("kind") != "run"] for name, c in runs.items()}
    for plain, aux in zip(lines["none"], lines["aux"], strict=True):
        for key in {"loss", "nats_per_token"} & plain.keys():
            assert plain[key] == pytest.approx(aux[key], rel=1e-5)
    assert lines["aux"][1]["balance_loss"] > 90
    assert lines["aux"][1]["grad_norm"] > 1.5 * lines["none"][1]["grad_norm"]
