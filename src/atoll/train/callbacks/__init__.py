"""What happens around the loop, one idea a file. A callback never changes the numbers of a run."""

from __future__ import annotations

from atoll.config import TrainConfig
from atoll.train.callbacks.base import Callback
from atoll.train.callbacks.live import LiveLine
from atoll.train.callbacks.metrics import MetricsFile
from atoll.train.callbacks.probes import Probes
from atoll.train.callbacks.samples import Samples
from atoll.train.callbacks.saving import Saving
from atoll.train.callbacks.tensorboard import TensorBoard
from atoll.train.callbacks.validation import Validation

__all__ = ["Callback", "standard"]


def standard(config: TrainConfig, main: bool = True) -> list[Callback]:
    """The callbacks of every run, in order. Saving is last: a checkpoint finds all lines of its step in the file.

    Those that run the model run on every process; those that only write, on the `main` one.
    """
    writing = [MetricsFile(), TensorBoard(), LiveLine()] if main else []
    return [
        *writing,
        Validation(config.validate_every),
        Samples(config.sample_every),
        Probes(config.validate_every),
        Saving(config.save_every),
    ]
