"""The list of plots: how each is drawn, whether a run has what it needs, and what a healthy picture looks like."""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config import UserError
from atoll.report import curves, layers, mechanisms
from atoll.report.look import DARK, LIGHT, Look
from atoll.report.run import Run, number

_DPI = 160  # a plot's 9 inches make 1440 dots, sharp at a README's 900

_LEFT, _RIGHT = 1.1, 1.35  # inches kept for labels beside a plot


def _has(name: str) -> Callable[[Run], bool]:
    return lambda run: any(np.isfinite(number(line.get(name))) for line in run.steps)


def _probed(found: Callable[[dict[str, Any]], Any]) -> Callable[[Run], bool]:
    return lambda run: any(found(probe) for _, probe in run.probes)


@dataclass(frozen=True)
class Plot:
    """One picture: `draw(figure, run, look)` fills a figure of 9 by `height(run)` inches when `available(run)`."""

    name: str
    title: str
    draw: Callable[[Any, Run, Look], None]
    available: Callable[[Run], bool]
    missing: str  # said in place of the picture
    healthy: str  # what a good picture looks like, one sentence
    height: Callable[[Run], float] = lambda run: 3.9


def _load_height(run: Run) -> float:
    layers = max((len(mechanisms.loads(probe)) for _, probe in run.probes), default=1)
    panels = min(2, sum(bool(mechanisms.loads(probe)) for _, probe in run.probes))
    return 1.2 + panels * (0.8 + min(3.2, 0.26 * max(layers, 3)))


def _depth_height(run: Run) -> float:
    rows = max((len(mechanisms.mixes(probe)) for _, probe in run.probes), default=1)
    return 1.5 + min(8.0, max(2.4, 0.3 * rows))


def _decay_height(run: Run) -> float:
    layers = max((len(mechanisms.half_lives(probe)) for _, probe in run.probes), default=1)
    return 1.4 + 0.55 * (min(layers, 16) + 1)


LEARNING = (
    Plot("bits_per_byte", "Bits per byte", curves.bits_per_byte, _has("bits_per_byte"), "No step has said its bits per byte.",
         "The held-out points follow the training curve closely; a gap that widens is memorising."),
    Plot("loss", "Training loss", curves.loss, _has("loss"), "No step has said its loss.",
         "It falls without jumps and goes on falling, or at least does not rise, where a stage with longer documents begins."),
)  # fmt: skip
MECHANISMS = (
    Plot("expert_load", "Expert load", mechanisms.expert_load, _probed(mechanisms.loads), "No probe of the expert load yet.",
         "Every row keeps the colour of level almost from end to end: colour at the very edges is chance, broad coloured ends are "
         "experts overrun and experts that never learn.", _load_height),
    Plot("balance", "Balance", mechanisms.balance, lambda run: run.has_experts and _has("max_vio")(run), "No step has said its MaxVio.",
         "MaxVio drops within a few steps to within twice the dashed line, which chance alone would give a level router, and no expert "
         "goes without a token.", lambda run: 4.8 + 1.7 * len(layers.extras(run))),
    Plot("layer_load", "Load by layer", layers.layer_load, lambda run: run.has_experts and layers.has_load_map(run),
         "No step has said the load of its layers.",
         "Both maps fade to the colour of level within the first steps and stay there; a row that stays coloured is a layer that the rule "
         "cannot hold, a column is a step whose batch was unlike the others.", layers.height),
    Plot("depth_weights", "Depth attention", mechanisms.depth_weights, _probed(mechanisms.mixes), "No probe of the weights over depth.",
         "Rows start uniform and part: most mixes favour the latest source, while some keep a share for the embedding or an early block.",
         _depth_height),
    Plot("depth_growth", "Growth over depth", mechanisms.depth_growth, _probed(mechanisms.growth), "No probe of the sizes over depth.",
         "Outputs stay within a small factor of each other from the first layer to the last; a plain residual's sum grows with depth, and "
         "outputs with it, a block's starts anew."),
    Plot("decay", "Decay", mechanisms.decay, _probed(mechanisms.half_lives), "No probe of the decay yet.",
         "Half-lives spread over decades: some channels forget within a token, some keep hundreds; a pile at the bound or one narrow peak "
         "means that the gate is not used.", _decay_height),
)  # fmt: skip
HEALTH = (
    Plot("gradient_norm", "Gradient norm", curves.gradient_norm, _has("grad_norm"), "No step has said its gradient norm.",
         "It settles below the clip after the warm-up; crosses are steps that were skipped, and there should be few.", lambda run: 3.3),
    Plot("learning_rate", "Learning rate", curves.learning_rate, _has("lr"), "No step has said its learning rate.",
         "A short rise, then half a cosine down to the end of the run.", lambda run: 2.9),
    Plot("throughput", "Speed", curves.throughput, _has("tokens_per_second"), "No step has said its speed.",
         "Flat within a stage; dips are validations, checkpoints, or another program on the machine.", lambda run: 2.9),
)  # fmt: skip
PLOTS = (*LEARNING, *MECHANISMS, *HEALTH)
OVERVIEW = ("bits_per_byte", "loss", "balance", "expert_load", "depth_weights", "decay")


