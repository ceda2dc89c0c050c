"""The mesh: which process stands where on which axis, and which layouts there can be.

Ranks are numbered with the tensor axis innermost, then expert, context, data_shard and data_replicate: what exchanges most lies within a
machine as long as it fits into one. Every axis but context and tensor has samples of its own, so a step's samples divide by all of them.
Weights are cut along context as along data_shard.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.config import Config, ConfigError, ParallelConfig

BUILT = ("data_replicate", "data_shard", "expert", "context", "tensor")


@dataclass(frozen=True)
class Mesh:
    """One mesh in several views.

    whole: (data_replicate, expert, data_shard), in the order in which a stack of experts is cut: to its owners, then among their shards;
    its data_shard holds the context and the tensor axis. dense: (data_replicate, data), the processes of this one's tensor rank: every
    other matrix, or what the tensor axis leaves of it, is cut along the last axis. grid: (data_replicate, tensor, data), the same in the
    order in which a matrix is cut, None where tensor is 1. copy: the (tensor and) data axis as one, a whole model. context: that axis
    alone, None where it is 1.
    """

    whole: DeviceMesh
    dense: DeviceMesh
    copy: DeviceMesh
    context: DeviceMesh | None
    grid: DeviceMesh | None = None

    @property
    def experts(self) -> DeviceMesh:
        """(data_replicate, data_shard): the processes that hold parts or copies of the same experts."""
        return self.whole["data_replicate", "data_shard"]

    @property
    def expert_size(self) -> int:
        """Processes among which the experts are shared out."""
        return self.whole["expert"].size()

    @property
    def tensor(self) -> DeviceMesh | None:
        """The tensor axis alone, None where it is 1."""
        return None if self.grid is None else self.grid["tensor"]

    @property
    def tensor_size(self) -> int:
        """Processes that compute the same tokens with parts of the same matrices."""
        return 1 if self.grid is None else self.grid["tensor"].size()

    def over_data(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce in place over the processes that hold the same weights but for FSDP: of one tensor rank, all replicas."""
        for axis in ("data", "data_replicate"):
            group = self.dense.get_group(axis)
            if group.size() > 1:
                dist.all_reduce(tensor, op, group=group)

    def over_tensor(self, tensor: Tensor) -> None:
        """Sum in place over the tensor axis."""
        if self.grid is not None:
            dist.all_reduce(tensor, group=self.grid.get_group("tensor"))

    def first_of_tensor(self, tensor: Tensor) -> None:
        """That of the first process of the tensor axis, in place."""
        if self.grid is not None:
            dist.broadcast(tensor, group=self.grid.get_group("tensor"), group_src=0)


def make_mesh(p: ParallelConfig, device: str) -> Mesh:
    """The mesh of the processes now running; `device` is its type, "cpu" or "cuda". The layout has passed `check`."""
    at = torch.arange(size(p)).view(p.data_replicate, p.data_shard * p.context, p.expert, p.tensor)
    owners = at.transpose(1, 2).flatten(2)
    whole = DeviceMesh(device, owners, mesh_dim_names=("data_replicate", "expert", "data_shard"))
    # Ranks ascend along every axis: torch numbers the processes of a group so, and a mesh in another order would contradict it.
    copy = DeviceMesh(device, at.flatten(1), mesh_dim_names=("data_replicate", "data"))
    grid, dense = None, copy
    if p.tensor > 1:
        grid = DeviceMesh(device, at.flatten(1, 2).transpose(1, 2), mesh_dim_names=("data_replicate", "tensor", "data"))
        dense = grid["data_replicate", "data"]
    context = None
    if p.context > 1:
        rows = at.view(-1, p.context, p.expert * p.tensor).transpose(1, 2).flatten(0, 1)
        context = DeviceMesh(device, rows, mesh_dim_names=("rows", "context"))["context"]
    return Mesh(whole, dense, copy, context, grid)


def size(p: ParallelConfig) -> int:
    """Processes of a layout."""
    return math.prod(dataclasses.astuple(p))


def place(p: ParallelConfig, rank: int) -> tuple[int, int]:
    """Which share of a step's samples a process takes, and how many there are. Those of one context or tensor group take the same."""
    outer, inner = divmod(rank // p.tensor, p.context * p.expert)
    return outer * p.expert + inner % p.expert, size(p) // (p.context * p.tensor)


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


def _problem(config: Config, p: ParallelConfig, processes: int) -> tuple[str, int, str] | None:
    """(field, value, reason) of what is wrong with a layout; None when it can be."""
    for name, value in dataclasses.asdict(p).items():
        if value < 1:
            return name, value, "1 or more is expected"
        if value > 1 and name not in BUILT:
            return name, value, "this axis is not built yet; leave it at 1"
    if size(p) != processes:
        axes = " x ".join(f"{name} {value}" for name, value in dataclasses.asdict(p).items() if name in BUILT)
        field = next((name for name in ("expert", "context", "tensor") if processes % getattr(p, name)), "data_shard")
        value = getattr(p, field)
        return field, value, f"{axes} is for {size(p)} processes and {processes} run"
    shares = processes // (p.context * p.tensor)
    for i, stage in enumerate(config.stages):
        if stage.batch % shares:
            return "data_shard", p.data_shard, f"{shares} processes do not divide stages.{i}.batch = {stage.batch}"
        if stage.length % p.context or stage.length // p.context < config.model.short_conv_kernel_size - 1:
            return "context", p.context, f"does not cut stages.{i}.length = {stage.length} into even shares longer than a convolution"
        micro = config.train.micro_batch
        if micro is not None and (share := stage.batch // shares) > micro and share % micro:
            return "data_shard", p.data_shard, f"a process's {share} sequences of stages.{i} are no multiple of train.micro_batch = {micro}"
    if p.expert > 1 and config.model.first_k_dense_replace >= config.model.num_hidden_layers:
        return "expert", p.expert, "no layer has routed experts"
    if config.model.num_experts % p.expert:
        return "expert", p.expert, f"does not divide model.num_experts = {config.model.num_experts}"
    return _tensor_problem(config, p.tensor)


def _tensor_problem(config: Config, tensor: int) -> tuple[str, int, str] | None:
    """What the tensor axis cuts must be a multiple of it."""
    m = config.model
    cut = {
        "model.kda_num_heads": m.kda_num_heads,
        "model.num_attention_heads": m.num_attention_heads,
        "model.vocab_size": m.vocab_size,
        "model.intermediate_size": m.intermediate_size if m.first_k_dense_replace else 0,
        "model.num_shared_experts * model.moe_intermediate_size": m.num_shared_experts * m.moe_intermediate_size,
    }
    for name, value in cut.items():
        if value % tensor:
            return "tensor", tensor, f"does not divide {name} = {value}"
    if tensor > 1 and (config.balance.limits() or config.balance.kind == "local_quantile"):
        return "tensor", tensor, "balances by counts of whole micro-batches, whose tokens this axis shares out; leave it at 1"
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
    several = itertools.product(divisors, divisors, divisors, divisors)
    found = [ParallelConfig(r, processes // (r * e * c * t), e, c, tensor=t) for r, e, c, t in several if processes % (r * e * c * t) == 0]
    return [p for p in found if _problem(config, p, processes) is None]


def _distance(p: ParallelConfig, asked: ParallelConfig) -> float:
    """Factors between two layouts, axis by axis; a tie goes to more shards."""
    apart = sum(abs(math.log(getattr(p, name) / max(1, getattr(asked, name)))) for name in BUILT)
    return apart - 1e-6 * p.data_shard
