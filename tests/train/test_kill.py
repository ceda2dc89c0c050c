"""Kill -9 at any moment and resume: the run equals one that was never stopped, bit for bit. Also SIGTERM and Ctrl-C."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same_run, metrics

STEPS = 12


class Worker:
    """The process that forks a child a run; see worker.py."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, str(Path(__file__).parent / "worker.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def start(self, tmp: Path, out: Path, kill: list[Any] | None = None, model: str = "standin", **changes: Any) -> int:
        """Begin a run in a child; its process id."""
        job = {"tmp": str(tmp), "out": str(out), "kill": kill, "model": model, "changes": changes}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._read()["pid"]

    def wait(self) -> int:
        """The wait status of the run begun last."""
        return self._read()["status"]

    def run(self, *args: Any, **kwargs: Any) -> int:
        self.start(*args, **kwargs)
        return self.wait()

    def _read(self) -> dict[str, int]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    it = Worker()
    yield it
    assert it.process.stdin is not None
    it.process.stdin.close()
    it.process.wait(timeout=20)


@pytest.fixture(scope="module")
def whole(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with text and caches, and a run in it that nothing stopped."""
    tmp = tmp_path_factory.mktemp("kill")
    assert worker.run(tmp, tmp / "whole") == 0, (tmp / "log").read_text()
    return tmp, tmp / "whole"


MOMENTS = random.Random(7)
KILLS: list[list[Any]] = [
    ["train_step", 7],
    ["replace", 1],  # config.toml about to appear
    ["rename", 1],  # the first checkpoint about to appear
    ["rename_after", 1],  # and just after, its folder not yet synced
    ["fsync", 9],
    ["fsync_after", 14],
    ["rename_after", 3],
    *(["time", MOMENTS.uniform(0.05, 0.6)] for _ in range(3)),
]


def finish(worker: Worker, tmp: Path, out: Path, kills: list[list[Any]], model: str = "standin", **changes: Any) -> int:
    """Start, kill, resume, kill … and at last run to the end; how many runs were killed."""
    killed = 0
    for kill in kills:
        status = worker.run(tmp, out, kill, model, **changes)
        assert status in (0, signal.SIGKILL), (tmp / "log").read_text()
        killed += status == signal.SIGKILL
    assert worker.run(tmp, out, None, model, **changes) == 0, (tmp / "log").read_text()
    return killed


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill[0]}-{kill[1]:.2g}")
def test_one_kill_anywhere(worker: Worker, whole: tuple[Path, Path], tmp_path: Path, kill: list[Any]) -> None:
    tmp, reference = whole
    killed = finish(worker, tmp, tmp_path / "run", [kill])
    assert killed or kill[0] == "time"
    assert_same_run(reference, tmp_path / "run", STEPS)


def test_killed_again_and_again(worker: Worker, whole: tuple[Path, Path], tmp_path: Path) -> None:
    tmp, reference = whole
    kills = [["train_step", 3], ["train_step", 6], ["rename", 1], ["fsync", 4], ["rename_after", 1]]
    assert finish(worker, tmp, tmp_path / "run", kills) >= 4
    assert_same_run(reference, tmp_path / "run", STEPS)


def test_the_whole_blueprint_killed_and_resumed(worker: Worker, whole: tuple[Path, Path], tmp_path: Path) -> None:
    tmp, _ = whole
    rare = {"train__validate_every": 100, "train__sample_every": 7}
    assert worker.run(tmp, tmp_path / "whole", None, "real", **rare) == 0, (tmp / "log").read_text()
    assert finish(worker, tmp, tmp_path / "run", [["train_step", 7], ["rename", 2]], "real", **rare) == 2
    assert_same_run(tmp_path / "whole", tmp_path / "run", STEPS)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_saves_and_says_how_to_go_on(worker: Worker, whole: tuple[Path, Path], tmp_path: Path, sent: signal.Signals) -> None:
    tmp, _ = whole
    long = {"train__steps": 150, "train__save_every": 1000, "train__validate_every": 1000, "train__sample_every": 1000}
    out = tmp_path / "run"
    pid = worker.start(tmp, out, None, "standin", **long)
    lines = out / "metrics.jsonl"
    deadline = time.monotonic() + 20
    while not (lines.exists() and lines.read_text().count("\n") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, sent)
    assert worker.wait() == 0
    done = metrics(out)[-1]["step"]
    assert 3 <= done < 150
    assert (out / "checkpoints" / f"step-{done}").is_dir()
    assert f"stopped after step {done} of 150, saved; go on with: atoll train --resume {out}" in (tmp / "log").read_text()
    assert worker.run(tmp, out, None, "standin", **long) == 0
    assert worker.run(tmp, tmp_path / "other", None, "standin", **long) == 0
    assert_same_run(tmp_path / "other", out, 150)
