"""A run folder, read: settings, the lines of metrics.jsonl sorted by kind, and the probes. Tolerant of a run that was cut short."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from atoll.config import Config, UserError, load_config

Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run left behind. `steps` ascend; a step written twice (before a crash and after the resume) counts once, as last written."""

    folder: Path
    config: Config
    start: Line  # hardware, threads, versions; empty when the run did not say
    steps: list[Line]
    validations: list[Line]
    samples: list[Line]
    final: Line | None
    probes: list[tuple[int, Line]]  # (step, mechanisms as recorded)
    pictures: list[Line]  # held-out pictures: png in base64, kind, truth, said
    damaged: int  # lines or probes that were not JSON

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def has_experts(self) -> bool:
        """Whether any layer routes."""
        return self.config.model.first_k_dense_replace < self.config.model.num_hidden_layers

    @cached_property
    def stages(self) -> list[tuple[str, slice]]:
        """Stages met, in order: (name, which of `steps`)."""
        names = [self.stage_name(line) for line in self.steps]
        starts = [i for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
        return [(names[a], slice(a, b)) for a, b in zip(starts, [*starts[1:], len(names)], strict=True)]

    def stage_name(self, line: Line) -> str:
        """The line's stage by name, whether it was written as a name or an index."""
        stage = line.get("stage", 0)
        if isinstance(stage, int):
            return self.config.stages[stage].name if 0 <= stage < len(self.config.stages) else str(stage)
        return str(stage)

    def tokens_in(self, line: Line) -> int:
        """Tokens the line's step trained on: as written, or by its stage's shape."""
        if isinstance(written := line.get("tokens"), int):
            return written
        shapes = {s.name: s.length * s.batch for s in self.config.stages}
        return shapes.get(self.stage_name(line), 0)


def read(folder: str | Path) -> Run:
    """Read the run in `folder`. Raises `UserError` when it is none, or has no step to show."""
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        raise UserError(f"run = {str(folder)!r}: no config.toml there; give the folder that `atoll train` wrote")
    lines, damaged = _read_lines(folder / "metrics.jsonl")
    config = load_config(str((folder / "config.toml").resolve()))
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        kinds.setdefault(str(line.get("kind", "step")), []).append(line)
    steps = {line["step"]: line for line in kinds.get("step", []) if isinstance(line.get("step"), int)}
    if not steps:
        raise UserError(f"run = {str(folder)!r}: metrics.jsonl has no step yet; wait for the first one and report again")
    probes, lost = _read_probes(folder / "probes")
    return Run(
        folder=folder,
        config=config,
        start={k: v for line in [*kinds.get("run", []), *kinds.get("start", [])] for k, v in line.items()},
        steps=[steps[s] for s in sorted(steps)],
        validations=_by_step(kinds.get("validation", [])),
        samples=_by_step(kinds.get("sample", [])),
        final=(kinds.get("final") or [None])[-1],
        probes=probes,
        pictures=_read_pictures(folder / "pictures.json"),
        damaged=damaged + lost,
    )


def number(value: Any) -> float:
    """`value` as a float; NaN for what is none. A list (one entry a layer) gives its largest."""
    if isinstance(value, list):
        return max((number(v) for v in value), default=float("nan"))
    return float(value) if isinstance(value, (int, float)) else float("nan")


def total(value: Any) -> float:
    """As `number`, but a list gives its sum."""
    return sum(number(v) for v in value) if isinstance(value, list) else number(value)


def _by_step(lines: list[Line]) -> list[Line]:
    """One line a step, the last written, ascending."""
    found = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    return [found[s] for s in sorted(found)]


def _read_lines(path: Path) -> tuple[list[Line], int]:
    if not path.is_file():
        raise UserError(f"run = {str(path.parent)!r}: no metrics.jsonl there; the run has not reached its first step")
    lines, damaged = [], 0
    for raw in path.read_bytes().splitlines():
        if not raw.strip():
            continue
        line = _parse(raw)
        if line is None:
            damaged += 1
        else:
            lines.append(line)
    return lines, damaged


def _read_pictures(path: Path) -> list[Line]:
    """The pictures that an evaluation left; none where there is no such file, or a damaged one."""
    found = _parse(path.read_bytes()) if path.is_file() else None
    pictures = found.get("pictures") if found else None
    kept = [p for p in pictures if isinstance(p, dict)] if isinstance(pictures, list) else []
    return [p for p in kept if isinstance(p.get("png"), str) and re.fullmatch(r"[A-Za-z0-9+/=]+", p["png"])]


def _parse(raw: bytes) -> Line | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_probes(folder: Path) -> tuple[list[tuple[int, Line]], int]:
    found, damaged = [], 0
    for path in folder.glob("step-*.json"):
        step, probe = path.stem.removeprefix("step-"), _parse(path.read_bytes())
        if probe is None or not step.isdigit():
            damaged += 1
        else:
            found.append((int(step), probe))
    return sorted(found, key=lambda pair: pair[0]), damaged
