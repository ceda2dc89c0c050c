"""Stages beyond length and share: token counts, rates, segments; a run with them, killed and resumed across the switch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from helpers import assert_same_run, metrics, micro_config

from atoll.config import ConfigError, StageConfig, load_config, to_toml
from atoll.train import checkpoint, folder
from atoll.train.stages import plan, settled
from atoll.train.trainer import run


def test_tokens_settle_shares_and_steps(tmp_path: Path) -> None:
    stages = (StageConfig("a", 32, tokens=1000, batch=8), StageConfig("b", 64, tokens=1025, batch=4))
    shared, steps = settled(stages)
    assert steps == 4 + 5
    assert [(s.start, s.stop) for s in plan(shared, steps)] == [(0, 4), (4, 9)]


def test_a_run_by_tokens(tmp_path: Path) -> None:
    config = micro_config(tmp_path, stages__0__tokens=1000, stages__1__tokens=1025, train__steps="none", train__minutes="none")
    out = run(config, tmp_path / "run")
    steps = [line for line in metrics(out) if "loss" in line]
    assert [line["stage"] for line in steps] == ["512"] * 4 + ["1k"] * 5
    assert load_config(out / "config.toml").train.steps == 9


def test_tokens_in_one_stage_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"stages\.1\.tokens = None: the other stages count tokens; give it in every stage or in none"):
        load_config("tiny", {"stages.0.tokens": "1000"})


def test_a_stages_rate_scales_the_schedule(tmp_path: Path) -> None:
    usual = [line["lr"] for line in metrics(run(micro_config(tmp_path), tmp_path / "usual")) if "lr" in line]
    halved = [line["lr"] for line in metrics(run(micro_config(tmp_path, stages__1__lr=0.5), tmp_path / "halved")) if "lr" in line]
    switch = [line["stage"] for line in metrics(tmp_path / "usual") if "lr" in line].index("1k")
    assert halved[:switch] == usual[:switch]
    assert halved[switch:] == pytest.approx([0.5 * lr for lr in usual[switch:]])


@pytest.mark.parametrize("stop", [8, 10])
def test_a_segmented_stage_resumes_to_the_same_bits(tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before the switch at step 10, and right at it."""
    config = micro_config(tmp_path, stages__1__segment=16, stages__1__recompute=True, train__save_every=stop)
    run(config, tmp_path / "whole")
    from atoll.train.callbacks.base import Callback

    class Stop(Callback):
        def metrics(self, trainer, line) -> None:
            if line.get("step") == stop and "loss" in line:
                trainer.stopping = True

    run(config, tmp_path / "stopped", watch=Stop())
    assert checkpoint.steps(tmp_path / "stopped" / "checkpoints")[-1] == stop
    run(None, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", 12)


def test_segments_may_change_on_a_resume_and_lengths_may_not(tmp_path: Path) -> None:
    config = micro_config(tmp_path)
    cut = dataclasses.replace(config, stages=tuple(dataclasses.replace(s, segment=16, micro_batch=2) for s in config.stages))
    longer = dataclasses.replace(config, stages=tuple(dataclasses.replace(s, length=s.length + 2) for s in config.stages))
    assert folder.fingerprint(cut) == folder.fingerprint(config) != folder.fingerprint(longer)


def test_a_setting_left_at_its_default_is_in_no_fingerprint(tmp_path: Path) -> None:
    """So a version that adds one resumes the runs of the version before."""
    config = micro_config(tmp_path)
    text = to_toml(config)
    assert "segment" in text
    (tmp_path / "older.toml").write_text("".join(line for line in text.splitlines(True) if not line.startswith("segment")))
    assert folder.fingerprint(load_config(tmp_path / "older.toml")) == folder.fingerprint(config)
