"""Runs on several processes: the same curve as one, checkpoints that any layout reads, one voice, mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from runs import config_in, contents, lines, run_on
from training import layout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with text and caches, and a run in it by one process."""
    tmp = tmp_path_factory.mktemp("runs")
    assert run_on(config_in(tmp, train__keep=9), str(tmp / "alone")) == ""
    return tmp, tmp / "alone"


def assert_same_curve(mine: Path, theirs: Path) -> None:
    a, b = lines(mine), lines(theirs)
    assert [(x["step"], x.get("kind")) for x in a] == [(x["step"], x.get("kind")) for x in b]
    for x, y in zip(a, b, strict=True):
        for key, value in x.items():
            if isinstance(value, float):
                assert value == pytest.approx(y[key], abs=1e-9, rel=1e-9), (x["step"], key)
            else:
                assert value == y[key], (x["step"], key)


def assert_same_tensors(mine: Path, theirs: Path, step: int) -> None:
    a, b = contents(mine, step), contents(theirs, step)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        torch.testing.assert_close(a[name], b[name], atol=1e-9, rtol=1e-9, msg=name)


def test_a_run_by_four_is_a_run_by_one(alone: tuple[Path, Path]) -> None:
    tmp, one = alone
    out = tmp / "four"
    config = layout(config_in(tmp, train__keep=9, train__export=True), data_shard=2, expert=2)
    assert on_ranks(4, run_on, config, str(out)) == [""] * 4
    assert_same_curve(out, one)
    assert_same_tensors(out, one, 6)
    assert len(list((out / "checkpoints" / "step-6").glob("shard-0000[1-4]-*.safetensors"))) == 4
    import atoll

    exported, trained = atoll.load(out / "model").state_dict(), contents(one, 6)
    for name, weight in exported.items():
        torch.testing.assert_close(weight.double(), trained[f"model.{name}"].double(), atol=1e-6, rtol=1e-6)
