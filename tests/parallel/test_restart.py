"""torchrun: a killed process costs at most the steps since the last save, and the curve is that of a run nothing befell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from killed import AXES
from ranks import on_ranks
from runs import config_in, contents, lines, run_on
from training import layout

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def launch(*words: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).parents[2] / "src")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": source}
    return subprocess.run([*TORCHRUN, str(processes), *words], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["step", "save", "stage"])
def test_a_killed_process_is_started_again_and_the_run_goes_on(moment: str, tmp_path: Path) -> None:
    whole = layout(config_in(tmp_path, train__micro_batch=1), **AXES.get(moment, {"data_shard": 2}))
    assert on_ranks(2, run_on, whole, str(tmp_path / "whole")) == ["", ""]
    ended = launch("--max-restarts", "1", str(Path(__file__).parent / "killed.py"), str(tmp_path), str(tmp_path / "run"), moment)
    assert ended.returncode == 0, ended.stderr
    assert "exitcode: -9" in ended.stderr
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    mine, theirs = contents(tmp_path / "run", 6), contents(tmp_path / "whole", 6)
    assert all(mine[name].numpy().tobytes() == t.numpy().tobytes() for name, t in theirs.items())


@pytest.mark.slow
def test_the_command_fills_its_minutes_on_two_processes_and_says_mistakes_once(tmp_path: Path) -> None:
    from atoll.config import to_toml

    config = layout(config_in(tmp_path, train__steps="none", train__minutes=0.5, train__report=False, train__dtype="float32"), data_shard=2)
    (tmp_path / "micro.toml").write_text(to_toml(config))
    words = ["-m", "atoll", "train", str(tmp_path / "micro.toml")]
    wrong = launch(*words, "--out", str(tmp_path / "wrong"), "--parallel.data_shard", "4")
    assert wrong.returncode != 0
    assert wrong.stderr.count("atoll: parallel.data_shard = 4: ") == 1
    ended = launch(*words, "--out", str(tmp_path / "run"), "--train.export", "true")
    assert ended.returncode == 0, ended.stderr
    assert "2 processes, cpu" in ended.stdout
    assert ended.stdout.count("model: ") == 1
    assert lines(tmp_path / "run")[-1]["step"] >= 10
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
