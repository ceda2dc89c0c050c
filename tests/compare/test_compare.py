"""`atoll compare`: its words, its runs, going on after a stop, its numbers and its page."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import cli
from atoll.compare import compare, page, pictures, plan, result, runs, words
from atoll.compare.words import Vary
from atoll.config import UserError, load_config
from atoll.report import plots
from atoll.train.trainer import GaveUp

TOML = """\
preset = "tiny"
[model]
vocab_size = 300
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
kda_num_heads = 2
kda_head_dim = 8
q_lora_rank = 8
kv_lora_rank = 8
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
intermediate_size = 24
moe_intermediate_size = 8
routed_expert_hidden_size = 8
num_experts = 8
num_experts_per_token = 2
[data]
source = "text"
cache = "cache"
heldout = 0.1
[train]
threads = 1
save_every = 2
validate_every = 4
sample_every = 100
validate_tokens = 256
[[stages]]
name = "32"
length = 32
batch = 4
"""
BALANCE = ("micro.toml", "--vary", "balance=quantile,capacity", "--steps", "6")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a text and a TOML file; coarse pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pictures, "_DPI", 30)
    Path("micro.toml").write_text(TOML)
    Path("text").mkdir()
    rng = np.random.default_rng(0)
    vocabulary = ("def", "class", "return", "import", "self", "value", "index", "token", "state", "gate", "expert")
    for i in range(30):
        rows = [" ".join(rng.choice(vocabulary, 6)) for _ in range(30)]
        (Path("text") / f"{i}.txt").write_text("\n".join(rows) + "\n")


def metrics(folder: str | Path) -> list[dict[str, Any]]:
    """A run's lines without what the clock decides."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    clocked = ("tokens_per_second", "peak_memory", "save_stall", "save_seconds")
    return [{k: v for k, v in line.items() if k not in clocked} for line in lines]


def steps_of(folder: str | Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder) if "kind" not in line]


# ---------------------------------------------------------------- words


