"""Which runs a comparison consists of: their settings, seeds, folders and number of steps, frozen once in plan.json."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.arguments import start_config
from atoll.compare.words import CompareArguments, Vary
from atoll.config import Config, UserError, override, to_toml
from atoll.train import checkpoint
from atoll.train.screen import Screen

PLAN = "plan.json"
QUIET = {"evaluate": False, "report": False, "export": False, "keep": 1}  # of every run, unless the command says otherwise


@dataclass(frozen=True)
class Cell:
    """One run."""

    label: str  # the value, or the values of several settings
    seed: int
    config: Config
    folder: Path

    @property
    def steps(self) -> int:
        assert self.config.train.steps is not None
        return self.config.train.steps


@dataclass(frozen=True)
class Plan:
    """A comparison. Cells are in the order of training: all values of a seed, then the next seed."""

    name: str
    out: Path
    vary: list[Vary]
    seeds: int
    base: Config
    cells: list[Cell]

    @property
    def labels(self) -> list[str]:
        """The values, in the order given."""
        return list(dict.fromkeys(cell.label for cell in self.cells))

    @property
    def steps(self) -> int:
        return self.cells[0].steps


def prepare(asked: CompareArguments) -> Plan:
    """The plan that the words ask for, its steps frozen. Raises `UserError` for settings that cannot be, before anything is written."""
    name = str(asked.train.config)
    overrides: dict[str, Any] = {**{f"train.{k}": v for k, v in QUIET.items()}, **asked.train.overrides}
    if asked.steps is not None:
        overrides["train.steps"] = asked.steps
    elif asked.train.minutes is not None:
        overrides |= {"train.minutes": asked.train.minutes, "train.steps": "none", "train.epochs": "none"}
    base = start_config(name, overrides)
    shape = next((v.key for v in asked.vary if v.key.startswith("model.")), None)
    if shape is not None and base.train.init is not None:
        raise UserError(f"--vary {shape}: does not go with {name!r}, whose weights have their shapes; vary another setting")
    stem = re.sub(r"\W+", "-", "-".join([Path(name).stem, *(v.key.rsplit(".", 1)[-1] if "." in v.key else v.key for v in asked.vary)]))
    out = Path(asked.train.out).expanduser() if asked.train.out else Path("runs") / f"compare-{stem}"
    plan = Plan(name, out, asked.vary, asked.seeds, base, _cells(asked.vary, asked.seeds, base, out))
    steps = _frozen_steps(plan, asked.steps is not None)
    if steps is None:
        steps = base.train.steps or _measure(plan, asked.train.minutes)
        _freeze(plan, steps)
    train = dataclasses.replace(base.train, steps=steps)
    base = dataclasses.replace(base, train=train)
    return dataclasses.replace(plan, base=base, cells=_cells(asked.vary, asked.seeds, base, out))


def _cells(vary: list[Vary], seeds: int, base: Config, out: Path) -> list[Cell]:
    """Every value with every seed, each validated."""
    cells, folders = [], set()
    for seed in range(seeds):
        for values in itertools.product(*(v.values for v in vary)):
            changes = {v.key: value for v, value in zip(vary, values, strict=True)}
            config = override(base, changes)
            config = override(config, {"data.seed": base.data.seed + seed, "train.seed": base.train.seed + seed})
            label = values[0] if len(vary) == 1 else ", ".join(f"{v.key.rsplit('.', 1)[-1]} {x}" for v, x in zip(vary, values, strict=True))
            folder = out / "runs" / f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', label)}-seed{seed}"
            if folder in folders:
                raise UserError(f"--vary: two values would share the folder {folder}; give values that differ in letters or digits")
            folders.add(folder)
            cells.append(Cell(label, seed, config, folder))
    return cells


# ---------------------------------------------------------------- steps, frozen


def _identity(plan: Plan) -> dict[str, Any]:
    """What must be the same for runs to be compared: every setting but those that are varied, the steps, and the seeds."""
    train = dataclasses.replace(plan.base.train, steps=1, minutes=None, epochs=None, threads=None)
    return {"config": to_toml(dataclasses.replace(plan.base, train=train)), "vary": [v.key for v in plan.vary]}


def _frozen_steps(plan: Plan, steps_given: bool) -> int | None:
    """The steps that an earlier start of this comparison froze; None when there was none. Raises `UserError` when it was another one."""
    path = plan.out / PLAN
    if not path.is_file():
        if plan.out.exists() and any(not p.name.startswith(".") for p in plan.out.iterdir()):
            raise UserError(f"out = {str(plan.out)!r}: is not empty and holds no comparison; give another folder")
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        steps, identity = int(kept["steps"]), {k: kept[k] for k in ("config", "vary")}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: cannot be read; give another folder") from None
    if identity != _identity(plan) or (steps_given and plan.base.train.steps != steps):
        what = f"--steps {plan.base.train.steps}" if identity == _identity(plan) else "other settings or another --vary"
        raise UserError(f"out = {str(plan.out)!r}: holds a comparison of {steps} steps, and {what} would not fit it; give another folder")
    return steps


def _freeze(plan: Plan, steps: int) -> None:
    plan.out.mkdir(parents=True, exist_ok=True)
    checkpoint.write_whole(plan.out / PLAN, json.dumps({"steps": steps, **_identity(plan)}, indent=1) + "\n")


def _measure(plan: Plan, minutes: str | None) -> int:
    """Steps for every run that fill the time: the fewest of what each value, timed on this machine, has time for."""
    from atoll.data import open_corpus
    from atoll.train import budget, setup

    begun, count = time.monotonic(), len(plan.cells)
    whole = None if minutes is None else float(minutes)
    share = plan.base.train.minutes if whole is None else whole / count
    found = []
    for cell in plan.cells[: count // plan.seeds]:
        config = override(cell.config, {"train.minutes": share}) if share is not None else cell.config
        with setup.settled(config.train):
            corpus = open_corpus(config.data, config.model, lambda _: None)
            try:
                frozen = budget.freeze(config, corpus, plan.out, _Silent(), time.monotonic())
            except UserError as error:
                with contextlib.suppress(OSError):
                    plan.out.rmdir()  # a mistake leaves nothing behind
                if whole is None:
                    raise
                raise UserError(f"--minutes {whole:g}: {share:.2g} for each of {count} runs is too little ({error})") from None
        assert frozen.train.steps is not None
        found.append(frozen.train.steps)
    spent = 0.0 if whole is None else (time.monotonic() - begun) / (60 * whole)
    return max(1, int(min(found) * (1 - min(spent, 0.9))))


class _Silent(Screen):
    def say(self, text: str) -> None:
        """Nothing: timing is no run."""
