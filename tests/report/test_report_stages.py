"""The stages' table: what a switch costs and when it is over."""

import dataclasses
import json

from fake_run import write_run

from atoll.report.run import read
from atoll.report.stages import HEAD, stage_rows


def run_with(tmp_path, losses):
    """A run of two stages of 60 steps with these losses."""
    folder = write_run(tmp_path, 120, **{"stages.0.share": 0.5, "stages.1.share": 0.5})
    run = read(folder)
    steps = [{**line, "loss": loss} for line, loss in zip(run.steps, losses, strict=True)]
    return dataclasses.replace(run, steps=steps)


def test_a_switch_that_costs_and_heals(tmp_path):
    losses = [3.0] * 60 + [3.5] * 20 + [2.9] * 40
    first, second = stage_rows(run_with(tmp_path, losses))
    assert len(first) == len(second) == len(HEAD)
    assert first[:2] == ("512", "512")
    assert first[5:7] == ("", "")
    assert second[5] == "+0.500"
    assert 15 <= int(second[6].split()[0]) <= 25
    assert (first[8], second[8]) == ("1.10 GiB", "1.60 GiB")


def test_switches_that_cost_nothing_or_never_heal(tmp_path):
    assert stage_rows(run_with(tmp_path / "a", [3.0] * 60 + [2.8] * 60))[1][5:7] == ("-0.200", "at once")
    assert stage_rows(run_with(tmp_path / "b", [3.0] * 60 + [3.1] * 60))[1][5:7] == ("+0.100", "not within it")


def test_missing_numbers_leave_cells_empty(tmp_path):
    folder = write_run(tmp_path, 120)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k not in ("peak_memory", "tokens_per_second", "bits_per_byte")} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert all((row[4], row[7], row[8]) == ("", "", "") for row in stage_rows(read(folder)))