def draw_all(run: Run) -> dict[str, tuple[bytes, bytes]]:
    """Every plot that the run allows, by name, as PNG bytes: (light, dark)."""
    return {p.name: (picture(p, run, LIGHT), picture(p, run, DARK)) for p in PLOTS if p.available(run)}


def picture(plot: Plot, run: Run, look: Look) -> bytes:
    """One plot as PNG bytes."""
    return render(lambda figure: plot.draw(figure, run, look), look, (9, plot.height(run)), 10.5, _DPI)


def overview(run: Run) -> bytes:
    """Six panels in two rows, for a README: PNG bytes."""
    look = dataclasses.replace(LIGHT, compact=True)
    by_name = {p.name: p for p in PLOTS}

    def draw(figure: Any) -> None:
        for panel, name in zip(figure.subfigures(2, 3, wspace=0.04, hspace=0.06).flat, OVERVIEW, strict=True):
            plot = by_name[name]
            if plot.available(run):
                plot.draw(panel, run, look)
            else:
                panel.text(0.5, 0.5, plot.missing, ha="center", va="center", color=look.muted)

    return render(draw, look, (13.5, 7.6), 11, _DPI)


def render(draw: Callable[[Any], None], look: Look, size: tuple[float, float], type_size: float, dpi: int) -> bytes:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("report: matplotlib is not installed; pip install 'atoll[train]' brings it") from None

    settings: Any = look.rc(type_size)
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a stage named in a script the font lacks
        figure = Figure(figsize=size, dpi=dpi)
        FigureCanvasAgg(figure)
        draw(figure)
        _align(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _align(figure: Any) -> None:
    """Give single plots one left and one right edge, so that they stand in line on a page; a panel of the overview keeps its own."""
    if figure.subfigs:
        return
    figure.draw_without_rendering()  # lays the figure out
    figure.set_layout_engine("none")
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    width = figure.get_figwidth()
    upright = any(bar.get_position().height > bar.get_position().width for bar in bars)
    for axes in figure.axes:
        if axes not in bars:
            box = axes.get_position()
            left, right = max(box.x0, _LEFT / width), box.x1
            if right < 1 - 0.4 / width and not upright:  # something is written beside it
                right = min(right, 1 - _RIGHT / width)
            axes.set_position((left, box.y0, right - left, box.height))


def write_aside(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, then put it in its place: nobody meets half a file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(content)
        os.replace(aside, path)
    except OSError as error:
        if aside.exists():
            aside.unlink()
        raise UserError(f"report = {str(path)!r}: cannot write it ({error.strerror}); free space or mend the permissions") from None
