"""What a run prints and writes while it goes."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
from helpers import metrics, micro_config

from atoll import train
from atoll.train.screen import Screen, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    screen = Screen(Terminal())
    screen.live("one")
    screen.live("x" * 50)
    screen.say("stays")
    text = screen.stream.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert text == "\r\x1b[Kone\r\x1b[K" + "x" * 19 + "\nstays\n"


def test_elsewhere_live_lines_are_plain_and_rare() -> None:
    screen = Screen(io.StringIO(), every=1000)
    for i in range(5):
        screen.live(f"step {i}")
    screen.live("last", force=True)
    assert screen.stream.getvalue() == "step 0\nlast\n"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75.4, "1:15"), (3599, "59:59"), (4000, "1:06:40"), (-3, "0:00")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_run_shows_and_records_all_that_is_to_be_watched(standin_model: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = train.run(micro_config(tmp_path), tmp_path / "run")
    text = capsys.readouterr().out
    live = r"step 12/12 · 1k · loss \d\.\d{3} · \d\.\d{3} bits/byte · [\d,]+ tokens/s · ETA \d:\d\d"
    live += r" · dead \d+ · MaxVio \d\.\d\d · grad \d\.\d\d"
    assert re.search(live, text)
    assert "bits per byte on held-out text" in text
    assert "  | def parse" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)  # whatever the model writes, the terminal is safe
    lines = metrics(out)
    steps = [line for line in lines if "kind" not in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["stage"] for line in steps] == ["512"] * 10 + ["1k"] * 2
    assert all(line["tokens"] == 256 for line in steps)
    assert all(0 < line["max_vio_mean"] <= line["max_vio"] < 7 for line in steps)
    assert [line["step"] for line in lines if line.get("kind") == "validation"] == [5, 10, 12]
    assert [line["step"] for line in lines if line.get("kind") == "sample"] == [6, 12]
    assert lines[0]["kind"] == "run"
    assert steps[0]["loss"] == pytest.approx(math.log(300), rel=0.02)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert sorted(p.name for p in (out / "probes").iterdir()) == ["step-10.json", "step-12.json", "step-5.json"]
    load = json.loads((out / "probes/step-12.json").read_text())["load"]
    assert len(load) == 1
    assert sum(load[0]) == 2 * 8192
    assert list(out.glob("events.out.tfevents.*"))


def test_without_tensorboard_one_line_says_so(
    standin_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    out = train.run(micro_config(tmp_path, train__steps=2), tmp_path / "run")
    assert capsys.readouterr().out.count("TensorBoard is not installed") == 1
    assert not list(out.glob("events.out.tfevents.*"))


def test_a_finished_run_can_be_resumed_for_its_end(standin_model: None, tmp_path: Path) -> None:
    out = train.run(micro_config(tmp_path, train__evaluate=True), tmp_path / "run")
    before = metrics(out)
    assert before[-1]["kind"] == "final"
    assert not (out / "report.html").exists()
    train.run(micro_config(tmp_path, train__evaluate=True, train__report=True), out, resume=True)
    assert metrics(out) == before
    assert (out / "report.html").stat().st_size > 1000
