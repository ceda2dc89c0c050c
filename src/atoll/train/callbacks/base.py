"""The protocol of callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer


class Callback:
    """Hooks of the loop. `every`: steps between two calls of `act`, which also comes after the last step; None: never."""

    every: int | None = None

    def due(self, trainer: Trainer) -> bool:
        """Whether `act` is to be called after the step just done."""
        return self.every is not None and (trainer.step % self.every == 0 or trainer.step == trainer.steps)

    def start(self, trainer: Trainer) -> None:
        """Before the first step of this process."""

    def metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:
        """After each step, with its numbers; or with a line of another "kind" that a callback recorded."""

    def act(self, trainer: Trainer) -> None:
        """After a step that is `due`."""

    def stop(self, trainer: Trainer) -> None:
        """After the last step of this process."""


def record(trainer: Trainer, line: dict[str, Any]) -> None:
    """Hand a line of a "kind" of its own to every callback."""
    for callback in trainer.callbacks:
        callback.metrics(trainer, line)
