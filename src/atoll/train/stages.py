"""The plan of a run: which stage a step belongs to, and which samples it reads. Pure functions of the settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from atoll.config import StageConfig
from atoll.train.segments import Segments


@dataclass(frozen=True)
class Stage:
    """Steps `start` … `stop` - 1 of the run, at one sequence length."""

    index: int
    name: str
    start: int
    stop: int
    length: int  # tokens in a sequence
    batch: int  # sequences in an optimizer step
    segments: Segments | None = None  # how a sequence is computed piece by piece
    lr: float = 1.0  # factor on the schedule
    micro_batch: int | None = None  # None: the run's
    recompute: bool | None = None  # None: the run's

    @property
    def tokens(self) -> int:
        """Tokens in one optimizer step."""
        return self.length * self.batch

    def first_sample(self, step: int) -> int:
        """Global index, in this stage's sampler, of the first sequence of `step`. Depends on no micro-batch split."""
        return (step - self.start) * self.batch


def settled(stages: tuple[StageConfig, ...]) -> tuple[tuple[StageConfig, ...], int]:
    """Stages that count tokens, with the shares that come of it, and the steps of the run: in each stage as many as its tokens take."""
    steps = [-(-(s.tokens or 0) // (s.length * s.batch)) for s in stages]
    shared = zip(stages, steps, strict=True)
    return tuple(dataclasses.replace(s, share=n / sum(steps)) for s, n in shared), sum(steps)


def plan(stages: tuple[StageConfig, ...], steps: int) -> list[Stage]:
    """Cut `steps` by the stages' shares. The last stage ends at `steps`; a stage may be empty when `steps` are few."""
    cut, total, start = [], 0.0, 0
    for i, stage in enumerate(stages):
        total += stage.share
        stop = steps if i == len(stages) - 1 else min(steps, round(total * steps))
        segments = None if stage.segment is None else Segments(stage.length, min(stage.segment, stage.length), stage.offload)
        cut.append(Stage(i, stage.name, start, stop, stage.length, stage.batch, segments, stage.lr, stage.micro_batch, stage.recompute))
        start = stop
    return cut


def stage_at(stages: list[Stage], step: int) -> Stage:
    """The stage that the 0-based `step` belongs to."""
    for stage in stages:
        if stage.start <= step < stage.stop:
            return stage
    raise IndexError(f"step {step} is not in the plan")
