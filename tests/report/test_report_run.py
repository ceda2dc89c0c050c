"""Reading a run folder: order, repeats after a crash, damage; and what is computed from its lines."""

import json

import numpy as np
import pytest
from fake_run import write_run

from atoll.report import curves, mechanisms
from atoll.report.page import training_seconds
from atoll.report.run import number, read, total


def rewrite(run, lines):
    (run / "metrics.jsonl").write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "r", steps=10, probes=3)


def test_a_step_written_twice_counts_once_as_last_written(folder):
    rewrite(folder, [{"step": 2, "loss": 5.0}, {"step": 1, "loss": 9.0}, {"step": 3, "loss": 4.0}, {"step": 2, "loss": 3.0}])
    run = read(folder)
    assert [(line["step"], line["loss"]) for line in run.steps] == [(1, 9.0), (2, 3.0), (3, 4.0)]


def test_damaged_lines_and_probes_are_left_out_and_counted(folder):
    rewrite(folder, [{"step": 1}, "not json\n", "[1, 2]\n", '{"step": 2, "loss": 1.0}\n', '{"step": 3, "lo'])
    (folder / "probes" / "step-7.json").write_text("{")
    (folder / "probes" / "step-x.json").write_text("{}")
    run = read(folder)
    assert [line["step"] for line in run.steps] == [1, 2]
    assert run.damaged == 5


def test_probes_are_ordered_by_number_not_by_name(folder):
    for step in (100, 20, 3):
        (folder / "probes" / f"step-{step}.json").write_text("{}")
    steps = [step for step, _ in read(folder).probes]
    assert steps == sorted(steps)
    assert steps[-2:] == [20, 100]


def test_stages_are_found_by_name_or_index(folder):
    named = read(folder).stages
    assert [(name, piece.start, piece.stop) for name, piece in named] == [("512", 0, 8), ("1k", 8, 10)]
    rewrite(folder, [{"step": 1, "stage": 0}, {"step": 2, "stage": 1}, {"step": 3, "stage": 7}])
    assert [name for name, _ in read(folder).stages] == ["512", "1k", "7"]


def test_tokens_and_time_come_from_the_lines(folder):
    rewrite(folder, [{"step": 1, "stage": "512", "tokens_per_second": 4096.0}, {"step": 2, "tokens": 1000, "tokens_per_second": 500.0}])
    run = read(folder)
    assert [run.tokens_in(line) for line in run.steps] == [8 * 512, 1000]
    assert training_seconds(run) == pytest.approx(1 + 2)


def test_numbers_are_tolerant():
    assert number(3) == 3.0
    assert number([1, None, 4.5]) == 4.5
    assert total([1, 2.5]) == 3.5
    assert np.isnan([number(None), number("x"), number([]), total(None)]).all()


def test_a_metric_that_is_missing_is_nan(folder):
    rewrite(folder, [{"step": 1, "loss": 2.0}, {"step": 4, "loss": None}])
    steps, values = curves.column(read(folder), "loss")
    assert steps.tolist() == [1, 4]
    assert values[0] == 2.0
    assert np.isnan(values[1])


def test_chance_is_the_largest_of_nearly_normal_loads(folder):
    run = read(folder)
    expected = mechanisms.sampling_noise(run)[0]
    rng = np.random.default_rng(0)
    mean = 4096 * 16 / 896
    drawn = [rng.normal(mean, np.sqrt(mean), 4 * 896).max() / mean - 1 for _ in range(200)]
    assert expected == pytest.approx(np.mean(drawn), rel=0.15)


def test_half_lives_are_where_the_decay_is_a_half():
    probe = {"decay": [[2, [float(np.log(0.5)), float(np.log(0.5)) / 100, 0.0, float("nan")]]]}
    assert mechanisms.half_lives(probe)[2] == pytest.approx([1.0, 100.0])


def test_mixes_are_named_for_people():
    names = ["0.mlp", "3.attention", "output", "language_model.model.layers.12.mlp_res_proj.weight"]
    assert [mechanisms.short_mix(name) for name in names] == ["0 MLP", "3 attention", "output", "12 MLP"]
