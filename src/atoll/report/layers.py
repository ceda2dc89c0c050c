"""Load of the experts layer by layer over training steps, and what a rule with a price of its own says: tokens dropped, auxiliary loss."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from atoll.report.curves import base, column
from atoll.report.look import Look, diverging, end_labels, thousands
from atoll.report.run import Run, number
from atoll.report.series import thin

COLUMNS = 400  # of a map over steps; the steps of a column are averaged
EXTRAS = (("dropped_share", "choices dropped"), ("balance_loss", "auxiliary loss,\nall layers"))


def load_map(run: Run) -> np.ndarray:
    """[steps, layers, 5]: load over the layer's mean of the idlest expert, at 10, 50 and 90 per cent, of the busiest; NaN where missing."""
    rows = [line.get("load_map") or [] for line in run.steps]
    layers = max((len(row) for row in rows), default=0)
    table = np.full((len(rows), layers, 5), np.nan)
    for i, row in enumerate(rows):
        for j, layer in enumerate(row):
            if isinstance(layer, list) and len(layer) == 5:
                table[i, j] = [number(value) for value in layer]
    return table


def has_load_map(run: Run) -> bool:
    """Whether any step said the load of its layers."""
    return bool(np.isfinite(load_map(run)).any())


def by_columns(values: np.ndarray, most: int = COLUMNS) -> np.ndarray:
    """[steps, layers] as [layers, at most `most`]: means over equal runs of steps."""
    edges = np.linspace(0, len(values), min(len(values), most) + 1).astype(int)
    with np.errstate(invalid="ignore"):
        parts = [values[a:b] for a, b in pairwise(edges)]
        return np.stack([np.where(np.isfinite(p).any(0), np.nansum(p, 0) / np.isfinite(p).sum(0).clip(1), np.nan) for p in parts], 1)


def layer_load(figure: Any, run: Run, look: Look) -> None:
    """A row a layer, steps across: load of the busiest expert over the mean, and of a quiet one (nine tenths get more)."""
    from matplotlib.colors import LogNorm

    table = load_map(run)
    first, last = run.steps[0]["step"], run.steps[-1]["step"]
    shown = ((4, "Busiest expert of each layer"), (1, "Quiet expert of each layer: nine tenths get more"))
    panels = figure.subplots(2, 1, sharex=True)
    image = None
    for axes, (place, title) in zip(panels, shown, strict=True):
        axes.set_title(title, pad=8)
        axes.grid(False)
        image = axes.imshow(
            np.maximum(by_columns(table[:, :, place]), 1e-3),
            aspect="auto",
            interpolation="nearest",
            cmap=diverging(look).with_extremes(bad=look.paper),
            norm=LogNorm(0.25, 4),
            extent=(first - 0.5, last + 0.5, table.shape[1] - 0.5, -0.5),
        )
        axes.set_ylabel("layer")
        _layer_names(axes, run, table.shape[1])
    panels[-1].set_xlabel("optimizer step")
    thousands(panels[-1].xaxis)
    bar = figure.colorbar(image, ax=list(panels), location="bottom", aspect=50, shrink=0.6, pad=0.03, ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_xticklabels(["≤¼", "½", "level", "2", "≥4"])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    bar.set_label("load over the layer's mean, in training")


def _layer_names(axes: Any, run: Run, count: int) -> None:
    names = [i for i in range(run.config.model.num_hidden_layers) if not run.config.model.is_dense(i)]
    ticks = sorted({round(i) for i in np.linspace(0, count - 1, min(count, 8))})
    axes.set_yticks(ticks, [str(names[t] if count == len(names) else t) for t in ticks])


def height(run: Run) -> float:
    """Inches of `layer_load`."""
    return 2.6 + min(3.4, 0.3 * load_map(run).shape[1])


# ---------------------------------------------------------------- what a rule pays


def extras(run: Run) -> list[tuple[str, str]]:
    """The metrics, and their labels, that the run's rule has and others have not."""
    return [(name, label) for name, label in EXTRAS if any(np.isfinite(number(line.get(name))) for line in run.steps)]


def draw_extra(axes: Any, run: Run, look: Look, name: str, label: str) -> None:
    """One of `extras` over steps."""
    steps, values = column(run, name)
    axes.plot(*thin(steps, values), color=look.green, linewidth=1.3)
    axes.set_ylabel(label)
    known = values[np.isfinite(values)]
    axes.set_ylim(0, 1.15 * max(float(known.max()), 1e-9))
    base(axes, run, look)
    for text in list(axes.texts):
        text.remove()
    end_labels(axes, [(float(known[-1]), f"{known[-1]:.2g}", look.green)])
