"""Minutes become steps once; from then on the clock has no say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers import assert_same_run, metrics, micro_config

from atoll import train
from atoll.config import UserError, load_config
from atoll.data import open_corpus
from atoll.train import budget
from atoll.train.screen import Screen

pytestmark = pytest.mark.usefixtures("standin_model")


def test_steps_fill_what_the_rest_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_measure", lambda *args: budget.Costs(step=0.5, end=10.0))
    config = micro_config(tmp_path, train__steps=None, train__minutes=1.0, train__threads=None)
    corpus = open_corpus(config.data, config.model)
    now = time.monotonic()
    frozen = budget.freeze(config, corpus, tmp_path, Screen(), now - 20.0)
    assert frozen.train.steps is not None
    assert 50 <= frozen.train.steps <= int((60 * 0.96 - 20 - 10) / 0.5)
    assert frozen.train.threads == 1  # the suite's, frozen with the steps: another number would round otherwise


def test_too_few_minutes_are_refused_with_how_many_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_measure", lambda *args: budget.Costs(step=6.0, end=30.0))
    config = micro_config(tmp_path, train__steps=None, train__minutes=0.5)
    with pytest.raises(UserError, match=r"^train\.minutes = 0\.5: leaves time for 0 steps; give at least 1\.[6-9]"):
        train.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_timed_run_is_frozen_and_equals_one_with_these_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[budget.Costs] = []
    measure = budget._measure

    def real_then_fixed(*args) -> budget.Costs:
        measured.append(measure(*args))  # really times a trial, which must leave no trace in what follows
        return budget.Costs(step=1.0, end=0.0)

    monkeypatch.setattr(budget, "_measure", real_then_fixed)
    timed = train.run(micro_config(tmp_path, train__steps=None, train__minutes=0.8, train__evaluate=True), tmp_path / "timed")
    assert 0 < measured[0].step < 1
    assert measured[0].end > 0
    steps = load_config(timed / "config.toml").train.steps
    assert steps is not None
    fixed = train.run(micro_config(tmp_path, train__steps=steps, train__minutes=0.8, train__evaluate=True), tmp_path / "fixed")
    assert_same_run(timed, fixed, steps)
    final = metrics(timed)[-1]
    assert final["kind"] == "final"
    assert final["files"] == len(
        open_corpus(load_config(timed / "config.toml").data, load_config(timed / "config.toml").model).heldout_files
    )
    assert 0 < final["xz"] < 8
    assert 0 < final["gzip"] < 8
