"""Run a function on several gloo ranks of this machine, each a fresh process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing


def _one(rank: int, world: int, port: int, folder: str, job: Callable[..., Any], words: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        torch.save(job(*words), Path(folder) / f"{rank}.pt")
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def on_ranks(world: int, folder: Path, job: Callable[..., Any], *words: Any) -> list[Any]:
    """What `job(*words)` returned on each of `world` ranks (tensors, numbers, containers of them). `job` must be importable by name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_one, (world, port, str(folder), job, words), nprocs=world)  # pyright: ignore
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]
