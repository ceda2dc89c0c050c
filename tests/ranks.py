"""Run a function on N processes that can talk to one another (gloo, one thread each), inside a test.

The processes are forked from a server that has imported torch once and has never run a backward pass, so each starts in a fraction of
a second. They meet through a file, so no port can be taken. A process that fails, dies or is late ends them all, and the test fails
with its traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [
    *("torch._dynamo", "torch.export", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"),
    *("torch.distributed.checkpoint.hf_storage", "torch.utils.tensorboard.writer", "atoll.model", "atoll.train.trainer"),
]


def on_ranks(count: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """`function(*args)` on `count` processes at once; what each gave, by rank. `function` stands at the top of a module, all is pickled.

    The default process group is up in it. Raises AssertionError when a process fails, dies, or takes more than `timeout` seconds.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for rank in range(count):
            ours, theirs = server.Pipe(duplex=False)
            job = pickle.dumps((function, args))
            process = server.Process(target=_child, args=(theirs, rank, count, folder, job, timeout), daemon=True)
            process.start()
            theirs.close()
            started[ours] = (rank, process)
        try:
            return _collect(started, time.monotonic() + timeout)
        finally:
            for connection, (_, process) in started.items():
                process.kill()
                process.join()
                connection.close()


def _collect(started: dict[Connection, Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(started):
        open_ = [c for c, (rank, _) in started.items() if rank not in results]
        ready = wait(open_, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [started[c][0] for c in open_]
            raise AssertionError(f"ranks {late} of {len(started)} gave nothing in time")
        for connection in ready:
            rank, process = started[connection]
            try:
                fine, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                process.join(5)
                raise AssertionError(f"rank {rank} of {len(started)} died, exit code {process.exitcode}") from None
            if not fine:
                raise AssertionError(f"rank {rank} of {len(started)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _child(connection: Connection, rank: int, count: int, folder: str, job: bytes, timeout: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    sys.path[:0] = [str(Path(__file__).parent)]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(job)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count, timeout=limit)
        answer = True, function(*args)
        dist.barrier()
    except BaseException:
        answer = False, traceback.format_exc()
    connection.send_bytes(pickle.dumps(answer))
    connection.close()
    os._exit(0)
