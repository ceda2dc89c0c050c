"""The training loop. Read `run`, then `Trainer.fit`; the rest of the room holds the parts they name."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from atoll import parallel
from atoll.config import Config, UserError
from atoll.data import Corpus, open_corpus
from atoll.data.images.balance import step_rows
from atoll.data.packing import ConversationSampler, open_sampler
from atoll.optim.schedule import factor
from atoll.parallel.ranks import ALONE, Ranks
from atoll.train import budget, checkpoint, folder, initial, setup
from atoll.train.balance import balance_line
from atoll.train.callbacks import Callback, standard
from atoll.train.finish import finish
from atoll.train.guard import Guard
from atoll.train.host import peak_memory
from atoll.train.saver import Saver
from atoll.train.screen import Screen
from atoll.train.signals import StopSignals
from atoll.train.stages import Stage, plan, stage_at
from atoll.train.step import StepResult, row_batches, train_step

GIVE_UP = 50  # skipped steps in a row after which a run is beyond help


class GaveUp(UserError):
    """A run in which one step after another had to be skipped."""


def run(
    config: Config | None,
    out: str | Path,
    resume: bool = False,
    started: float | None = None,
    screen: Screen | None = None,
    watch: Callback | None = None,
) -> Path:
    """Train: the whole job, from text to report, in the folder `out`; returns it.

    Args:
        config: the settings. On a resume the folder's own are taken; None, or settings that agree with them, may be given.
        out: the run's folder: new or empty, or with `resume` one that has started.
        started: `time.monotonic()` at the start of the command, from which `train.minutes` counts; default now.
        screen: where it says what it does; default standard output. watch: one more callback, called before the others.

    Raises `UserError`, one line, for a mistake. SIGTERM and Ctrl-C end it after the current step, saved, and it returns.
    """
    started = time.monotonic() if started is None else started
    out, screen = Path(out), screen or Screen()
    with parallel.started("auto" if config is None else config.train.device) as ranks:
        screen = screen if ranks.main else Screen(silent=True)
        resume = resume or (ranks.restarted and (out / "config.toml").is_file())
        with ranks.on_main_throughout(lambda: folder.taken(out, resume)):
            config = ranks.on_main(lambda: _settings(config, out, resume, ranks.size))
            _train(config, out, resume, started, screen, ranks, watch)
    return out


def _settings(config: Config | None, out: Path, resume: bool, processes: int) -> Config:
    """The settings of the run, checked against the number of processes."""
    if resume:
        config = folder.frozen(out, config)
    if config is None:
        raise UserError("config: none given; name a preset or a TOML file")
    if not resume:
        config = initial.adopt(config)
    parallel.check(config, processes)
    return config


def _train(config: Config, out: Path, resume: bool, started: float, screen: Screen, ranks: Ranks, watch: Callback | None) -> None:
    with setup.settled(config.train):
        with ranks.main_first():
            corpus = open_corpus(config.data, config.model, screen.say)
        for note in corpus.notes:
            screen.say(note)
        if not resume:
            config = budget.freeze(config, corpus, out, screen, started, ranks)
        trainer = Trainer(config, corpus, out, screen, ranks)
        trainer.watchers = [] if watch is None else [watch]
        if resume:
            trainer.restore()
        else:
            # Once all that can be refused has been read: a refused start leaves no run.
            ranks.on_main(lambda: folder.begin(out, config, corpus.tokenizer))
            trainer.announce()
        if trainer.fit():
            _finish(trainer)


def _finish(trainer: Trainer) -> None:
    try:
        finish(trainer)
    except KeyboardInterrupt:
        trainer.screen.say(f"stopped; all steps are done and saved, have the rest by: atoll train --resume {trainer.out}")
        raise


class Trainer:
    """A run in memory: model, optimizer, guard, samplers, and `step`, the number of optimizer steps done."""

    def __init__(self, config: Config, corpus: Corpus, out: Path, screen: Screen, ranks: Ranks = ALONE) -> None:
        assert config.train.steps is not None
        self.config, self.corpus, self.out, self.screen, self.ranks = config, corpus, out, screen, ranks
        self.device = setup.device_of(config.train)
        self.model, self.optimizer = setup.build(config, bool(checkpoint.steps(out / "checkpoints")), ranks)
        self.num_parameters = self.optimizer.num_parameters  # of the whole model
        self.guard = Guard(config.train.skip_spike, self.device)
        self.steps, self.step = config.train.steps, 0
        self.stages = plan(config.stages, self.steps)
        self.samplers = [open_sampler(corpus.train, s.length, config.data.seed + s.index) for s in self.stages]
        self.saver = Saver(out / "checkpoints", config.train.keep, config.train.async_save, ranks)
        self.callbacks: list[Callback] = []
        self.watchers: list[Callback] = []
        self.stopping = False  # asked to stop: the step just done is the last
        self._reported, self._read = 0, 0.0  # last step handed to the callbacks, and when

    # ---------------------------------------------------------------- the loop

    def fit(self) -> bool:
        """Train to the last step. False when it was asked to stop before; then a checkpoint was saved."""
        self.callbacks = [*self.watchers, *standard(self.config.train, self.ranks.main)]
        with StopSignals() as signals, self.saver:
            for callback in self.callbacks:
                callback.start(self)
            pending: tuple[StepResult, Stage, float] | None = None
            while self.step < self.steps and not self.stopping:
                stage, begun = stage_at(self.stages, self.step), time.monotonic()
                result = self.train_step(stage)
                self.step += 1
                # On a GPU the numbers of a step are read while the next one runs: reading them at once would stall it.
                if pending is not None:
                    self._report(*pending)
                pending = (result, stage, begun)
                self.stopping = self.ranks.any(signals.asked)
                if self.device.type == "cpu" or self.stopping or any(c.due(self) for c in self.callbacks):
                    self._report(*pending)
                    pending = None
                    for callback in self.callbacks:
                        if callback.due(self):
                            callback.act(self)
            if pending is not None:
                self._report(*pending)
            for callback in self.callbacks:
                callback.stop(self)
        if self.step < self.steps:
            self.screen.say(f"stopped after step {self.step:,} of {self.steps:,}, saved; go on with: atoll train --resume {self.out}")
        return self.step == self.steps

    def train_step(self, stage: Stage) -> StepResult:
        """The optimizer step after `step`, on the samples that its number gives."""
        o, (place, places) = self.config.optim, parallel.place(self.config.parallel, self.ranks.rank)
        sampler = self.samplers[stage.index]
        rows = step_rows(sampler, stage.first_sample(self.step), stage.batch, place, places)
        micro = self.config.train.micro_batch if stage.micro_batch is None else stage.micro_batch
        batches = row_batches(sampler, rows, micro)
        self.model.gradient_checkpointing = self.config.train.gradient_checkpointing if stage.recompute is None else stage.recompute
        rate = self.learning_rate(self.step, o.warmup, o.min_lr)
        return train_step(self.model, self.optimizer, self.guard, batches, rate, self.ranks, stage.segments)

    def learning_rate(self, step: int, warmup: float, floor: float) -> float:
        """Share of the peak learning rate at the 0-based `step`."""
        return factor(step, self.steps, warmup, floor) * stage_at(self.stages, step).lr

    def _report(self, result: StepResult, stage: Stage, begun: float) -> None:
        """Hand the numbers of a step to the callbacks, as one flat line."""
        loss, norm, skipped, in_a_row = result.read()
        now = time.monotonic()
        line = self._line(result, stage, loss, norm, skipped, now - max(begun, self._read))
        self._read = now
        if skipped:
            why = (
                "not finite"
                if not math.isfinite(loss + norm)
                else f"a spike: gradient norm {norm:.3g}, usually {float(self.guard.mean):.3g}"
            )
            self.screen.say(f"step {line['step']:,} skipped: {why}")
        for callback in self.callbacks:
            callback.metrics(self, line)
        if in_a_row >= GIVE_UP:
            raise GaveUp(f"optim.lr = {self.config.optim.lr!r}: the last {in_a_row} steps had to be skipped; start again with a lower one")

    def _line(self, result: StepResult, stage: Stage, loss: float, norm: float, skipped: bool, seconds: float) -> dict[str, Any]:
        o = self.config.optim
        number = self._reported = self._reported + 1
        return {
            "step": number,
            "stage": stage.name,
            "loss": loss,
            "bits_per_byte": loss * result.targets / math.log(2) / max(1, result.num_bytes),
            "tokens": stage.tokens,
            "trained_share": result.targets / stage.tokens,
            "tokens_per_second": stage.tokens / max(seconds, 1e-9),
            "lr": o.lr * self.learning_rate(number - 1, o.warmup, o.min_lr),
            "grad_norm": norm,
            "peak_memory": peak_memory(self.device),
            **balance_line(result.balance, self.config),
            "skipped": skipped,
            **self.saver.take(),
        }

    # ---------------------------------------------------------------- saving and going on

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything a checkpoint holds that is a tensor, by name. Live, but for the random states."""
        model = {f"model.{n}": t for n, t in self.optimizer.weights().items()}
        optim = {f"optim.{n}": t for n, t in self.optimizer.state().items()}
        guard = {f"guard.{n}": t for n, t in self.guard.state().items()}
        rng = {f"rng.{n}": t for n, t in checkpoint.rng_state(self.device).items()}
        # Between steps no counts are left: they span no checkpoint. What a rule carries from step to step does.
        balance = {f"balance.{n}": t for n, t in self.model.balance_state().items()}
        return {**model, **optim, **guard, **rng, **balance}

    def meta(self) -> dict[str, Any]:
        """Everything a checkpoint holds that is not a tensor."""
        text = {"train_tokens": self.corpus.train.num_tokens, "train_bytes": self.corpus.train.num_bytes}
        return {
            "steps": self.steps,
            "skipped": int(self.guard.skipped),
            "settings": folder.fingerprint(self.config),
            "tokenizer": self.corpus.tokenizer.fingerprint,
            "text": text,
            "torch": torch.__version__,
        }

    def save(self) -> None:
        """Write the checkpoint of this step, or begin to; see `train.saver`."""
        self.saver.save(self.step, self.tensors(), self.meta())

    def restore(self) -> None:
        """Go back to the newest whole checkpoint in the folder, or to step 0. Raises `UserError` when it does not fit this run."""
        found = self.ranks.on_main(self._newest)
        if found is not None:
            path, meta = found
            tensors = self.tensors()
            checkpoint.load(path, tensors, ranks=self.ranks)
            states = {n.removeprefix("rng."): t for n, t in tensors.items() if n.startswith("rng.")}
            checkpoint.set_rng_state(states, self.device)
            self.step = int(meta["step"])
        self._reported = self.step
        self.ranks.on_main(lambda: folder.cut_metrics(self.out, self.step))
        self.screen.say(f"resuming {self.out} after step {self.step:,} of {self.steps:,}")

    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint, once it fits this run."""
        if not (self.out / "tokenizer.json").is_file():
            self.corpus.tokenizer.save(self.out / "tokenizer.json")
        found = checkpoint.newest(self.out / "checkpoints", self.screen.say)
        if found is not None:
            self._check_fits(*found)
        return found

    def _check_fits(self, path: Path, meta: dict[str, Any]) -> None:
        mine = self.meta()
        if meta["tokenizer"] != mine["tokenizer"]:
            raise UserError(
                f"data.tokenizer = {self.config.data.tokenizer!r}: not the tokenizer of {path}; set it to {self.out / 'tokenizer.json'}"
            )
        if meta["text"] != mine["text"]:
            raise UserError(f"data.source = {self.config.data.source!r}: the text changed since {path}; put it back, or start a new run")
        if meta["settings"] != mine["settings"]:
            raise UserError(f"{path}: written under other settings than {self.out}/config.toml; put that file back, or start a new run")

    def announce(self) -> None:
        """Say what is about to be trained."""
        stages = ", ".join(f"{s.name}: {s.stop - s.start:,} steps of {s.batch} x {s.length:,} tokens" for s in self.stages)
        where = f"{self.device}" if self.ranks.size == 1 else f"{self.ranks.size} processes, {self.device}"
        self.screen.say(f"{self.num_parameters:,} parameters on {where}; {stages}")
        for sampler in self.samplers:
            if isinstance(sampler, ConversationSampler):
                self.screen.say(sampler.note)
