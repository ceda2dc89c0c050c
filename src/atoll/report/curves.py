"""Curves over training steps: loss, bits per byte, gradient norm, learning rate, speed. Each function draws one panel into a figure."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.report.look import Look, end_labels, plain_log, thousands
from atoll.report.run import Run, number
from atoll.report.series import median, smooth, smooth_pieces, thin


def column(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a metric over all steps; NaN where it is missing. A list (one a layer) counts as its largest."""
    return np.array([line["step"] for line in run.steps], float), np.array([number(line.get(name)) for line in run.steps])


def curve(axes: Any, run: Run, steps: np.ndarray, values: np.ndarray, colour: str, raw: bool = True, method: Any = smooth) -> np.ndarray:
    """A metric as it was (faint) and smoothed within each stage (strong). Returns the smoothed values."""
    if len(steps) <= 60:
        axes.plot(steps, values, color=colour, marker="o", markersize=3.5)
        return values
    pieces = [piece for _, piece in run.stages]
    level = smooth_pieces(values, pieces, method)
    if raw:
        axes.plot(*thin(steps, values), color=colour, alpha=0.28 if len(steps) < 2000 else 0.18, linewidth=0.7)
    for piece in pieces:
        axes.plot(*thin(steps[piece], level[piece]), color=colour)
    return level


def base(axes: Any, run: Run, look: Look) -> None:
    """Steps along the bottom, stage boundaries as thin lines with the stage's name at the top."""
    first, last = run.steps[0]["step"], run.steps[-1]["step"]
    margin = (last - first) * 0.01 + (1 if last == first else 0.2)
    axes.set_xlim(first - margin, last + margin)
    thousands(axes.xaxis)
    axes.set_xlabel("optimizer step")
    if len(run.stages) < 2:
        return
    for i, (name, piece) in enumerate(run.stages):
        start, share = run.steps[piece.start]["step"], (piece.stop - piece.start) / len(run.steps)
        if i:
            axes.axvline(start, color=look.muted, linewidth=0.8, linestyle=(0, (2, 2)))
        label = f"stage {name}" if share > 0.15 else name
        if share * 60 > len(label) and not (look.compact and share < 0.1):
            at = axes.get_xaxis_transform()
            axes.annotate(label, (start, 1), xycoords=at, xytext=(0, 3), textcoords="offset points", color=look.muted, fontsize="small")


def bounds(values: np.ndarray, extra: list[float] | None = None) -> tuple[float, float]:
    """Vertical limits that hold all of `values` but, in a long run, the steep first few; and every `extra`, with a little air."""
    known, others = values[np.isfinite(values)], np.asarray(extra or [], float)
    others = others[np.isfinite(others)]
    if not len(known) + len(others):
        return 0.0, 1.0
    settled = known[known <= np.quantile(known, 0.97)] if len(known) > 60 else known
    low, high = float(np.min(np.concatenate([known, others]))), float(np.max(np.concatenate([settled, others])))
    air = max((high - low) * 0.08, 0.02 * abs(high), 1e-6)
    return low - air, high + 2 * air


def loss(figure: Any, run: Run, look: Look) -> None:
    """Training loss, raw and smoothed."""
    axes = figure.subplots()
    axes.set_title("Training loss")
    axes.set_ylabel("nats per token")
    steps, values = column(run, "loss")
    level = curve(axes, run, steps, values, look.blue)
    axes.set_ylim(*bounds(level))
    base(axes, run, look)
    known = level[np.isfinite(level)]
    if len(known):
        end_labels(axes, [(float(known[-1]), f"{known[-1]:.2f}", look.blue)])


