"""Runs over a pipeline: the same curve as one process, and checkpoints that any layout reads and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import on_ranks
from runs import config_in, contents, lines, restored_on, run_on
from test_restart import launch
from test_runs import assert_same_curve, assert_same_tensors, cut_back
from training import layout

ROWS = {"train__keep": 9, "train__micro_batch": 1}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with text and caches, and a run in it by one process."""
    tmp = tmp_path_factory.mktemp("pipeline")
    assert run_on(config_in(tmp, **ROWS), str(tmp / "alone")) == ""
    return tmp, tmp / "alone"


@pytest.fixture(scope="module")
def staged(alone: tuple[Path, Path]) -> Path:
    """The same run by two stages, cut in the middle of a block, to its export."""
    tmp, _ = alone
    config = layout(config_in(tmp, **ROWS, train__export=True), pipeline=2, pipeline_cut=(1,))
    assert on_ranks(2, run_on, config, str(tmp / "staged")) == [""] * 2
    return tmp / "staged"


def test_a_run_by_two_stages_is_a_run_by_one_process(alone: tuple[Path, Path], staged: Path) -> None:
    import atoll

    one = alone[1]
    assert_same_curve(staged, one)
    assert_same_tensors(staged, one, 6)
    for step in (3, 6):
        mine, theirs = (run / "probes" / f"step-{step}.json" for run in (staged, one))
        assert mine.read_text() == theirs.read_text()
    for name, weight in atoll.load(staged / "model").state_dict().items():
        assert weight.numpy().tobytes() == contents(staged, 6)[f"model.{name}"].to(weight.dtype).numpy().tobytes()


def test_a_pipeline_s_checkpoint_elsewhere_and_another_s_here_are_the_same_bits(alone: tuple[Path, Path], staged: Path) -> None:
    tmp, one = alone
    config, stored = config_in(tmp, **ROWS), contents(staged, 6)
    for processes, axes in ((2, {"context": 2}), (1, {})):
        (found, *_) = on_ranks(processes, restored_on, layout(config, **axes), str(staged))
        assert found.keys() == stored.keys()
        assert all(found[n].numpy().tobytes() == stored[n].numpy().tobytes() for n in stored), axes
    parts = on_ranks(4, restored_on, layout(config, pipeline=2, expert=2), str(one), True)
    stored = contents(one, 6)
    assert {n for part in parts for n in part} == stored.keys()
    assert all(t.numpy().tobytes() == stored[n].numpy().tobytes() for part in parts for n, t in part.items())
    assert not any("layers.2." in n for n in parts[0])
    assert not any("embed_tokens" in n for n in parts[3])


def test_a_run_moves_to_context_and_to_a_pipeline_of_tensor_ranks_with_the_same_samples(alone: tuple[Path, Path]) -> None:
    tmp, one = alone
    config = config_in(tmp, **ROWS)
    out = cut_back(one, tmp / "moved", 2)
    assert on_ranks(2, run_on, layout(config, context=2), str(out), True) == [""] * 2
    back = cut_back(out, tmp / "back", 4)
    assert on_ranks(4, run_on, layout(config, pipeline=2, tensor=2), str(back), True) == [""] * 4
    assert_same_curve(back, one)
    assert_same_tensors(back, one, 6)


@pytest.mark.slow
def test_the_command_trains_over_four_processes_to_its_report(tmp_path: Path) -> None:
    from atoll.config import to_toml

    changes = {**ROWS, "train__dtype": "float32", "train__evaluate": True, "train__report": True, "train__export": True}
    config = layout(config_in(tmp_path, **changes, model__num_hidden_layers=4), pipeline=2, pipeline_virtual=2, data_shard=2)
    (tmp_path / "micro.toml").write_text(to_toml(config))
    words = ["-m", "atoll", "train", str(tmp_path / "micro.toml"), "--out", str(tmp_path / "run")]
    ended = launch(*words, processes=4)
    assert ended.returncode == 0, ended.stderr
    assert "4 processes, cpu" in ended.stdout
    assert ended.stdout.count("report: ") == 1
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert [line["step"] for line in lines(tmp_path / "run") if line.get("kind") is None] == list(range(1, 7))
