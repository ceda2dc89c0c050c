"""Device, dtype, threads and determinism of a run, and the model built from its seed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from atoll.config import Config, TrainConfig, UserError
from atoll.optim import ModelOptimizer
from atoll.parallel.ranks import ALONE, Ranks
from atoll.train.host import keep_freed_memory

_DETERMINISTIC: Any = torch.utils.deterministic  # its one setting is hidden from type checkers


def device_of(config: TrainConfig) -> torch.device:
    """The device of a run; "auto" takes CUDA when there is one. Raises `UserError` when the one asked for is not there."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f'train.device = {name!r}: no such device; take "auto", "cpu" or "cuda"') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f'train.device = {name!r}: torch finds no CUDA device here; take "cpu", or install torch\'s CUDA build')
    return device


def dtype_of(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Type of the weights: "auto" is float32 on a CPU and bfloat16 (with float32 masters) on a GPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


@contextmanager
def settled(config: TrainConfig) -> Iterator[None]:
    """Threads, memory and deterministic algorithms for a run; what was before comes back at the end, the allocator's habit aside.

    Where an operation has no deterministic form (on a GPU), the other is taken without a word; no empty memory is filled, which costs
    time and changes nothing for code that writes before it reads.
    """
    if device_of(config).type == "cpu":
        keep_freed_memory()
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = _DETERMINISTIC.fill_uninitialized_memory
    if device_of(config).type == "cpu":
        keep_freed_memory()
    try:
        torch.set_num_threads(config.threads or threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        _DETERMINISTIC.fill_uninitialized_memory = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*determinis.*")
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing here changes one in place
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        _DETERMINISTIC.fill_uninitialized_memory = fill


def build(config: Config, resumed: bool = False, ranks: Ranks = ALONE) -> tuple[Any, ModelOptimizer]:
    """Model and optimizer at step 0: a function of the settings, and of the weights that `train.init` names; cut over `ranks`.

    `resumed`: a checkpoint will fill them, so those weights are not read and need not be there any more.
    """
    from atoll.model import Model
    from atoll.train.initial import fill

    device = device_of(config.train)
    torch.manual_seed(config.train.seed)
    model = Model(config.model, config.balance, dtype=dtype_of(config.train, device), device=device)
    model.gradient_checkpointing = config.train.gradient_checkpointing
    if config.train.init is not None and not resumed:
        fill(model, config.train.init)
    ns_dtype = torch.bfloat16 if device.type == "cuda" else None
    if ranks.size == 1:
        return model, ModelOptimizer(model, config.optim, config.model, ns_dtype)
    from atoll.model import Output
    from atoll.parallel import ShardedOptimizer, make_mesh, shard

    sharded = shard(model, make_mesh(config.parallel, device.type), config.parallel, Output)
    return sharded.pipeline or model, ShardedOptimizer(sharded, ranks, config.optim, config.model, ns_dtype)
