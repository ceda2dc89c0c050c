"""benchmarks/long_step.py runs through at tiny shapes: what is measured on a card is checked for its logic here."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_step.py"


def test_all_parts_at_tiny_shapes(tmp_path, monkeypatch):
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--smoke", "--out", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    found = json.loads(out.read_text())
    assert [line["tokens"] for line in found["step"]] == [8, 64, 256, 1024]
    assert found["check"][0]["ratio"] < 1e-3
    assert len(found["attention"]) == 3
