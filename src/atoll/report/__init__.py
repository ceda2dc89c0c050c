"""A run as pictures and one HTML page: `write(run_folder)` makes plots/*.png and report.html."""

from __future__ import annotations

from pathlib import Path


def write(run_folder: str | Path) -> Path:
    """Read the run in `run_folder`, finished or not; write plots/*.png and report.html there and return the page's path.

    Raises `UserError` when the folder is no run, when its metrics hold no step yet, or when nothing can be written.
    """
    from atoll.report import page, plots, run

    shown = run.read(run_folder)
    pictures = plots.draw_all(shown)
    for name, (light, _) in pictures.items():
        plots.write_aside(shown.folder / "plots" / f"{name}.png", light)
    plots.write_aside(shown.folder / "plots" / "overview.png", plots.overview(shown))
    path = shown.folder / "report.html"
    plots.write_aside(path, page.page(shown, pictures).encode())
    return path
