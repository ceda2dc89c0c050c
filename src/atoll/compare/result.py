"""What a comparison found: one dictionary a run, mean and spread over seeds of each value, differences paired by seed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from atoll.compare.plan import Cell, Plan
from atoll.compare.runs import finished
from atoll.report.run import Run, number, read
from atoll.train import checkpoint

RESULT = "compare.json"
# The measures of a run, in the order they are shown, with what each is.
MEASURES = {
    "bits_per_byte": "held-out bits per byte after the last step, on the fixed part of the split that train.validate_tokens says",
    "heldout_loss": "held-out nats per token, on the same tokens",
    "loss": "training loss, nats per token without any auxiliary loss, mean over the last tenth of the steps",
    "max_vio": "MaxVio of the worst layer in training, median over the last half of the steps",
    "max_vio_mean": "MaxVio, mean over layers, median over the last half of the steps",
    "dead_share": "experts without a token in a step, mean over layers and the last half of the steps",
    "dropped_share": "choices dropped over capacity, mean over the last half of the steps; none where the rule drops nothing",
    "step_seconds": "seconds of a step, median",
    "seconds": "seconds of all steps together; validation, samples and checkpoints are not in it",
    "skipped": "steps that the guard skipped",
}


def column(run: Run, name: str) -> np.ndarray:
    """A metric over the steps of a run; NaN where it is missing."""
    return np.array([number(line.get(name)) for line in run.steps])


def seconds(run: Run) -> np.ndarray:
    """Seconds of each step."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.array([run.tokens_in(line) for line in run.steps], float) / column(run, "tokens_per_second")


