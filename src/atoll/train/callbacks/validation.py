"""Bits per byte on a fixed part of the held-out split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.evals.pictures import described
from atoll.train.callbacks.base import Callback, record
from atoll.train.finish import heldout

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer


class Validation(Callback):
    """Always the same tokens, so that the numbers of one run can be compared with one another."""

    def __init__(self, every: int) -> None:
        self.every = every

    def act(self, trainer: Trainer) -> None:
        measured = heldout(trainer, trainer.config.train.validate_tokens)
        record(trainer, {"kind": "validation", "step": trainer.step, **measured})
        if trainer.corpus.heldout.pictures is not None:
            trainer.screen.say(f"step {trainer.step:,}: {described(measured)}")
            return
        kinds = {"chat": "replies", "synthetic": "answers"}
        kind = "text" if trainer.corpus.heldout.trained is None else kinds[trainer.config.data.kind]
        what = kind if kind == "text" else f"{kind}, {measured['nats_per_token']:.4f} nats a token"
        trainer.screen.say(f"step {trainer.step:,}: {measured['bits_per_byte']:.4f} bits per byte on held-out {what}")
