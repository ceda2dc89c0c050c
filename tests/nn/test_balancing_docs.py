"""docs/balancing.md: its Python runs and levels the experts, its settings are the settings there are, its commands are understood."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import torch

from atoll.compare import plan, words
from atoll.config import BALANCE_DEFAULTS, BalanceConfig

TEXT = (Path(__file__).parents[2] / "docs" / "balancing.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.M | re.S)


def test_the_block_in_a_plain_model_runs_and_levels(capsys):
    (block,) = blocks("python")
    names: dict = {}
    exec(compile(block, "docs/balancing.md", "exec"), names)
    assert "MaxVio a layer" in capsys.readouterr().out
    assert names["loss"] < 3
    biases = [b for n, b in names["state"]["model"].items() if n.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert all((b != 0).any() and abs(float(b.mean())) < 1e-6 for b in biases)
    assert names["state"]["balancer"] == {}
    assert names["load"]["mean_load"] == [2 * 8 * 167 * 4 / 64] * 2
    again = names["Balancer"](names["model"])
    again.load_state(names["state"]["balancer"])
    assert not any(isinstance(m, torch.nn.Linear) and m.weight.isnan().any() for m in names["model"].modules())


def test_every_kind_and_setting_is_in_the_table():
    kinds = typing.get_args(typing.get_type_hints(BalanceConfig)["kind"])
    assert re.findall(r"^\| `(\w+)` \|", TEXT.split("## ")[0], re.M) == list(kinds)
    for field in dataclasses.fields(BalanceConfig):
        assert field.name in TEXT, field.name
    for name, value in BALANCE_DEFAULTS.items():
        assert f"`{name}` ({value:g})" in TEXT


def test_the_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text('preset = "tiny"\n')
    (tmp_path / "benchmarks").mkdir()
    source = Path(__file__).parents[2] / "benchmarks" / "balance_cpu.toml"
    (tmp_path / "benchmarks" / "balance_cpu.toml").write_text(source.read_text())
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("atoll compare")]
    assert len(commands) >= 3
    for command in commands:
        asked = words.parse(command.split()[2:])
        asked.steps = asked.steps or "5"
        asked.train.minutes = None
        assert len(plan.prepare(asked).cells) == asked.seeds * len(plan.prepare(asked).labels)