def test_words_in_any_order_and_both_spellings():
    asked = words.parse(
        [
            "--vary=residual=plain,full",
            "tiny",
            "--seeds",
            "2",
            "--optim.lr",
            "0.1",
            "--vary",
            "optim.betas=0.9,0.95;0.8,0.9",
            "--out=x",
            "--json",
        ]
    )
    assert asked.vary == [Vary("model.residual", ("plain", "full")), Vary("optim.betas", ("0.9,0.95", "0.8,0.9"))]
    assert (asked.train.config, asked.train.overrides, asked.train.out) == ("tiny", {"optim.lr": "0.1"}, "x")
    assert (asked.seeds, asked.steps, asked.json) == (2, None, True)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--vary balance=sign", "a CONFIG is expected"),
        ("tiny", "--vary SETTING=VALUE"),
        ("tiny --vary balance", "as balance=quantile,sign"),
        ("tiny --vary balance=", "as balance=quantile,sign"),
        ("tiny --vary ballance=sign", "group.name, or one of balance"),
        ("tiny --vary balance=sign,sign", "'sign' is given twice"),
        ("tiny --vary balance=sign --vary balance.kind=none", "put all values into one"),
        ("tiny --vary balance=sign --balance.kind none", "is varied already"),
        ("tiny --vary train.steps=1,2", "use --steps, --minutes or --seeds"),
        ("tiny --vary balance=sign --seeds 0", "--seeds 0: a whole number from 1"),
        ("tiny --vary balance=sign --seeds", "--seeds VALUE"),
        ("tiny --vary balance=sign --steps x", "--steps x: a whole number"),
        ("tiny --vary balance=sign --steps 3 --steps 4", "--steps: given twice"),
        ("tiny --vary balance=sign --steps 3 --minutes 4", "does not go with --minutes"),
        ("tiny --vary balance=sign --resume x", "the same command again"),
        ("tiny --vary balance=sgn", "did you mean 'sign'?"),
        ("tiny --vary model.hiden_size=3,4", "did you mean model.hidden_size?"),
        ("tiny --vary balance=quantile,sign --balance.sign_rate 0.01", "a second balancer beside"),
        ("tinny --vary balance=sign", "did you mean 'tiny'?"),
        ("micro.toml --vary data.text_field=a|b,a&b", "would share the folder"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    assert cli.main(["compare", *line.split(" ")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err
    assert sorted(Path().rglob("*")) == before


# ---------------------------------------------------------------- runs


def test_the_whole_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *BALANCE, "--seeds", "2", "--out", "c", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found == json.loads(Path("c/compare.json").read_text())
    assert "2 values x 2 seeds of micro.toml: 4 runs of 6 steps, 768 tokens each" in err
    assert [(row["value"], row["seed"]) for row in found["runs"]] == [("quantile", 0), ("capacity", 0), ("quantile", 1), ("capacity", 1)]
    assert found["vary"] == {"balance.kind": ["quantile", "capacity"]}
    # one seed, one start and one order of samples, whatever the value; another seed, another of both
    lines = {row["value"] + str(row["seed"]): steps_of(Path("c") / row["folder"]) for row in found["runs"]}
    assert lines["quantile0"][0]["max_vio"] == lines["capacity0"][0]["max_vio"]
    assert lines["quantile0"][0]["loss"] == pytest.approx(lines["capacity0"][0]["loss"], abs=0.01)
    assert lines["quantile0"][0]["max_vio"] != lines["quantile1"][0]["max_vio"]
    assert len({line[1]["loss"] for line in lines.values()}) == 4
    check_numbers(found, lines)
    text = Path("c/compare.html").read_text()
    assert "<script" not in text
    assert "://" not in text
    assert "rule; one at a time" in text
    names = {p.stem for p in Path("c/plots").iterdir()}
    assert names == {p.name for p in pictures.PICTURES}
    assert not list(Path("c/runs").rglob("checkpoints"))
    assert not list(Path("c").glob(".*"))


def check_numbers(found: dict[str, Any], lines: dict[str, list[dict[str, Any]]]) -> None:
    """The measures against the runs' own lines, by hand."""
    for value in found["values"]:
        rows = [row for row in found["runs"] if row["value"] == value["value"]]
        for row in rows:
            mine = lines[row["value"] + str(row["seed"])]
            assert row["loss"] == pytest.approx(mine[-1]["loss"])
            assert row["max_vio"] == pytest.approx(sorted(line["max_vio"] for line in mine[-3:])[1])
            assert (row["dropped_share"] is None) == (row["value"] == "quantile")
        last = [next(x for x in reversed(metrics(Path("c") / row["folder"])) if x.get("kind") == "validation") for row in rows]
        assert [row["bits_per_byte"] for row in rows] == [x["bits_per_byte"] for x in last]
        a, b = (row["bits_per_byte"] for row in rows)
        assert value["bits_per_byte"]["mean"] == pytest.approx((a + b) / 2)
        assert value["bits_per_byte"]["std"] == pytest.approx(abs(a - b) / 2**0.5)
    quantile, capacity = ([r["bits_per_byte"] for r in found["runs"] if r["value"] == v] for v in ("quantile", "capacity"))
    expected = sum(c - q for q, c in zip(quantile, capacity, strict=True)) / 2
    assert found["values"][0]["difference"] is None
    assert found["values"][1]["difference"]["mean"] == pytest.approx(expected)


class Crash(Exception):
    pass


def test_killed_it_goes_on_and_equals_one_never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare([*BALANCE, "--seeds", "1", "--out", "whole"])[0]
    with monkeypatch.context() as patch:
        calls = 0
        original = runs.Progress.metrics

        def fall(self, trainer, line):
            nonlocal calls
            calls += "kind" not in line
            if calls == 10:  # in the second run, between two checkpoints
                raise Crash
            original(self, trainer, line)

        patch.setattr(runs.Progress, "metrics", fall)
        with pytest.raises(Crash):
            compare([*BALANCE, "--seeds", "1", "--out", "cut"])
    first = Path("cut/runs/quantile-seed0/metrics.jsonl")
    stamp = first.stat().st_mtime_ns
    assert not Path("cut/runs/capacity-seed0/finished.json").exists()
    resumed = compare([*BALANCE, "--seeds", "1", "--out", "cut"])[0]
    assert first.stat().st_mtime_ns == stamp, "a finished run is not trained again"
    for name in ("quantile-seed0", "capacity-seed0"):
        assert metrics(f"cut/runs/{name}") == metrics(f"whole/runs/{name}")
    drop = {"seconds", "step_seconds"}
    assert [{k: v for k, v in r.items() if k not in drop} for r in resumed["runs"]] == [
        {k: v for k, v in r.items() if k not in drop} for r in whole["runs"]
    ]


def test_asked_to_stop_it_saves_says_how_to_go_on_and_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", *BALANCE, "--seeds", "1", "--out", "c"]
    with monkeypatch.context() as patch:
        patch.setattr(runs.Progress, "metrics", lambda self, trainer, line: line.get("step") == 3 and os.kill(os.getpid(), signal.SIGINT))
        assert cli.main(command) == 130
    assert "stopped in quantile seed 0, saved; go on with the same command" in capsys.readouterr().out
    assert 3 <= len(steps_of("c/runs/quantile-seed0")) <= 4
    assert cli.main(command) == 0
    assert "mean ± standard deviation" not in capsys.readouterr().out  # one seed
    assert len(steps_of("c/runs/quantile-seed0")) == len(steps_of("c/runs/capacity-seed0")) == 6


def test_more_seeds_and_values_join_what_is_there_and_nothing_else_does(capsys: pytest.CaptureFixture[str]) -> None:
    compare(["micro.toml", "--vary", "balance=quantile", "--steps", "4", "--seeds", "1", "--out", "c"])
    capsys.readouterr()
    found = compare(["micro.toml", "--vary", "balance=none,quantile", "--seeds", "2", "--out", "c"])[0]
    assert "4 runs of 4 steps, 512 tokens each; 1 are finished" in capsys.readouterr().out
    assert len(found["runs"]) == 4
    for other in (["--optim.lr", "0.1"], ["--steps", "5"]):
        with pytest.raises(UserError, match=r"c'?: holds a comparison of 4 steps"):
            compare(["micro.toml", "--vary", "balance=none,quantile", "--out", "c", *other])
    with pytest.raises(UserError, match="holds no comparison"):
        compare([*BALANCE, "--out", "text"])


def test_two_settings_meet_and_shapes_may_differ() -> None:
    line = ["micro.toml", "--vary", "residual=plain,block", "--vary", "optim.lr=0.01,0.02", "--steps", "2", "--seeds", "1", "--out", "c"]
    found = compare(line)[0]
    names = ["residual plain, lr 0.01", "residual plain, lr 0.02", "residual block, lr 0.01", "residual block, lr 0.02"]
    assert [row["value"] for row in found["runs"]] == names
    assert sorted(p.name for p in Path("c/runs").iterdir())[0] == "residual_block_lr_0.01-seed0"
    config = load_config(Path("c/runs/residual_plain_lr_0.02-seed0/config.toml").resolve())
    assert (config.model.residual, config.optim.lr, config.train.steps, config.train.export) == ("plain", 0.02, 2, False)
    assert all(len(steps_of(Path("c") / row["folder"])) == 2 for row in found["runs"])


def test_a_run_that_gives_up_is_named_and_the_rest_is_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = runs.run

    def run(config, out, **options):
        if "capacity-seed0" in str(out):
            raise GaveUp("optim.lr = 9: the last 50 steps had to be skipped <b>")
        return original(config, out, **options)

    monkeypatch.setattr(runs, "run", run)
    found, out, _ = compare([*BALANCE, "--seeds", "2", "--out", "c"])
    assert [row.get("failed", "")[:12] for row in found["runs"]] == ["", "optim.lr = 9", "", ""]
    assert found["values"][1]["failed"] == 1
    assert found["values"][1]["bits_per_byte"]["n"] == found["values"][1]["difference"]["n"] == 1
    assert "capacity (1 failed)" in result.render(found, out)
    text = Path("c/compare.html").read_text()
    assert "capacity, seed 0: optim.lr = 9" in text
    assert "skipped &lt;b&gt;" in text


def test_minutes_give_all_runs_the_steps_of_the_slowest_value(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []

    def freeze(config, corpus, out, screen, started):
        shares.append(config.train.minutes)
        steps = 40 if config.balance.kind == "quantile" else 30
        return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))

    monkeypatch.setattr("atoll.train.budget.freeze", freeze)
    asked = words.parse(["micro.toml", "--vary", "balance=quantile,sign", "--seeds", "3", "--minutes", "600", "--out", "c"])
    prepared = plan.prepare(asked)
    assert shares == [100.0, 100.0]
    assert prepared.steps == 29  # less the time that timing took
    assert {cell.steps for cell in prepared.cells} == {29}
    assert plan.prepare(asked).steps == 29
    assert len(shares) == 2, "frozen: not timed again"

    def too_little(*_):
        raise UserError("train.minutes = 0.1: leaves time for 0 steps")

    monkeypatch.setattr("atoll.train.budget.freeze", too_little)
    with pytest.raises(UserError, match=r"--minutes 0\.6: 0\.1 for each of 6 runs is too little"):
        plan.prepare(words.parse(["micro.toml", "--vary", "balance=quantile,sign", "--minutes", "0.6", "--out", "d"]))
    assert not Path("d").exists()


def test_shapes_do_not_vary_under_given_weights() -> None:
    compare(["micro.toml", "--vary", "balance=none", "--steps", "2", "--seeds", "1", "--out", "c", "--train.export", "true"])
    run = "c/runs/none-seed0"
    with pytest.raises(UserError, match=r"--vary model\.residual: does not go with"):
        compare([run, "--vary", "residual=plain,block", "--steps", "2", "--out", "d"])
    found = compare([run, "--vary", "optim.lr=0.001,0.002", "--steps", "2", "--seeds", "1", "--out", "d"])[0]
    first = [steps_of(Path("d") / row["folder"])[0]["loss"] for row in found["runs"]]
    assert first[0] == first[1] < steps_of(run)[0]["loss"], "both go on from the trained weights"


# ---------------------------------------------------------------- numbers and pictures


def test_spread_and_its_text():
    assert result.spread([None, None]) is None
    assert result.spread([2.0]) == {"mean": 2.0, "std": None, "min": 2.0, "max": 2.0, "n": 1}
    assert result.spread([1.0, None, 3.0])["std"] == pytest.approx(2**0.5)
    assert result.with_spread(result.spread([1.0, 3.0]), ".2f") == "2.00 ± 1.41"
    assert result.with_spread(result.spread([0.5]), ".1%") == "50.0%"
    assert result.with_spread(None, ".2f") == "-"


def test_what_the_seeds_do_not_tell_apart_is_all_best():
    def rows(value: str, *numbers: float) -> list[dict[str, Any]]:
        return [{"value": value, "seed": i, "bits_per_byte": x} for i, x in enumerate(numbers)]

    every = [*rows("a", 1.00, 1.10, 1.20), *rows("b", 1.02, 1.09, 1.21), *rows("c", 1.05, 1.15, 1.25)]
    assert page._best({"runs": every, "seeds": 3}) == ["a", "b"], "c is worse by the same with every seed, b is not"
    assert page._best({"runs": every, "seeds": 1}) == []


def test_nine_values_keep_apart_and_names_are_escaped() -> None:
    values = [f"<{i}>" for i in range(9)]
    base = load_config("micro.toml", {"train.steps": 3})
    cells = [plan.Cell(v, 0, base, Path(f"c/{i}")) for i, v in enumerate(values)]
    prepared = plan.Plan("a&b", Path("c"), [Vary("data.text_field", tuple(values))], 1, base, cells)
    styles = [json.dumps(pictures.style_of(prepared, v, plots.LIGHT)) for v in values]
    assert len(set(styles)) == 9
    numbers = {name: {"mean": 1.0, "std": None, "min": 1.0, "max": 1.0, "n": 1} for name in result.MEASURES}
    rows = [{"value": v, "seed": 0, "folder": "x", "loss": 1.0} for v in values]
    found = {"runs": rows, "values": [{"value": v, "failed": 0, "difference": None, **numbers} for v in values]}
    text = page.page(prepared, {**found, "seeds": 1, "steps": 3, "tokens": 9, "machine": {}}, {})
    assert "<0>" not in text
    assert "&lt;8&gt;" in text
    assert "a&amp;b, by data.text_field" in text