def bits_per_byte(figure: Any, run: Run, look: Look) -> None:
    """Bits per byte in training and on held-out text, beside what the compressors reach on the same files."""
    axes = figure.subplots()
    axes.set_title("Bits per byte")
    axes.set_ylabel("bits per byte of text")
    steps, values = column(run, "bits_per_byte")
    level = curve(axes, run, steps, values, look.blue, raw=not look.compact)
    held = [(v["step"], number(v.get("bits_per_byte"))) for v in run.validations]
    held = [(s, v) for s, v in held if np.isfinite(v)]
    final = run.final or {}
    everything = "held-out" if look.compact else "held-out, all"
    names = (("bits_per_byte", everything, look.orange), ("gzip", "gzip -9", look.green), ("xz", "xz -9e", look.muted))
    lines = [(number(final.get(key)), name, colour) for key, name, colour in names]
    lines = [(v, n, c) for v, n, c in lines if np.isfinite(v)]
    base(axes, run, look)
    axes.set_ylim(*bounds(level, [v for v, _, _ in lines] + [v for _, v in held[1:] or held]))
    for value, name, colour in lines:
        if name != everything:
            axes.axhline(value, color=colour, linewidth=1.2, linestyle=(0, (5, 3)))
    labels = [(v, f"{n} {v:.2f}", c) for v, n, c in lines]
    if held:
        axes.plot(
            [s for s, _ in held], [v for _, v in held], "o", color=look.orange, markersize=4.5, markeredgecolor=look.paper, clip_on=True
        )
        if not np.isfinite(number(final.get("bits_per_byte"))):
            labels.append((held[-1][1], f"held-out {held[-1][1]:.2f}", look.orange))
    if lines and lines[0][1] == everything:
        axes.plot([steps[-1]], [lines[0][0]], "D", color=look.orange, markersize=6, markeredgecolor=look.paper, zorder=5)
    known = level[np.isfinite(level)]
    if len(known):
        labels.append((float(known[-1]), f"training {known[-1]:.2f}", look.blue))
    end_labels(axes, labels)


def gradient_norm(figure: Any, run: Run, look: Look) -> None:
    """Global gradient norm before clipping, the clip, and the steps that were skipped."""
    axes = figure.subplots()
    axes.set_title("Gradient norm")
    axes.set_ylabel("global norm, before clipping")
    steps, values = column(run, "grad_norm")
    values = np.where(values > 0, values, np.nan)
    skipped = np.array([bool(line.get("skipped")) for line in run.steps])
    level = curve(axes, run, steps, np.where(skipped, np.nan, values), look.blue)
    axes.set_yscale("log")
    known = values[np.isfinite(values)]
    clip = run.config.optim.grad_clip
    labels = [(clip, f"clip {clip:g}", look.muted)]
    axes.axhline(clip, color=look.muted, linewidth=1, linestyle=(0, (5, 3)))
    low, high = (min(known.min(), clip), max(known.max(), clip)) if len(known) else (clip / 10, clip * 10)
    axes.set_ylim(low / 1.5, high * 2)
    plain_log(axes.yaxis, 8)
    if skipped.any():
        heights = np.where(np.isfinite(values), values, high * 1.5)[skipped]  # a norm that was not finite is shown at the top
        axes.plot(steps[skipped], heights, "x", color=look.red, markersize=7, markeredgewidth=2)
        labels.append((float(heights[-1]), f"{skipped.sum()} skipped", look.red))
    finite = level[np.isfinite(level)]
    if len(finite):
        labels.append((float(finite[-1]), f"{finite[-1]:.2g}", look.blue))
    base(axes, run, look)
    end_labels(axes, labels)


def learning_rate(figure: Any, run: Run, look: Look) -> None:
    """Learning rates of the two optimizers, one line where they agree."""
    axes = figure.subplots()
    axes.set_title("Learning rate")
    axes.set_ylabel("learning rate")
    labels = []
    steps, main = column(run, "lr")
    _, adam = column(run, "adam_lr")
    both = np.isfinite(adam).any() and not np.allclose(main, adam, equal_nan=True)
    for values, name, colour in ((main, "Muon", look.blue), (adam, "AdamW", look.orange))[: 2 if both else 1]:
        axes.plot(*thin(steps, values), color=colour)
        known = values[np.isfinite(values)]
        if both and len(known):
            labels.append((float(known[-1]), name, colour))
    axes.set_ylim(0, None)
    base(axes, run, look)
    end_labels(axes, labels)


def throughput(figure: Any, run: Run, look: Look) -> None:
    """Tokens per second of each step."""
    axes = figure.subplots()
    axes.set_title("Speed")
    axes.set_ylabel("tokens per second")
    steps, values = column(run, "tokens_per_second")
    curve(axes, run, steps, values, look.blue, method=median)
    known = values[np.isfinite(values)]
    thousands(axes.yaxis)
    base(axes, run, look)
    if len(known):
        axes.set_ylim(0, 1.25 * float(np.quantile(known, 0.99)))
        end_labels(axes, [(float(np.median(known)), f"median {np.median(known):,.0f}", look.blue)])
