"""The live line: where the run is, how it does, and when it will be done."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from atoll.train.callbacks.base import Callback
from atoll.train.screen import duration

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer


class LiveLine(Callback):
    """Rates are means over the last steps of a stage; the ETA counts what validation, samples and checkpoints cost so far."""

    def start(self, trainer: Trainer) -> None:
        self._begun, self._first = time.monotonic(), trainer.step
        self._rates: list[float] = []
        self._stage = ""

    def metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:
        if line.get("kind") is not None:
            return
        if line["stage"] != self._stage:
            self._stage, self._rates = line["stage"], []
        self._rates = [*self._rates[-19:], line["tokens_per_second"]]
        trainer.screen.live(self._text(trainer, line), force=line["step"] in (1, trainer.steps))

    def _text(self, trainer: Trainer, line: dict[str, Any]) -> str:
        rate = len(self._rates) / sum(1 / r for r in self._rates)
        per_step = (time.monotonic() - self._begun) / max(1, line["step"] - self._first)
        eta = duration(per_step * (trainer.steps - line["step"]))
        return (
            f"step {line['step']}/{trainer.steps} · {line['stage']} · loss {line['loss']:.3f} · {line['bits_per_byte']:.3f} bits/byte · "
            f"{rate:,.0f} tokens/s · ETA {eta} · dead {line['dead_experts']} · MaxVio {line['max_vio']:.2f} · grad {line['grad_norm']:.2f}"
        )

    def stop(self, trainer: Trainer) -> None:
        trainer.screen.close()
