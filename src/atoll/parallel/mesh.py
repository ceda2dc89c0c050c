"""The mesh: which process stands where on which axis, and which layouts there can be.

Ranks are numbered with the expert axis innermost, then context, data_shard and data_replicate, and pipeline outermost: experts exchange
tokens within a machine as long as they fit into one, and what passes between stages, little, goes between machines. Every axis but
context and pipeline has samples of its own, so a step's samples divide by all of those. Weights are cut along context as along data_shard.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from atoll.config import Config, ConfigError, ParallelConfig

BUILT = ("pipeline", "data_replicate", "data_shard", "expert", "context")
AXES = (*BUILT, "tensor")
UNCUT: dict[str, Any] = {"pipeline_virtual": 1, "pipeline_cut": ()}  # what goes with a pipeline, left alone


@dataclass(frozen=True)
class Mesh:
    """One mesh in three views, all of them of the processes that hold the same layers, and the pipeline across them.

    whole: (data_replicate, expert, data_shard), in the order in which a stack of experts is cut: to its owners, then among their shards;
    its data_shard holds the context axis. dense: (data_replicate, data), the last two axes as one: every other matrix is cut along it.
    context: that axis alone, None where it is 1. stage: one group of all of them. pipeline: that axis alone, None where it is 1;
    `pipelines` are the ranks of every pipeline.
    """

    whole: DeviceMesh
    dense: DeviceMesh
    context: DeviceMesh | None
    stage: dist.ProcessGroup
    pipeline: DeviceMesh | None
    pipelines: list[list[int]]

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
    at = torch.arange(size(p)).view(p.pipeline, p.data_replicate, p.data_shard * p.context, p.expert)
    inside = ("data_replicate", "expert", "data_shard")
    whole = DeviceMesh(device, at.transpose(2, 3), mesh_dim_names=("pipeline", *inside))
    # Ranks ascend along every axis: torch numbers the processes of a group so, and a mesh in another order would contradict it.
    dense = DeviceMesh(device, at.flatten(2), mesh_dim_names=("pipeline", "data_replicate", "data"))
    stage = DeviceMesh(device, at.flatten(1), mesh_dim_names=("pipeline", "stage"))["stage"].get_group()
    context = None
    if p.context > 1:
        rows = at.view(-1, p.context, p.expert).transpose(1, 2).flatten(0, 1)
        context = DeviceMesh(device, rows, mesh_dim_names=("rows", "context"))["context"]
    pipeline = whole["pipeline"] if p.pipeline > 1 else None
    return Mesh(whole[inside], dense["data_replicate", "data"], context, stage, pipeline, at.flatten(1).T.tolist())


def size(p: ParallelConfig) -> int:
    """Processes of a layout."""
    return math.prod(getattr(p, name) for name in AXES)


def place(p: ParallelConfig, rank: int) -> tuple[int, int]:
    """Which share of a step's samples a process takes, and how many shares there are. Those of one context group take the same, and
    those of one pipeline."""
    stage = size(p) // p.pipeline
    outer, inner = divmod(rank % stage, p.context * p.expert)
    return outer * p.expert + inner % p.expert, stage // p.context


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


def _problem(config: Config, p: ParallelConfig, processes: int) -> tuple[str, Any, str] | None:
    """(field, value, reason) of what is wrong with a layout; None when it can be."""
    for name in AXES:
        if (value := getattr(p, name)) < 1:
            return name, value, "1 or more is expected"
        if value > 1 and name not in BUILT:
            return name, value, "this axis is not built yet; leave it at 1"
    if size(p) != processes:
        axes = " x ".join(f"{name} {getattr(p, name)}" for name in BUILT)
        field = next((name for name in ("expert", "context", "pipeline") if processes % getattr(p, name)), "data_shard")
        value = getattr(p, field)
        return field, value, f"{axes} is for {size(p)} processes and {processes} run"
    shares = processes // p.context // p.pipeline
    for i, stage in enumerate(config.stages):
        if stage.batch % shares:
            return "data_shard", p.data_shard, f"{shares} processes do not divide stages.{i}.batch = {stage.batch}"
        if stage.length % p.context or stage.length // p.context < config.model.short_conv_kernel_size - 1:
            return "context", p.context, f"does not cut stages.{i}.length = {stage.length} into even shares longer than a convolution"
        if p.context > 1 and stage.segment is not None:
            return "context", p.context, f"cuts the same sequences as stages.{i}.segment = {stage.segment}; leave one of the two"
        micro = config.train.micro_batch if stage.micro_batch is None else stage.micro_batch
        if micro is not None and (share := stage.batch // shares) > micro and share % micro:
            return "data_shard", p.data_shard, f"a process's {share} sequences of stages.{i} are no multiple of train.micro_batch = {micro}"
    if p.expert > 1 and config.model.first_k_dense_replace >= config.model.num_hidden_layers:
        return "expert", p.expert, "no layer has routed experts"
    if config.model.num_experts % p.expert:
        return "expert", p.expert, f"does not divide model.num_experts = {config.model.num_experts}"
    return _pipeline_problem(config, p, shares)


def _pipeline_problem(config: Config, p: ParallelConfig, shares: int) -> tuple[str, Any, str] | None:
    """`_problem` of the pipeline, each of whose processes takes one of `shares` shares of a step's samples."""
    if p.pipeline_virtual < 1 or (p.pipeline == 1 and p.pipeline_virtual > 1):
        return "pipeline_virtual", p.pipeline_virtual, "1 is expected" if p.pipeline == 1 else "1 or more is expected"
    layers, stages = config.model.num_hidden_layers, p.pipeline * p.pipeline_virtual
    if stages > layers:
        field = "pipeline" if p.pipeline > layers else "pipeline_virtual"
        return field, getattr(p, field), f"{stages} stages are more than model.num_hidden_layers = {layers}"
    bounds = [0, *p.pipeline_cut, layers]
    if p.pipeline_cut and (len(p.pipeline_cut) != stages - 1 or any(a >= b for a, b in itertools.pairwise(bounds))):
        why = f"{stages - 1} ascending layers from 1 to {layers - 1} are expected, where the stages after the first begin"
        return "pipeline_cut", list(p.pipeline_cut), why
    if p.pipeline == 1:
        return None
    for i, stage in enumerate(config.stages):
        if stage.segment is not None:
            return "pipeline", p.pipeline, f"does not go with stages.{i}.segment = {stage.segment}; leave one of the two"
        share = stage.batch // shares
        micro = config.train.micro_batch if stage.micro_batch is None else stage.micro_batch
        count = share // min(micro or share, share)
        if count >= p.pipeline and (p.pipeline_virtual == 1 or count % p.pipeline == 0):
            continue
        fit = [n for n in range(1, share + 1) if share % n == 0 and share // n % p.pipeline == 0]
        field = "train.micro_batch" if stage.micro_batch is None else f"stages.{i}.micro_batch"
        remedy = f"; set {field} = {fit[-1]}" if fit else ""
        if count < p.pipeline:
            return "pipeline", p.pipeline, f"needs as many micro-batches, stages.{i} gives a process {count}{remedy}"
        why = f"pipeline = {p.pipeline} does not divide a process's {count} micro-batches of stages.{i}{remedy}"
        return "pipeline_virtual", p.pipeline_virtual, why
    return None


def _remedy(config: Config, processes: int) -> str:
    """The layout nearest to the one asked for, on these processes, or else the nearest number of them that has one."""
    if processes == 1 and _problem(config, config.parallel, asked := size(config.parallel)) is None:
        return f"start them by torchrun --nproc-per-node {asked}, or leave the axis at 1"
    for count in sorted(range(1, 2 * processes + 1), key=lambda n: (abs(n - processes), -n)):
        near = min(_possible(config, count), key=lambda p: _distance(p, config.parallel), default=None)
        if near is not None:
            layout = ", ".join(f"{name} = {getattr(near, name)}" for name in BUILT)
            changed = [name for name in UNCUT if getattr(near, name) != getattr(config.parallel, name)]
            layout += "".join(f", {name} = {UNCUT[name]}" for name in changed)
            return f"the nearest possible layout is {layout}" + (f" on {count} processes" if count != processes else "")
    return "start one process"  # which always can be


def _possible(config: Config, processes: int) -> list[ParallelConfig]:
    divisors = [n for n in range(1, processes + 1) if processes % n == 0]
    found = []
    for axes in itertools.product(divisors, repeat=len(BUILT) - 1):
        if processes % math.prod(axes) == 0:
            pipeline, replicate, expert, context = axes
            sizes = {"pipeline": pipeline, "data_replicate": replicate, "expert": expert, "context": context}
            one = dataclasses.replace(config.parallel, **sizes, data_shard=processes // math.prod(axes), tensor=1)
            found += [one, dataclasses.replace(one, **UNCUT)]
    return [p for p in found if _problem(config, p, processes) is None]


def _distance(p: ParallelConfig, asked: ParallelConfig) -> float:
    """Factors between two layouts, axis by axis; a tie goes to more shards."""
    apart = sum(abs(math.log(getattr(p, name) / max(1, getattr(asked, name)))) for name in BUILT)
    changed = sum(getattr(p, name) != getattr(asked, name) for name in UNCUT)
    return apart + 1e-3 * changed - 1e-6 * p.data_shard
