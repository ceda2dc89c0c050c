"""Checkpoints written beside training: the same bytes, of the moment they were asked for, one at a time, and no failure unheard."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import micro_config
from safetensors.torch import load_file

from atoll import train
from atoll.config import UserError
from atoll.train import checkpoint, saver
from atoll.train.saver import Saver


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_writes_the_same_bits_either_way(standin_model: None, tmp_path: Path) -> None:
    for name, beside in (("beside", True), ("waiting", False)):
        train.run(micro_config(tmp_path, train__steps=8, train__async_save=beside), tmp_path / name)
    for step in (4, 8):
        metas, tensors = [], []
        for folder in (tmp_path / name / "checkpoints" for name in ("beside", "waiting")):
            meta = checkpoint.check(folder / f"step-{step}")
            # Of the files, names and sizes: safetensors puts the fields of a header in any order.
            metas.append({**meta, "files": {name: about["bytes"] for name, about in meta["files"].items()}})
            tensors.append({n: (t.dtype, t.numpy().tobytes()) for n, t in stored(folder, step).items()})
        assert metas[0] == metas[1]
        assert len(tensors[0]) > 10
        assert tensors[0] == tensors[1]


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.begun, self.at_once = threading.Event(), threading.Event(), 0
        original, self.now = checkpoint._write_tensors, 0

        def write(*args: Any) -> None:
            self.now += 1
            self.at_once = max(self.at_once, self.now)
            self.begun.set()
            assert self.open.wait(20)
            original(*args)
            self.now -= 1

        monkeypatch.setattr(checkpoint, "_write_tensors", write)


def stored(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return {n: t for file in (folder / f"step-{step}").glob("*.safetensors") for n, t in load_file(file).items()}


def test_what_is_written_is_of_the_moment_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, w = Gate(monkeypatch), torch.arange(6.0)
    it = Saver(tmp_path, 5, True)
    it.save(1, {"w": w, "n": torch.tensor(3)}, {"note": "a"})
    assert gate.begun.wait(20)
    w += 10
    assert checkpoint.steps(tmp_path) == []  # nothing under its own name before it is whole
    gate.open.set()
    it.wait()
    assert torch.equal(stored(tmp_path, 1)["w"], torch.arange(6.0))
    assert checkpoint.check(tmp_path / "step-1")["note"] == "a"
    it.save(2, {"w": w, "n": torch.tensor(4)}, {})  # through the same memory
    it.wait()
    assert torch.equal(stored(tmp_path, 2)["w"], torch.arange(6.0) + 10)
    assert int(stored(tmp_path, 2)["n"]) == 4
    assert torch.equal(stored(tmp_path, 1)["w"], torch.arange(6.0))


def test_one_is_written_at_a_time_and_the_next_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, it = Gate(monkeypatch), Saver(tmp_path, 5, True)
    it.save(1, {"w": torch.zeros(2)}, {})
    threading.Timer(0.3, gate.open.set).start()
    it.save(2, {"w": torch.ones(2)}, {})
    with it:
        pass
    assert gate.at_once == 1
    assert checkpoint.steps(tmp_path) == [1, 2]
    found = it.take()
    assert found["save_stall"] >= 0.25
    assert found["save_seconds"] > 0
    assert it.take()["save_stall"] == 0


def test_a_failed_write_is_told_by_the_next_save_and_older_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Saver(tmp_path, 5, True)
    it.save(1, {"w": torch.zeros(2)}, {})
    it.wait()
    before = files(tmp_path)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_tensors", full)
        it.save(2, {"w": torch.zeros(2)}, {})
        with pytest.raises(UserError, match="the disk is full"):
            it.save(3, {"w": torch.zeros(2)}, {})
    assert files(tmp_path) == before
    it.save(4, {"w": torch.zeros(2)}, {})
    it.wait()
    assert checkpoint.steps(tmp_path) == [1, 4]


def test_an_error_that_ends_training_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, it = Gate(monkeypatch), Saver(tmp_path, 5, True)
    threading.Timer(0.2, gate.open.set).start()

    def training() -> None:
        with it:
            it.save(1, {"w": torch.zeros(2)}, {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    assert checkpoint.steps(tmp_path) == [1]


def test_without_room_for_a_copy_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "SPARE", 0.0)
    it = Saver(tmp_path, 5, True)
    it.save(1, {"w": torch.zeros(2)}, {})
    assert checkpoint.steps(tmp_path) == [1]
    assert not it.beside


def test_metrics_say_what_saving_cost(standin_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = checkpoint._write_tensors

    def slow(*args: Any) -> None:
        time.sleep(0.5)
        original(*args)

    monkeypatch.setattr(checkpoint, "_write_tensors", slow)
    train.run(micro_config(tmp_path, train__steps=8, train__save_every=2), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line and "kind" not in line]
    assert [line["save_seconds"] > 0.5 for line in steps][-2:] == [True, True]
    assert steps[0]["save_stall"] == steps[1]["save_stall"] == 0
    assert 0 < steps[2]["save_stall"] < 0.4  # a copy
    assert steps[4]["save_stall"] > 0.1  # and a wait for the one before
