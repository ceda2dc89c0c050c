"""Train the runs of a comparison one after the other; what is finished stays, what was cut short goes on."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from atoll.compare.plan import Cell, Plan
from atoll.train import checkpoint
from atoll.train.callbacks.base import Callback
from atoll.train.screen import Screen, duration
from atoll.train.trainer import GaveUp, Trainer, run

DONE = "finished.json"  # in a run's folder: it needs no more training


def finished(cell: Cell) -> dict[str, Any] | None:
    """What was noted when the run ended; None while it has not."""
    try:
        return json.loads((cell.folder / DONE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class Log(Screen):
    """A run's own words, in log.txt of its folder."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(open(path, "a", encoding="utf-8"), every=60.0)  # noqa: SIM115 (open for the whole run)


class Progress(Callback):
    """One line a finished run, and a live line: which run, how far, how long all of them will take."""

    def __init__(self, plan: Plan, to_stderr: bool = False) -> None:
        self.plan, self.screen = plan, Screen(sys.stderr if to_stderr else sys.stdout)
        self.left = [cell for cell in plan.cells if finished(cell) is None]
        self.begun: float | None = None  # when the first step of this process began
        self.done = 0.0  # runs done by this process
        self.cell: Cell | None = None
        self.width = max(len("value"), *(len(label) for label in plan.labels))

    def announce(self) -> None:
        """What is about to be trained."""
        p = self.plan
        tokens = sum(round(s.share * p.steps) * s.batch * s.length for s in p.base.stages)
        already = len(p.cells) - len(self.left)
        words = f"{len(p.labels)} values x {p.seeds} seeds of {p.name}: {len(p.cells)} runs of {p.steps:,} steps, {tokens:,} tokens each"
        self.screen.say(words + (f"; {already} are finished" if already else ""))
        self.screen.say(
            f"{'value':<{self.width}}  seed  {'loss':>7}  {'held-out':>8}  {'MaxVio':>7}  {'dead':>6}  {'dropped':>7}  {'time':>8}"
        )

    def begin(self, cell: Cell) -> None:
        """The next run starts or goes on."""
        self.cell = cell

    def start(self, trainer: Trainer) -> None:
        self.first = trainer.step
        self.begun = time.monotonic() if self.begun is None else self.begun

    def metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:
        if line.get("kind") is not None or self.cell is None or self.begun is None:
            return
        part = (line["step"] - self.first) / trainer.steps
        done, whole = self.done + part, len(self.left) - self.first / trainer.steps
        left = (time.monotonic() - self.begun) / max(done, 1e-9) * max(0.0, whole - done)
        number = len(self.plan.cells) - len(self.left) + round(self.done) + 1
        self.screen.live(
            f"run {number}/{len(self.plan.cells)} · {self.cell.label} seed {self.cell.seed} · step {line['step']}/{trainer.steps} · "
            f"loss {line['loss']:.3f} · MaxVio {line['max_vio']:.2f} · ETA {duration(left)}"
        )

    def end(self, cell: Cell, note: dict[str, Any]) -> None:
        """The run ended; its line stays."""
        from atoll.compare.result import measure

        self.done += 1
        head = f"{cell.label:<{self.width}}  {cell.seed:>4}  "
        if "failed" in note:
            self.screen.say(head + note["failed"])
            return
        m = measure(cell)
        numbers = [(m["loss"], "7.4f"), (m["bits_per_byte"], "8.4f"), (m["max_vio"], "7.2f"), (m["dead_share"], "6.1%")]
        cells = [f"{v:{form}}" if v is not None else "-".rjust(int(form[0])) for v, form in [*numbers, (m["dropped_share"], "7.1%")]]
        self.screen.say(head + "  ".join(cells) + f"  {duration(m['seconds'] or 0):>8}")


def train_all(plan: Plan, progress: Progress) -> None:
    """Train every run that is not finished. Raises KeyboardInterrupt when a run was asked to stop, `UserError` when it cannot go on."""
    progress.announce()
    for cell in plan.cells:
        if finished(cell) is None:
            progress.begin(cell)
            progress.end(cell, train_one(cell, progress))
        shutil.rmtree(cell.folder / "checkpoints", ignore_errors=True)  # half a gigabyte each in `tiny`
    progress.screen.close()


def train_one(cell: Cell, progress: Progress) -> dict[str, Any]:
    """Train or resume one run to its end; returns what was noted in its folder. One that gives up counts as ended, and as failed."""
    resume = (cell.folder / "config.toml").is_file()
    log = Log(cell.folder / ".log.txt")
    note: dict[str, Any] = {"steps": cell.steps}
    try:
        run(None if resume else cell.config, cell.folder, resume=resume, screen=log, watch=progress)
        if newest(cell) != cell.steps:
            progress.screen.say(f"stopped in {cell.label} seed {cell.seed}, saved; go on with the same command")
            raise KeyboardInterrupt
    except GaveUp as error:
        note["failed"] = str(error)
    finally:
        log.close()
        log.stream.close()
    checkpoint.write_whole(cell.folder / DONE, json.dumps(note) + "\n")
    return note


def newest(cell: Cell) -> int:
    """The step of the run's newest checkpoint; 0 when there is none."""
    return max(checkpoint.steps(cell.folder / "checkpoints"), default=0)
