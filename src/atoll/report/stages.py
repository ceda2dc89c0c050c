"""What each stage of the context curriculum did, as numbers: its tokens, its loss, what switching to it cost, its memory and speed."""

from __future__ import annotations

import numpy as np

from atoll.report.run import Run, number

SETTLE = 30  # steps over which a switch is looked at, at most

HEAD = (
    "stage",
    "tokens a sequence",
    "steps",
    "tokens",
    "bits/byte at its end",
    "rise at the switch",
    "over after",
    "tokens/s",
    "peak memory",
)


def stage_rows(run: Run) -> list[tuple[str, ...]]:
    """A row of cells a stage, under `HEAD`.

    The rise at a switch: median loss of the stage's first steps (a tenth of it, 30 at most) over the last of the stage before, in nats;
    it is over at the first step from which the running median stays at or below the level before.
    """
    rows, before = [], None
    lengths = {stage.name: stage.length for stage in run.config.stages}
    for name, piece in run.stages:
        lines = run.steps[piece]
        loss = np.array([number(line.get("loss")) for line in lines])
        few = max(1, min(SETTLE, len(lines) // 10))
        peaks = [number(line.get("peak_memory")) for line in lines]
        rows.append(
            (
                name,
                f"{lengths.get(name, 0):,}",
                f"{len(lines):,}",
                f"{sum(run.tokens_in(line) for line in lines):,}",
                _shown(_middle([number(line.get("bits_per_byte")) for line in lines[-few:]]), "{:.3f}"),
                "" if before is None else _shown(_middle(loss[:few]) - before, "{:+.3f}"),
                "" if before is None else _settled(loss, few, before),
                _shown(_middle([number(line.get("tokens_per_second")) for line in lines]), "{:,.0f}"),
                _shown(max((p for p in peaks if np.isfinite(p)), default=np.nan) / 2**30, "{:.2f} GiB"),
            )
        )
        before = _middle(loss[-few:])
    return rows


def _settled(loss: np.ndarray, few: int, before: float) -> str:
    medians = np.array([_middle(loss[i : i + few]) for i in range(max(1, len(loss) - few + 1))])
    above = np.flatnonzero(medians > before)
    if not len(above):
        return "at once"
    return f"{above[-1] + 1:,} steps" if above[-1] + 1 < len(medians) else "not within it"


def _middle(values: object) -> float:
    known = np.array(values, float)
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else float("nan")


def _shown(value: float, form: str) -> str:
    return form.format(value) if np.isfinite(value) else ""