def measure(cell: Cell, run: Run | None = None) -> dict[str, Any]:
    """The measures of a finished run; None for what it does not have."""
    run = run or read(cell.folder)
    tenth, half = max(1, len(run.steps) // 10), max(1, len(run.steps) // 2)
    last = run.validations[-1] if run.validations and run.validations[-1]["step"] == cell.steps else {}
    taken = seconds(run)
    found = {
        "bits_per_byte": number(last.get("bits_per_byte")),
        "heldout_loss": number(last.get("nats_per_token")),
        "loss": _mean(column(run, "loss")[-tenth:]),
        "max_vio": _median(column(run, "max_vio")[-half:]),
        "max_vio_mean": _median(column(run, "max_vio_mean")[-half:]),
        "dead_share": _mean(column(run, "dead_share")[-half:]),
        "dropped_share": _mean(column(run, "dropped_share")[-half:]),
        "step_seconds": _median(taken),
        "seconds": float(taken[np.isfinite(taken)].sum()),
        "skipped": float(sum(bool(line.get("skipped")) for line in run.steps)),
    }
    if not run.has_experts:
        found |= dict.fromkeys(("max_vio", "max_vio_mean", "dead_share", "dropped_share"), math.nan)
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


# ---------------------------------------------------------------- over seeds


def spread(values: list[float | None]) -> dict[str, Any] | None:
    """mean, std (n - 1; None for one seed), min, max, n of the known values; None when there is none."""
    known = np.array([v for v in values if v is not None], float)
    if not len(known):
        return None
    std = float(known.std(ddof=1)) if len(known) > 1 else None
    return {"mean": float(known.mean()), "std": std, "min": float(known.min()), "max": float(known.max()), "n": len(known)}


def gather(plan: Plan) -> tuple[dict[str, Any], dict[tuple[str, int], Run]]:
    """The whole result, and the runs by (value, seed). Runs that failed are named and not measured."""
    runs, rows = {}, []
    for cell in plan.cells:
        note = finished(cell) or {}
        row: dict[str, Any] = {"value": cell.label, "seed": cell.seed, "folder": str(cell.folder.relative_to(plan.out))}
        if "failed" in note:
            row["failed"] = note["failed"]
        elif note:
            runs[cell.label, cell.seed] = read(cell.folder)
            row |= measure(cell, runs[cell.label, cell.seed])
        rows.append(row)
    first = plan.labels[0]
    values = []
    for label in plan.labels:
        mine = [row for row in rows if row["value"] == label]
        values.append(
            {
                "value": label,
                "failed": sum("failed" in row for row in mine),
                **{name: spread([row.get(name) for row in mine]) for name in MEASURES},
                "difference": spread(_paired(rows, label, first, "bits_per_byte")) if label != first else None,
            }
        )
    start = next(iter(runs.values())).start if runs else {}
    about = {name: start[name] for name in ("parameters", "device", "cpus", "threads", "torch", "python") if name in start}
    tokens = max((sum(run.tokens_in(line) for line in run.steps) for run in runs.values()), default=0)
    head = {"config": plan.name, "vary": {v.key: list(v.values) for v in plan.vary}, "seeds": plan.seeds, "steps": plan.steps}
    return {**head, "tokens": tokens, "machine": about, "measures": MEASURES, "values": values, "runs": rows}, runs


def _paired(rows: list[dict[str, Any]], label: str, first: str, name: str) -> list[float | None]:
    """A measure less that of the first value at the same seed: what the seeds share cancels."""
    base = {row["seed"]: row.get(name) for row in rows if row["value"] == first}
    pairs = [(row.get(name), base.get(row["seed"])) for row in rows if row["value"] == label]
    return [a - b if a is not None and b is not None else None for a, b in pairs]


def write(plan: Plan) -> dict[str, Any]:
    """Write compare.json, plots/*.png and compare.html; returns the result."""
    from atoll.compare import page, pictures
    from atoll.report.plots import write_aside

    result, runs = gather(plan)
    checkpoint.write_whole(plan.out / RESULT, json.dumps(result, indent=1) + "\n")
    if runs:
        drawn = pictures.draw_all(plan, runs)
        for name, (light, _) in drawn.items():
            write_aside(plan.out / "plots" / f"{name}.png", light)
        write_aside(plan.out / "compare.html", page.page(plan, result, drawn).encode())
    return result


# ---------------------------------------------------------------- for a person

SHOWN = (
    ("bits_per_byte", "bits/byte", ".4f"),
    ("loss", "loss", ".4f"),
    ("max_vio", "MaxVio", ".2f"),
    ("dead_share", "dead", ".2%"),
    ("dropped_share", "dropped", ".2%"),
    ("step_seconds", "s/step", ".3f"),
)


def with_spread(found: dict[str, Any] | None, form: str) -> str:
    """`1.7031 ± 0.0042`; `-` for what there is not."""
    if found is None:
        return "-"
    std = "" if found["std"] is None else f" ± {found['std']:{form}}"
    return f"{found['mean']:{form}}{std}"


def table_rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the summary: a row a value, mean ± standard deviation over seeds; measures nobody has are left out."""
    shown = [s for s in SHOWN if any(v[s[0]] is not None for v in result["values"])]
    head = ["value", *(title for _, title, _ in shown)]
    paired = any(v["difference"] is not None for v in result["values"])
    rows = []
    for v in result["values"]:
        failed = f" ({v['failed']} failed)" if v["failed"] else ""
        difference = ["" if v["difference"] is None else with_spread(v["difference"], "+.4f").replace("± +", "± ")] if paired else []
        rows.append([v["value"] + failed, *(with_spread(v[name], form) for name, _, form in shown), *difference])
    return head + (["less first, by seed"] if paired else []), rows


def render(result: dict[str, Any], out: Path) -> str:
    """The summary as text."""
    head, rows = table_rows(result)
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
             for row in [head, *rows]]  # fmt: skip
    seeds = f"mean ± standard deviation over {result['seeds']} seeds" if result["seeds"] > 1 else "one seed: no spread is known"
    return "\n".join(["", *lines, f"{seeds}; report: {out / 'compare.html'}"])
