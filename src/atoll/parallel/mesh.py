"""The mesh: which process stands where on which axis, and which layouts there can be.

Ranks are numbered with the expert axis innermost, then data_shard, then data_replicate: experts exchange tokens within a machine as
long as they fit into one. Every axis but those not built yet has samples of its own, so a step's samples divide by all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from atoll.config import Config, ConfigError, ParallelConfig

BUILT = ("data_replicate", "data_shard", "expert")


@dataclass(frozen=True)
class Mesh:
    """One mesh in two views.

    whole: (data_replicate, expert, data_shard), in the order in which a stack of experts is cut: to its owners, then among their shards.
    dense: (data_replicate, data), the last two axes as one: every other matrix is cut along it.
    """

    whole: DeviceMesh
    dense: DeviceMesh

    @property
    def experts(self) -> DeviceMesh:
        """(data_replicate, data_shard): the processes that hold parts or copies of the same experts."""
        return self.whole["data_replicate", "data_shard"]

    @property
    def expert_size(self) -> int:
        """Processes among which the experts are shared out."""
        return self.whole["expert"].size()


def make_mesh(p: ParallelConfig, device: str) -> Mesh:
    """The mesh of the processes now running; `device` is its type, "cpu" or "cuda". The layout has passed `check`."""
    at = torch.arange(size(p)).view(p.data_replicate, p.data_shard, p.expert)
    whole = DeviceMesh(device, at.transpose(1, 2), mesh_dim_names=("data_replicate", "expert", "data_shard"))
    # Ranks ascend along every axis: torch numbers the processes of a group so, and a mesh in another order would contradict it.
    return Mesh(whole, DeviceMesh(device, at.flatten(1), mesh_dim_names=("data_replicate", "data")))


def size(p: ParallelConfig) -> int:
    """Processes of a layout."""
    return math.prod(dataclasses.astuple(p))


# ---------------------------------------------------------------- what can be


def check(config: Config, processes: int) -> None:
    """Refuse a layout that cannot be, before anything is allocated. Raises `ConfigError`, one line with the nearest layout that can."""
    p = config.parallel
    problem = _problem(config, p, processes)
    if problem is not None:
        field, value, why = problem
        raise ConfigError(f"parallel.{field} = {value!r}: {why}; {_remedy(config, processes)}")
    if processes > 1 and config.balance.kind == "quantile" and config.balance.bins is None:
        raise ConfigError('balance.bins = None: exact quantiles cannot be pooled over processes; give bins, as "1000"')
    if processes > 1 and config.model.quantization != "none":
        raise ConfigError(
            f"model.quantization = {config.model.quantization!r}: not built yet over several processes; start one, or take 'none'"
        )


def _problem(config: Config, p: ParallelConfig, processes: int) -> tuple[str, int, str] | None:
    """(field, value, reason) of what is wrong with a layout; None when it can be."""
    for name, value in dataclasses.asdict(p).items():
        if value < 1:
            return name, value, "1 or more is expected"
        if value > 1 and name not in BUILT:
            return name, value, "this axis is not built yet; leave it at 1"
    if size(p) != processes:
        axes = " x ".join(f"{name} {value}" for name, value in dataclasses.asdict(p).items() if name in BUILT)
        field, value = ("data_shard", p.data_shard) if p.expert == 1 or processes % p.expert == 0 else ("expert", p.expert)
        return field, value, f"{axes} is for {size(p)} processes and {processes} run"
    for i, stage in enumerate(config.stages):
        if stage.batch % processes:
            return "data_shard", p.data_shard, f"{processes} processes do not divide stages.{i}.batch = {stage.batch}"
        micro = config.train.micro_batch
        if micro is not None and (share := stage.batch // processes) > micro and share % micro:
            return "data_shard", p.data_shard, f"a process's {share} sequences of stages.{i} are no multiple of train.micro_batch = {micro}"
    if p.expert > 1 and config.model.first_k_dense_replace >= config.model.num_hidden_layers:
        return "expert", p.expert, "no layer has routed experts"
    if config.model.num_experts % p.expert:
        return "expert", p.expert, f"does not divide model.num_experts = {config.model.num_experts}"
    return None


def _remedy(config: Config, processes: int) -> str:
    """The layout nearest to the one asked for, on these processes, or else the nearest number of them that has one."""
    if processes == 1 and _problem(config, config.parallel, asked := size(config.parallel)) is None:
        return f"start them by torchrun --nproc-per-node {asked}, or leave the axis at 1"
    for count in sorted(range(1, 2 * processes + 1), key=lambda n: (abs(n - processes), -n)):
        near = min(_possible(config, count), key=lambda p: _distance(p, config.parallel), default=None)
        if near is not None:
            layout = ", ".join(f"{name} = {getattr(near, name)}" for name in BUILT)
            return f"the nearest possible layout is {layout}" + (f" on {count} processes" if count != processes else "")
    return "start one process"  # which always can be


def _possible(config: Config, processes: int) -> list[ParallelConfig]:
    divisors = [n for n in range(1, processes + 1) if processes % n == 0]
    found = [ParallelConfig(r, processes // (r * e), e) for r, e in itertools.product(divisors, divisors) if processes % (r * e) == 0]
    return [p for p in found if _problem(config, p, processes) is None]


def _distance(p: ParallelConfig, asked: ParallelConfig) -> float:
    """Factors between two layouts, axis by axis; a tie goes to more shards."""
    apart = sum(abs(math.log(getattr(p, name) / max(1, getattr(asked, name)))) for name in BUILT)
    return apart - 1e-6 * p.data_shard
