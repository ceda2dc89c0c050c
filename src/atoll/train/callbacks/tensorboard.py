"""TensorBoard events, when TensorBoard is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.train.callbacks.base import Callback

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer

SHOWN = (
    *("loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_second"),
    *("digit_accuracy", "character_accuracy"),
    *("max_vio", "max_vio_mean", "dead_experts", "dead_share", "dropped_share", "balance_loss"),
)


class TensorBoard(Callback):
    """Scalars of every step and validation, sample texts. On a resume, events after the checkpoint are marked as purged."""

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, trainer: Trainer) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            trainer.screen.say("TensorBoard is not installed: no events are written (pip install tensorboard)")
            return
        self._writer = SummaryWriter(str(trainer.out), purge_step=trainer.step + 1 if trainer.step else None)

    def metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:
        if self._writer is None or "step" not in line:
            return
        kind = line.get("kind", "train")
        if kind == "sample":
            self._writer.add_text("sample", f"```\n{line['text']}\n```", line["step"])
            return
        for name in SHOWN:
            if name in line:
                self._writer.add_scalar(f"{kind}/{name}", line[name], line["step"])

    def stop(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
