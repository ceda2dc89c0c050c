"""Runs on several processes: the same curve as one, checkpoints that any layout reads, one voice, mistakes in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from runs import config_in, contents, lines, restored_on, run_on, stopped_on
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


@pytest.fixture(scope="module")
def four(alone: tuple[Path, Path]) -> Path:
    """The same run by four processes."""
    tmp, _ = alone
    config = layout(config_in(tmp, train__keep=9, train__export=True), data_shard=2, expert=2)
    assert on_ranks(4, run_on, config, str(tmp / "four")) == [""] * 4
    return tmp / "four"


def cut_back(run: Path, out: Path, step: int) -> Path:
    """A copy of a run as it was after `step`."""
    shutil.copytree(run, out)
    for checkpoint in (out / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    return out


def test_a_run_by_four_is_a_run_by_one(alone: tuple[Path, Path], four: Path) -> None:
    one, out = alone[1], four
    assert_same_curve(out, one)
    assert_same_tensors(out, one, 6)
    assert len(list((out / "checkpoints" / "step-6").glob("shard-0000[1-4]-*.safetensors"))) == 4
    import atoll

    exported, trained = atoll.load(out / "model").state_dict(), contents(one, 6)
    for name, weight in exported.items():
        torch.testing.assert_close(weight.double(), trained[f"model.{name}"].double(), atol=1e-6, rtol=1e-6)


def test_one_process_s_checkpoint_on_four_and_theirs_on_two_are_the_same_bits(alone: tuple[Path, Path], four: Path) -> None:
    tmp, one = alone
    config = config_in(tmp)
    for run, processes, axes in ((one, 4, {"data_shard": 4}), (four, 2, {"expert": 2}), (four, 1, {})):
        (found, *_) = on_ranks(processes, restored_on, layout(config, **axes), str(run))
        stored = contents(run, 6)
        assert found.keys() == stored.keys()
        assert all(found[n].numpy().tobytes() == stored[n].numpy().tobytes() for n in stored), (run, axes)


def test_a_run_goes_on_in_other_layouts_with_the_same_samples(alone: tuple[Path, Path]) -> None:
    tmp, one = alone
    out = cut_back(one, tmp / "moved", 2)
    config = config_in(tmp, train__keep=9)
    assert on_ranks(4, run_on, layout(config, data_replicate=2, context=2), str(out), True) == [""] * 4
    assert_same_curve(out, one)
    back = cut_back(out, tmp / "back", 4)
    assert on_ranks(2, run_on, layout(config, expert=2), str(back), True) == [""] * 2
    assert_same_curve(back, one)
    assert_same_tensors(back, one, 6)


def test_a_signal_to_any_process_stops_all_after_the_step(alone: tuple[Path, Path]) -> None:
    tmp, one = alone
    out, config = tmp / "stopped", layout(config_in(tmp, train__keep=9), data_shard=2)
    assert on_ranks(2, stopped_on, config, str(out), 1, 3) == ["", ""]
    assert lines(out)[-1]["step"] == 3
    assert (out / "checkpoints" / "step-3").is_dir()
    assert on_ranks(2, run_on, config, str(out), True) == ["", ""]
    curve = [line for line in lines(out) if line.get("kind") is None]
    expected = [line for line in lines(one) if line.get("kind") is None]
    assert [line["loss"] for line in curve] == pytest.approx([line["loss"] for line in expected], abs=1e-9)


def test_a_mistake_is_said_by_one_process_before_anything_is_built(alone: tuple[Path, Path]) -> None:
    tmp, one = alone
    first, second = on_ranks(2, run_on, layout(config_in(tmp), data_shard=4), str(tmp / "wrong"))
    axes = "pipeline 1 x data_replicate 1 x data_shard 4 x expert 1 x context 1 x tensor 1"
    assert first.startswith(f"parallel.data_shard = 4: {axes} is for 4 processes and 2 run; ")
    nearest = "pipeline = 1, data_replicate = 1, data_shard = 2, expert = 1, context = 1, tensor = 1"
    assert first.endswith(f"the nearest possible layout is {nearest}")
    assert second == "exit 2"
    assert not (tmp / "wrong").exists()
    taken = on_ranks(2, run_on, layout(config_in(tmp), data_shard=2), str(one))
    assert "already holds a run" in taken[0]
    assert taken[1] == "exit 2"


def test_processes_write_the_same_bits_beside_training_as_waiting_for_it(alone: tuple[Path, Path]) -> None:
    tmp, _ = alone
    for name, beside in (("beside", True), ("waiting", False)):
        config = layout(config_in(tmp, train__keep=9, train__async_save=beside), data_shard=2)
        assert on_ranks(2, run_on, config, str(tmp / name)) == ["", ""]
    for step in (2, 4, 6):
        mine, theirs = (contents(tmp / name, step) for name in ("beside", "waiting"))
        assert mine.keys() == theirs.keys()
        assert all(mine[n].numpy().tobytes() == theirs[n].numpy().tobytes() for n in theirs)
