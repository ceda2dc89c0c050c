"""From minutes or epochs to steps: time the parts of the run on this machine once, or count its rows, then freeze the number of steps.

Nothing after this looks at the clock: the run that follows is a function of its frozen settings, so it can be resumed exactly.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atoll.config import Config, UserError
from atoll.data.packing import open_sampler
from atoll.parallel.ranks import ALONE, Ranks
from atoll.train import checkpoint, folder
from atoll.train.screen import Screen, duration
from atoll.train.stages import plan, settled

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer

MARGIN = 0.04  # share of the budget kept free
TIMING = 0.02  # share of the budget spent on timing steps
TIMED_STEPS = 2  # at least, in each stage
REPORT_SECONDS = 12.0  # plots and page, on a slow core
LEAST_STEPS = 10


def freeze(config: Config, corpus: Any, out: Path, screen: Screen, started: float, ranks: Ranks = ALONE) -> Config:
    """`config` with threads and steps filled in. `started`: when the clock of `train.minutes` began (`time.monotonic()`).

    Raises `UserError` when the minutes leave no time to train.
    """
    if config.stages[0].tokens is not None:
        stages, steps = settled(config.stages)
        config = dataclasses.replace(config, stages=stages, train=dataclasses.replace(config.train, steps=config.train.steps or steps))
    threads = config.train.threads or round(ranks.longest(torch.get_num_threads()))
    train = dataclasses.replace(config.train, threads=threads)
    rounds = _epoch_steps(config, corpus) if train.epochs is not None and train.steps is None else None
    if train.minutes is None and train.steps is None:
        train = dataclasses.replace(train, steps=rounds)
    if train.steps is not None:
        return dataclasses.replace(config, train=train)
    assert train.minutes is not None
    budget = train.minutes * 60
    screen.say(f"timing this machine to fill {train.minutes:g} minutes")
    costs = _measure(dataclasses.replace(config, train=train), corpus, out, budget, ranks)
    spent = ranks.longest(time.monotonic() - started)
    left = budget * (1 - MARGIN) - spent - costs.end
    steps = int(left / costs.step)
    if steps < LEAST_STEPS:
        needed = (spent + costs.end + LEAST_STEPS * costs.step) / (1 - MARGIN) / 60 + 0.05
        raise UserError(
            f"train.minutes = {train.minutes:g}: leaves time for {max(0, steps)} steps; give at least {needed:.1f}, or a smaller model"
        )
    steps = steps if rounds is None else min(steps, rounds)
    screen.say(f"{steps:,} steps in {duration(steps * costs.step)}, {duration(costs.end)} kept for evaluation, export and report")
    return dataclasses.replace(config, train=dataclasses.replace(train, steps=steps))


def _epoch_steps(config: Config, corpus: Any) -> int:
    """Steps that go `train.epochs` times round the training split, each stage doing its share of the steps."""
    assert config.train.epochs is not None
    rows = [open_sampler(corpus.train, s.length, 0).epoch_rows for s in config.stages]
    share = sum(s.share * s.batch / r for s, r in zip(config.stages, rows, strict=True))  # of an epoch, a mean step
    return max(1, math.ceil(config.train.epochs / share - 1e-9))


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds."""

    step: float  # of a mean step, with its share of validations, samples and checkpoints
    end: float  # of all that follows the last step


def _measure(config: Config, corpus: Any, out: Path, budget: float, ranks: Ranks) -> Costs:
    """Run every part once on a model that is thrown away. Every process of `ranks` comes to the same numbers."""
    from atoll.evals.pictures import all_over_few
    from atoll.train.callbacks.probes import look
    from atoll.train.callbacks.samples import sample
    from atoll.train.finish import compressed, heldout
    from atoll.train.trainer import Trainer

    c = config.train
    trial = Trainer(dataclasses.replace(config, train=dataclasses.replace(c, steps=1 << 20)), corpus, out, Screen(), ranks)
    share = budget * TIMING / len(config.stages)
    step = sum(s.share * _time_steps(trial, i, share) for i, s in enumerate(config.stages))
    validation = _seconds(lambda: heldout(trial, c.validate_tokens), trial)
    sampling = _seconds(lambda: sample(trial), trial)
    probing = _seconds(lambda: look(trial), trial)
    saving = _seconds(lambda: _try_saving(trial), trial)
    end = validation + sampling + probing + saving
    if c.evaluate:
        pictures = corpus.heldout.pictures
        if pictures is None:
            ranks.on_main(lambda: compressed(corpus))  # kept: its time is spent now, not at the end
        times = corpus.heldout.num_tokens / c.validate_tokens if pictures is None else all_over_few(pictures.samples)
        end += validation * max(1.0, times)
    end += saving * c.export + REPORT_SECONDS * c.report
    regular = (validation + probing) / c.validate_every + sampling / c.sample_every + saving / c.save_every
    return Costs(step + regular, end)


def _time_steps(trial: Trainer, index: int, seconds: float) -> float:
    """Mean seconds of a step in stage `index`, over some `seconds`, the first not counted."""
    stage = dataclasses.replace(plan(trial.config.stages, trial.steps)[index], start=0)
    trial.step = 0
    _seconds(lambda: trial.train_step(stage), trial)
    times: list[float] = []
    while len(times) < TIMED_STEPS or sum(times) < seconds:
        trial.step += 1
        times.append(_seconds(lambda: trial.train_step(stage), trial))
    return sum(times) / len(times)


def _seconds(part: Any, trial: Trainer) -> float:
    begun = time.monotonic()
    part()
    if trial.device.type == "cuda":
        torch.cuda.synchronize(trial.device)
    return trial.ranks.longest(time.monotonic() - begun)


def _try_saving(trial: Trainer) -> None:
    """A checkpoint like the run's, removed at once; on a full disk this is where the run ends, before it began."""
    place = trial.out / folder.TRIAL
    try:
        checkpoint.save(place, 0, trial.tensors(), trial.meta(), 1, trial.ranks)
    finally:
        if trial.ranks.main:
            shutil.rmtree(place, ignore_errors=True)
