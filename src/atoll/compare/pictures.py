"""Plots of a comparison: one colour a value, the mean over seeds as a line, the range from the lowest to the highest seed as a band."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.compare.plan import Plan
from atoll.compare.result import column, seconds
from atoll.report.look import DARK, LIGHT, Look, end_labels, plain_log, thousands
from atoll.report.plots import _DPI, render
from atoll.report.run import Run, number
from atoll.report.series import median, smooth, thin, window

Runs = dict[tuple[str, int], Run]
PURPLE, BROWN, TEAL = ("#7a4fa3", "#b594dd"), ("#8a6a2b", "#d1ac62"), ("#2f8f9d", "#6cc6d4")  # beside the look's own hues


def colours(look: Look) -> list[str]:
    """Eight hues of a theme."""
    extra = [pair[look.paper != LIGHT.paper] for pair in (PURPLE, BROWN, TEAL)]
    return [look.blue, look.orange, look.green, *extra, look.red, look.muted]


def style_of(plan: Plan, label: str, look: Look) -> dict[str, Any]:
    """Colour and dashes of a value, the same in every plot."""
    hues, place = colours(look), plan.labels.index(label)
    return {"color": hues[place % len(hues)], "linestyle": ("-", (0, (4, 2)), (0, (1, 1.5)))[place // len(hues) % 3]}


@dataclass(frozen=True)
class Picture:
    """One plot: `draw(figure, plan, runs, look)` when `available(runs)`."""

    name: str
    title: str
    draw: Callable[[Any, Plan, Runs, Look], None]
    available: Callable[[Runs], bool]
    healthy: str
    missing: str = ""
    height: float = 4.2


def of(runs: Runs, label: str) -> list[Run]:
    """The runs of a value, by seed."""
    return [run for (name, _), run in sorted(runs.items(), key=lambda pair: pair[0][1]) if name == label]


def has(name: str) -> Callable[[Runs], bool]:
    return lambda runs: any(bool(np.isfinite(column(run, name)).any()) for run in runs.values())


def tokens(run: Run) -> np.ndarray:
    """Tokens seen up to each step."""
    return np.cumsum([run.tokens_in(line) for line in run.steps]).astype(float)


def level(values: np.ndarray, method: Any = smooth) -> np.ndarray:
    """A curve smoothed over a thirtieth of its length, short ones left as they are."""
    return values if len(values) <= 30 else method(values, window(len(values)), keep_start=True)


def band(axes: Any, x: np.ndarray, curves: list[np.ndarray], style: dict[str, Any]) -> float:
    """Mean line and range of several curves over one x; the last mean."""
    table = np.stack(curves)
    known = np.isfinite(table).any(0)
    x, table = x[known], table[:, known]
    if not len(x):
        return float("nan")
    mean = np.nanmean(table, 0)
    axes.plot(*thin(x, mean), **style)
    if len(table) > 1:
        axes.fill_between(x, np.nanmin(table, 0), np.nanmax(table, 0), color=style["color"], alpha=0.16, linewidth=0)
    return float(mean[-1])


def _frame(axes: Any, title: str, below: str, beside: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(below)
    axes.set_ylabel(beside)


def _names(axes: Any, plan: Plan, ends: list[tuple[str, float]], look: Look, form: str = ".3f") -> None:
    known = [(label, value) for label, value in ends if np.isfinite(value)]
    end_labels(axes, [(value, f"{label} {value:{form}}", style_of(plan, label, look)["color"]) for label, value in known])


def _zoom(axes: Any, curves: list[np.ndarray]) -> None:
    """Vertical limits that hold the curves but for the steep first eighth."""
    late = np.concatenate([c[len(c) // 8 :] for c in curves])
    late = late[np.isfinite(late)]
    if len(late):
        air = max(0.06 * (late.max() - late.min()), 1e-3)
        axes.set_ylim(late.min() - air, late.max() + air)


# ---------------------------------------------------------------- each plot


def loss_tokens(figure: Any, plan: Plan, runs: Runs, look: Look) -> None:
    axes = figure.subplots()
    _frame(axes, "Training loss over tokens", "million tokens", "nats per token")
    ends, every = [], []
    for label in plan.labels:
        if mine := of(runs, label):
            curves = [level(column(run, "loss")) for run in mine]
            every += curves
            ends.append((label, band(axes, tokens(mine[0]) / 1e6, curves, style_of(plan, label, look))))
    _zoom(axes, every)
    _names(axes, plan, ends, look)


def loss_time(figure: Any, plan: Plan, runs: Runs, look: Look) -> None:
    axes = figure.subplots()
    _frame(axes, "Training loss over time", "minutes of training steps, median speed of the value", "nats per token")
    ends, every = [], []
    for label in plan.labels:
        if mine := of(runs, label):
            pace = np.nanmedian(np.concatenate([seconds(run) / _tokens_each(run) for run in mine]))
            curves = [level(column(run, "loss")) for run in mine]
            every += curves
            ends.append((label, band(axes, tokens(mine[0]) * pace / 60, curves, style_of(plan, label, look))))
    _zoom(axes, every)
    _names(axes, plan, ends, look)


def _tokens_each(run: Run) -> np.ndarray:
    return np.array([run.tokens_in(line) for line in run.steps], float)


def difference(figure: Any, plan: Plan, runs: Runs, look: Look) -> None:
    """Loss less that of the first value with the same seed: the same samples at every step, so most of the noise cancels."""
    axes = figure.subplots()
    first = plan.labels[0]
    _frame(axes, f"Training loss less that of {first}, same seed and samples", "million tokens", "nats per token")
    axes.axhline(0, color=style_of(plan, first, look)["color"], linewidth=1.2)
    ends, every = [], []
    for label in plan.labels[1:]:
        seeds = [seed for (name, seed) in runs if name == label and (first, seed) in runs]
        curves = [level(_minus(runs[label, seed], runs[first, seed])) for seed in sorted(seeds)]
        if curves:
            every += curves
            ends.append((label, band(axes, tokens(runs[label, seeds[0]])[: len(curves[0])] / 1e6, curves, style_of(plan, label, look))))
    _zoom(axes, every)
    _names(axes, plan, ends, look, "+.3f")


def _minus(run: Run, other: Run) -> np.ndarray:
    a, b = column(run, "loss"), column(other, "loss")
    return a[: len(b)] - b[: len(a)]


def heldout(figure: Any, plan: Plan, runs: Runs, look: Look) -> None:
    """A dot a seed, a bar at the mean."""
    axes = figure.subplots()
    _frame(axes, "Held-out bits per byte at the end", "bits per byte of held-out text; left is better", "")
    _dots(axes, plan, {label: [_last(run) for run in of(runs, label)] for label in plan.labels}, look)


def _last(run: Run) -> float:
    return number(run.validations[-1].get("bits_per_byte")) if run.validations else float("nan")


def step_time(figure: Any, plan: Plan, runs: Runs, look: Look) -> None:
    axes = figure.subplots()
    _frame(axes, "Seconds of a step", "seconds, median of each run", "")
    _dots(axes, plan, {label: [float(np.nanmedian(seconds(run))) for run in of(runs, label)] for label in plan.labels}, look)
    axes.set_xlim(0, None)


def _dots(axes: Any, plan: Plan, values: dict[str, list[float]], look: Look) -> None:
    axes.grid(True, axis="x")
    for row, label in enumerate(reversed(plan.labels)):
        colour = style_of(plan, label, look)["color"]
        known = [v for v in values[label] if np.isfinite(v)]
        axes.plot(known, [row] * len(known), "o", color=colour, markersize=6, alpha=0.75, markeredgewidth=0)
        if known:
            axes.plot([np.mean(known)] * 2, [row - 0.28, row + 0.28], color=colour, linewidth=2.4)
    axes.set_yticks(range(len(plan.labels)), list(reversed(plan.labels)))
    axes.set_ylim(-0.6, len(plan.labels) - 0.4)


def over_steps(name: str, title: str, beside: str, log: bool = False) -> Callable[[Any, Plan, Runs, Look], None]:
    """A function that draws a metric over steps, running medians."""

    def draw(figure: Any, plan: Plan, runs: Runs, look: Look) -> None:
        axes = figure.subplots()
        _frame(axes, title, "optimizer step", beside)
        ends = []
        for label in plan.labels:
            mine = [run for run in of(runs, label) if np.isfinite(column(run, name)).any()]
            if mine:
                x = np.array([line["step"] for line in mine[0].steps], float)
                ends.append((label, band(axes, x, [level(column(run, name), median) for run in mine], style_of(plan, label, look))))
        if log:
            axes.set_yscale("log")
            axes.set_ylim(*(limit * factor for limit, factor in zip(axes.get_ylim(), (0.9, 1.1), strict=True)))
            plain_log(axes.yaxis, 8)
        else:
            axes.set_ylim(0, None)
        thousands(axes.xaxis)
        _names(axes, plan, ends, look, ".2g")

    return draw


PICTURES = (
    Picture("loss_tokens", "Training loss over tokens", loss_tokens, has("loss"), "Lines whose bands overlap are not told apart."),
    Picture("difference", "Difference to the first value", difference,
            lambda runs: len({label for label, _ in runs}) > 1, "A band on one side of zero means that every seed agrees."),
    Picture("heldout", "Held-out bits per byte", heldout, lambda runs: any(np.isfinite(_last(run)) for run in runs.values()),
            "A dot a seed, the bar their mean: a difference smaller than the spread of the dots is noise.", height=3.4),
    Picture("max_vio", "MaxVio", over_steps("max_vio", "MaxVio of the worst layer", "busiest over mean, less 1", log=True), has("max_vio"),
            "A level rule falls to what chance gives within a few steps and stays there."),
    Picture("dead", "Dead experts", over_steps("dead_share", "Experts without a token in a step", "share of experts"), has("dead_share"),
            "Zero: an expert without tokens learns nothing."),
    Picture("dropped", "Dropped choices", over_steps("dropped_share", "Choices dropped over capacity", "share of choices"),
            has("dropped_share"), "Zero: what is dropped is computed by the shared experts alone."),
    Picture("loss_time", "Training loss over time", loss_time, has("tokens_per_second"),
            "As over tokens, stretched by what a step of the value costs on this machine."),
    Picture("step_time", "Step time", step_time, has("tokens_per_second"),
            "Only on an otherwise idle machine does a difference mean anything.", height=3.2),
)  # fmt: skip


def draw_all(plan: Plan, runs: Runs) -> dict[str, tuple[bytes, bytes]]:
    """Every plot that the runs allow, by name, as PNG bytes: (light, dark)."""
    found = {}
    for p in PICTURES:
        if p.available(runs):
            found[p.name] = tuple(render(lambda f, p=p, k=k: p.draw(f, plan, runs, k), k, (9, p.height), 10.5, _DPI) for k in (LIGHT, DARK))
    return found
