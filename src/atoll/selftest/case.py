"""One check of an op: what it gives, what it should, how far apart they may be, and how long it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Values = dict[str, Tensor]


class Trial(NamedTuple):
    """Inputs held fast: `got` runs the op as users do, forward and backward, `expected` its definition in float64."""

    got: Callable[[], Values]
    expected: Callable[[], Values]
    limits: dict[str, float]  # by the name of a value; "" for all others


class Case(NamedTuple):
    """A trial that can be built on a device; `shape` and `dtype` are for the table."""

    op: str
    shape: str
    dtype: str
    build: Callable[[torch.device], Trial]


def error(got: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of what is expected; infinite where not finite."""
    difference = (got.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt().clamp_min(1e-30)) if difference.isfinite() else float("inf")


def run_case(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """The row of the table: the value nearest to its limit or furthest over it, and the median time of `got`.

    A second run has to give the same bits. What raises is a failure with its message, not the end of the test.
    """
    row: dict[str, Any] = {"op": case.op, "shape": case.shape, "dtype": case.dtype}
    try:
        trial = case.build(device)
        got, again, expected = trial.got(), trial.got(), trial.expected()
        errors = {name: error(got[name], expected[name]) for name in expected}
        limits = {name: trial.limits.get(name, trial.limits.get("", 0.0)) for name in errors}
        worst = max(errors, key=lambda name: errors[name] / limits[name])
        same = all(torch.equal(got[name], again[name]) for name in got)
        shown = errors[worst] if math.isfinite(errors[worst]) else None  # JSON has no infinity
        row |= {"value": worst, "error": shown, "limit": limits[worst], "repeats": same}
        row |= {"ok": same and all(errors[name] <= limits[name] for name in errors), "ms": milliseconds(trial.got, device, repeats)}
    except Exception as problem:  # one kernel that does not build must not hide the others
        row |= {"ok": False, "message": " ".join(f"{type(problem).__name__}: {problem}".split())[:300]}
    return row


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of one run, the launches included."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return round(sorted(times)[len(times) // 2] * 1e3, 3)
