"""metrics.jsonl: one JSON object a line, complete before the checkpoint that counts on it."""

from __future__ import annotations

import json
import math
import os
import platform
from typing import TYPE_CHECKING, Any, TextIO

import torch

from atoll.config import UserError
from atoll.train import checkpoint
from atoll.train.callbacks.base import Callback, record

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer


class MetricsFile(Callback):
    """Appends every line; floats keep all their digits, so that two runs can be compared exactly."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def start(self, trainer: Trainer) -> None:
        path = trainer.out / "metrics.jsonl"
        new = not path.exists() or not path.stat().st_size
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        if new:
            record(trainer, _about(trainer))

    def metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({k: _finite(v) for k, v in line.items()}, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            if not checkpoint.is_disk_full(error):
                raise
            self._file = None
            raise UserError(
                f"{trainer.out / 'metrics.jsonl'}: the disk is full; free space, then: atoll train --resume {trainer.out}"
            ) from None

    def sync(self) -> None:
        """Wait until the disk has every line."""
        if self._file is not None:
            os.fsync(self._file.fileno())


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _about(trainer: Trainer) -> dict[str, Any]:
    return {
        "kind": "run",
        "parameters": trainer.num_parameters,
        "device": torch.cuda.get_device_name(trainer.device)
        if trainer.device.type == "cuda"
        else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
