"""Checkpoints: every so many steps, at the end, and when the run is asked to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.train.callbacks.base import Callback
from atoll.train.callbacks.metrics import MetricsFile

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer


class Saving(Callback):
    """Must come last in the list: the lines of its step are on the disk before the checkpoint is."""

    def __init__(self, every: int) -> None:
        self.every = every

    def due(self, trainer: Trainer) -> bool:
        return super().due(trainer) or trainer.stopping

    def act(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, MetricsFile):
                callback.sync()
        trainer.save()
