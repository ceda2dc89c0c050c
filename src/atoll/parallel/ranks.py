"""What a process of a run knows of the others: its number, sums over all of them, and decisions taken once.

`torchrun` starts the processes and names them in the environment. Everything here goes through the default process group
(unless `apart`), CPU tensors through gloo and CUDA tensors through NCCL, so a decision never waits for the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from atoll.config import UserError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # of a collective: longer than rank 0's longest work by itself (gzip and xz of the held-out split)


@dataclass(frozen=True)
class Ranks:
    """The processes of a run. Of one process alone (`ALONE`) every method is a formality, so that callers have one path."""

    rank: int = 0
    size: int = 1
    restarted: bool = False  # torchrun started these processes in place of ones that had died
    own: dist.ProcessGroup | None = None  # what they speak through, in place of the default group

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all of them; None of one process alone."""
        return (self.own or dist.group.WORLD) if self.size > 1 else None

    def apart(self) -> Ranks:
        """The same processes through a group of their own, on CPUs: for a thread beside the one that trains. All of them call it."""
        return replace(self, own=dist.new_group(backend="gloo", timeout=TIMEOUT)) if self.size > 1 else self

    def sum_(self, tensor: Tensor) -> None:
        """Sum `tensor` over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)

    def max_(self, tensor: Tensor) -> None:
        """The elementwise maximum of `tensor` over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)

    def from_main_(self, tensor: Tensor) -> None:
        """Rank 0's `tensor`, in place."""
        if self.size > 1:
            dist.broadcast(tensor, 0, group=self.group)

    def totals(self, counts: Sequence[int]) -> list[int]:
        """Integers summed over the processes."""
        if self.size == 1:
            return list(counts)
        pooled = torch.tensor(counts, dtype=torch.int64)
        self.sum_(pooled)
        return pooled.tolist()

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any of the processes."""
        return self.totals([int(flag)])[0] > 0

    def longest(self, seconds: float) -> float:
        """The largest of the processes' numbers: what all of them will have to wait for."""
        if self.size == 1:
            return seconds
        pooled = torch.tensor(seconds, dtype=torch.float64)
        self.max_(pooled)
        return float(pooled)

    def gather(self, found: T) -> list[T]:
        """What each process has found, by rank; on all of them."""
        every: list[Any] = [found] * self.size
        if self.size > 1:
            dist.all_gather_object(every, found, group=self.group)
        return every

    def on_main(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, which alone does it. Its `UserError` is raised there; the others then leave without a word."""
        if self.size == 1:
            return work()
        found: list[Any] = [None, False]
        try:
            if self.main:
                found = [work(), True]
        finally:  # also when the work failed: the others must not wait for it
            dist.broadcast_object_list(found, 0, group=self.group)
        if not found[1]:
            raise SystemExit(2)
        return found[0]

    @contextmanager
    def on_main_throughout(self, enter: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """A block in a context that rank 0 alone enters, before the others go on. Raises as `on_main` does."""
        with ExitStack() as stack:
            if self.size == 1 or self.main:
                found = enter()
                self.on_main(lambda: bool(stack.enter_context(found)))
            else:
                self.on_main(lambda: None)
            yield

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """A block that rank 0 goes through before the others, who find what it has put into a cache. Raises as `on_main` does."""
        if self.size == 1:
            yield
            return
        fine = [False]
        if not self.main:
            dist.broadcast_object_list(fine, 0, group=self.group)
            if not fine[0]:
                raise SystemExit(2)
            yield
            return
        try:
            yield
            fine = [True]
        finally:
            dist.broadcast_object_list(fine, 0, group=self.group)


ALONE = Ranks()


@contextmanager
def started(device: str) -> Iterator[Ranks]:
    """The processes that `torchrun` started, joined for the length of a block; `ALONE` when it did not, or started one.

    `device` is "auto", "cpu" or "cuda"; with CUDA each process takes the card of its local rank. Raises `UserError` when there are too few.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    if dist.is_initialized():  # by the caller, who also ends it
        yield Ranks(dist.get_rank(), dist.get_world_size())
        return
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda:
        _take_card(int(os.environ.get("LOCAL_RANK", "0")))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # The store outlives a restart: without a name of their own the new processes would find the addresses of the dead.
    own = PrefixStore(f"atoll-{restarts}", store)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=own, rank=rank, world_size=size, timeout=TIMEOUT)
    yield Ranks(rank, size, restarts > 0)
    dist.destroy_process_group()  # not after an error: it would wait for processes that are gone


def _take_card(local: int) -> None:
    cards = torch.cuda.device_count()
    if local >= cards:
        raise UserError(
            f"torchrun: process {local} of this machine finds {cards} CUDA devices; start at most {cards} with --nproc-per-node"
        )
    torch.cuda.set_device(local)
