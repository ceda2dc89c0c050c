"""Scores as a picture: depth by length of every task with needles, the other tasks by length in one panel. PNG, or HTML with the table."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config import UserError

KINDS = (".png", ".html")


def check(out: str) -> Path:
    """The path to write. Raises `UserError` for an ending that is none of `KINDS`."""
    path = Path(out).expanduser()
    if path.suffix not in KINDS:
        raise UserError(f"--out {out!r}: a file that ends in {' or '.join(KINDS)} is expected")
    return path


def write(result: dict[str, Any], path: Path) -> Path:
    """Write what `atoll.evals.suite.evaluate` gave. Raises `UserError` when it cannot be written or matplotlib is missing."""
    from atoll.report.plots import write_aside

    write_aside(path, _page(result).encode() if path.suffix == ".html" else picture(result))
    return path


def panels(scores: list[dict[str, Any]]) -> list[tuple[str, list[str], list[int], np.ndarray]]:
    """(title, rows, lengths, exact match [rows, lengths], NaN where nothing was measured) of each panel."""
    lengths = sorted({s["length"] for s in scores})
    deep = list(dict.fromkeys(s["task"] for s in scores if s["depth"] is not None))
    found = []
    for task in deep:
        mine = [s for s in scores if s["task"] == task]
        depths = sorted({s["depth"] for s in mine})
        found.append((task, [f"{d:.0%}" for d in depths], lengths, _table(mine, lengths, depths, "depth")))
    flat = [s for s in scores if s["depth"] is None]
    if flat:
        names = list(dict.fromkeys(s["task"] for s in flat))
        found.append(("evidence everywhere" if deep else "exact match", names, lengths, _table(flat, lengths, names, "task")))
    return found


def _table(scores: list[dict[str, Any]], lengths: list[int], rows: list[Any], key: str) -> np.ndarray:
    table = np.full((len(rows), len(lengths)), np.nan)
    for s in scores:
        table[rows.index(s[key]), lengths.index(s["length"])] = s["exact"]
    return table


def picture(result: dict[str, Any], dark: bool = False) -> bytes:
    """All panels as PNG bytes."""
    from atoll.report.look import DARK, LIGHT
    from atoll.report.plots import render

    look, shown = DARK if dark else LIGHT, panels(result["scores"])
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    wide = max(len(p[2]) for p in shown)
    size = (columns * max(3.2, 1.6 + 0.62 * wide), 0.7 + lines * (1.3 + 0.36 * max(len(p[1]) for p in shown)))

    def draw(figure: Any) -> None:
        where = f", needles in {result['haystack']}" if result["haystack"] else ""
        figure.suptitle(f"{result['suite']}: share of answers exactly right{where}", x=0.01, ha="left", fontsize=11)
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes, panel in zip(grid.flat, shown, strict=False):
            _draw(axes, look, *panel)
        for axes in grid.flat[len(shown) :]:
            axes.set_visible(False)

    return render(draw, look, size, 9, 160)


def _draw(axes: Any, look: Any, title: str, rows: list[str], lengths: list[int], table: np.ndarray) -> None:
    from atoll.report.look import rising

    axes.imshow(table, cmap=rising(look), vmin=0, vmax=1, aspect="auto")
    axes.set_title(title.replace("_", " "), pad=6)
    axes.set_xticks(range(len(lengths)), [_short(n) for n in lengths])
    axes.set_yticks(range(len(rows)), [r.replace("_", " ") for r in rows])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth" if rows[0].endswith("%") else "")
    axes.grid(False)
    for (y, x), value in np.ndenumerate(table):
        if np.isfinite(value):
            deep = value > 0.5  # the map runs from the paper away from it: there the paper's colour is read best
            axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", color=look.paper if deep else look.ink)


def _short(tokens: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def _page(result: dict[str, Any]) -> str:
    from atoll.evals.suite import render
    from atoll.report.page import document, text

    light, dark = (base64.b64encode(picture(result, d)).decode() for d in (False, True))
    shown = (
        f'<figure>\n<picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="exact match by depth and length" src="data:image/png;base64,{light}"></picture>\n</figure>'
    )
    head = f'<header>\n<h1>{text(result["suite"])}</h1>\n<p class="lead">{text(result["model"])}</p>\n</header>'
    return document(f"{result['suite']} of {result['model']}", [head, shown, f"<pre>{text(render(result))}</pre>"])
