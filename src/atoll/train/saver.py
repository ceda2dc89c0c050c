"""Checkpoints written beside training: the step waits until its tensors are copied, a thread writes them while the next ones run.

At most one is under way: the next save waits for it, as the end of a run does, and a signal's. What is written, and how, is
`train.checkpoint`'s; so a crash while writing leaves the checkpoint before it whole. Of several processes each has such a thread, and
these speak to one another through a group of their own, apart from training's.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.parallel.ranks import ALONE, Ranks
from atoll.train import checkpoint

SPARE = 0.5  # share of the free memory that a copy may take


class Saver:
    """Saves into `folder`, the newest `keep`; `beside` training or, when false, while it waits. A context: at its end all is written.

    stalled: seconds that training has waited in `save` since `take` was called. written: seconds that the last finished checkpoint took.
    """

    def __init__(self, folder: Path, keep: int, beside: bool, ranks: Ranks = ALONE) -> None:
        self.folder, self.keep, self.beside, self.ranks = folder, keep, beside, ranks
        self.stalled, self.written = 0.0, 0.0
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._apart: Ranks | None = None

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, or begin to. Raises what writing it, or the one before it, failed of."""
        begun = time.monotonic()
        self.wait()
        if self.beside and not self._copies and self.ranks.any(not _fits(tensors)):
            self.beside = False  # the machine has no room for a copy
        if self.beside:
            self._apart = self._apart or self.ranks.apart()
            copies, ranks = self._copied(tensors), self._apart
            self._thread = threading.Thread(target=self._in_thread, args=(step, copies, meta, ranks), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(step, tensors, meta, self.ranks)
        self.stalled += time.monotonic() - begun

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises what that failed of."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The end of training: wait, but not for one who asks a second time to stop."""
        if error is None:
            self.wait()
        elif self._thread is not None and not isinstance(error, KeyboardInterrupt):
            self._thread.join()  # what it failed of would hide the error that ended training

    def take(self) -> dict[str, float]:
        """For a step's line: `save_stall`, seconds that training waited since the line before, and `save_seconds` of the last write."""
        stalled, self.stalled = self.stalled, 0.0
        return {"save_stall": stalled, "save_seconds": self.written}

    def _in_thread(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], ranks: Ranks) -> None:
        try:
            self._write(step, tensors, meta, ranks)
        except BaseException as error:  # raised again where training waits for it
            self._error = error

    def _write(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], ranks: Ranks) -> None:
        begun = time.monotonic()
        checkpoint.save(self.folder, step, tensors, meta, self.keep, ranks)
        self.written = time.monotonic() - begun

    @torch.no_grad()
    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """`tensors` on the host, in memory that is kept for the next time: pinned, where they come from a GPU."""
        found, cuda = {}, False
        for name, tensor in tensors.items():
            local = _local(tensor)
            cuda = cuda or local.is_cuda
            copy = self._copies.get(name)
            if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                copy = self._copies[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            copy.copy_(local, non_blocking=True)
            found[name] = _wrapped(copy, tensor) if isinstance(tensor, DTensor) else copy
        if cuda:
            torch.cuda.synchronize()
        return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _wrapped(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor as `like` whose part lies on the host; `DTensor.from_local` would take it back to the mesh's device."""
    return DTensor(local, like._spec, requires_grad=False)  # pyright: ignore


def _fits(tensors: dict[str, Tensor]) -> bool:
    """Whether the host has room for a copy of what this process holds; yes, where the system does not say."""
    needed = sum(_local(t).numel() * t.element_size() for t in tensors.values())
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration, ValueError):
        return True
    return needed <= SPARE * free
