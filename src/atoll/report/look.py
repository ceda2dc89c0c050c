"""Colours, type and the few drawing habits all plots share. Two themes: light (files, README, page) and dark (page)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.plan.summary import short


@dataclass(frozen=True)
class Look:
    """One theme. Hues are told apart with any common colour vision (after Okabe and Ito, toned down)."""

    paper: str
    ink: str
    muted: str
    grid: str
    blue: str
    orange: str
    green: str
    red: str
    compact: bool = False  # a panel of the overview: fewer words

    def rc(self, size: float) -> dict[str, Any]:
        """matplotlib settings of this theme at the type size `size`, in points."""
        return {
            "font.family": "DejaVu Sans",
            "font.size": size,
            "text.parse_math": False,  # names come from users; a dollar is a dollar
            "text.color": self.ink,
            "axes.edgecolor": self.muted,
            "axes.facecolor": self.paper,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "axes.labelcolor": self.muted,
            "axes.labelsize": size,
            "axes.linewidth": 0.8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
            "axes.titlelocation": "left",
            "axes.titlepad": 20,  # room for the stages' names
            "axes.titlesize": size * 1.15,
            "axes.titleweight": "bold",
            "figure.constrained_layout.h_pad": 0.08,
            "figure.constrained_layout.use": True,
            "figure.constrained_layout.w_pad": 0.08,
            "figure.facecolor": self.paper,
            "grid.color": self.grid,
            "grid.linewidth": 0.8,
            "lines.linewidth": 1.8,
            "lines.solid_capstyle": "round",
            "savefig.facecolor": self.paper,
            "xtick.color": self.muted,
            "xtick.labelsize": size * 0.92,
            "xtick.major.size": 3,
            "ytick.color": self.muted,
            "ytick.labelsize": size * 0.92,
            "ytick.major.size": 0,
            "ytick.minor.size": 0,
        }


LIGHT = Look("#ffffff", "#1d2329", "#5b6670", "#e7eaed", "#2468a8", "#c65f1c", "#1f8a70", "#b3261e")
DARK = Look("#15191e", "#e3e7eb", "#9aa5b0", "#2a3138", "#6cb0ea", "#eb9a5b", "#56c2a4", "#ff8a80")


def diverging(look: Look) -> Any:
    """Colour map from too little (blue) over level (near the paper) to too much (orange)."""
    from matplotlib.colors import LinearSegmentedColormap

    middle = "#f4f4f1" if look.paper == LIGHT.paper else "#2b3138"
    stops = ["#17456f", "#5d9bd0", middle, "#e39a5f", "#8a3a08"]
    if look.paper != LIGHT.paper:
        stops = ["#9fd0f7", "#3f7fb5", middle, "#c9742f", "#ffc08a"]
    return LinearSegmentedColormap.from_list("load", stops)


def rising(look: Look) -> Any:
    """Colour map from none (the paper) to all (blue)."""
    from matplotlib.colors import LinearSegmentedColormap

    if look.paper == LIGHT.paper:
        return LinearSegmentedColormap.from_list("weight", ["#f7f9fb", "#9cc3e4", "#2468a8", "#0d2f55"])
    return LinearSegmentedColormap.from_list("weight", ["#1b2128", "#23527f", "#4f96d4", "#cfe6fa"])


def end_labels(axes: Any, labels: list[tuple[float, str, str]], x: float = 1.01) -> None:
    """Write (height in data, text, colour) just right of the axes, moved apart where they would overlap."""
    size = float(axes.xaxis.label.get_size())
    inches = axes.get_position().height * axes.figure.bbox.height / axes.figure.dpi
    gap = 1.6 * size / 72 / max(inches, 0.1)  # 1.3 of the type's height, and the layout will take some of the axes' height
    heights = [float(axes.transAxes.inverted().transform(axes.transData.transform((0, y)))[1]) for y, _, _ in labels]
    for at, (_, text, colour) in zip(spread(heights, gap), labels, strict=True):
        axes.text(x, at, text, color=colour, transform=axes.transAxes, va="center", ha="left", fontsize=size)


def spread(heights: list[float], gap: float) -> list[float]:
    """`heights` moved as little as needed so that neighbours stand at least `gap` apart; their order is kept."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    clusters: list[list[int]] = []
    centre: list[float] = []
    for i in order:
        clusters.append([i])
        centre.append(heights[i])
        while len(clusters) > 1 and centre[-1] - centre[-2] < gap * (len(clusters[-1]) + len(clusters[-2])) / 2:
            merged = clusters[-2] + clusters[-1]
            clusters[-2:] = [merged]
            centre[-2:] = [float(np.mean([heights[j] for j in merged]))]
    placed = list(heights)
    for members, middle in zip(clusters, centre, strict=True):
        for rank, i in enumerate(members):
            placed[i] = middle + gap * (rank - (len(members) - 1) / 2)
    return placed


def thousands(axis: Any) -> None:
    """Ticks as 1,000 rather than 1e3, and whole."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))


def plain_log(axis: Any, most: int) -> None:
    """About `most` ticks of a logarithmic axis whose limits are set, as plain numbers: 1, 2, 5 of every decade, or decades alone."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    many = 3 * np.log10(high / low) > most
    axis.set_major_locator(LogLocator(10, subs=(1.0,) if many else (1.0, 2.0, 5.0), numticks=most))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}" if v < 1e5 else short(v)))
    axis.set_minor_formatter(NullFormatter())
