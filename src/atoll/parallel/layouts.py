"""Layouts: how many processes an axis has, whose samples are whose, and which layouts there can be.

Processes along tensor and pipeline read the same samples, those along context the same rows, cut among them; a step's samples divide by
all other axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from atoll.config import Config, ConfigError, ParallelConfig

AXES = ("pipeline", "data_replicate", "data_shard", "expert", "context", "tensor")
UNCUT: dict[str, Any] = {"pipeline_virtual": 1, "pipeline_cut": ()}  # what goes with a pipeline, left alone


def size(p: ParallelConfig) -> int:
    """Processes of a layout."""
    return math.prod(getattr(p, name) for name in AXES)


def place(p: ParallelConfig, rank: int) -> tuple[int, int]:
    """Which share of a step's samples a process takes, and how many shares there are. Those of one context or tensor group, and those of
    one pipeline, take the same."""
    outer, inner = divmod(rank % (size(p) // p.pipeline) // p.tensor, p.context * p.expert)
    return outer * p.expert + inner % p.expert, shares(p)


def shares(p: ParallelConfig) -> int:
    """Into how many shares a step's samples are cut."""
    return p.data_replicate * p.data_shard * p.expert


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


def _problem(config: Config, p: ParallelConfig, processes: int) -> tuple[str, Any, str] | None:
    """(field, value, reason) of what is wrong with a layout; None when it can be."""
    for name in AXES:
        if (value := getattr(p, name)) < 1:
            return name, value, "1 or more is expected"
    if size(p) != processes:
        axes = " x ".join(f"{name} {getattr(p, name)}" for name in AXES)
        field = next((name for name in ("expert", "context", "tensor", "pipeline") if processes % getattr(p, name)), "data_shard")
        return field, getattr(p, field), f"{axes} is for {size(p)} processes and {processes} run"
    for i in range(len(config.stages)):
        if (problem := _stage_problem(config, p, i)) is not None:
            return problem
    if p.expert > 1 and config.model.first_k_dense_replace >= config.model.num_hidden_layers:
        return "expert", p.expert, "no layer has routed experts"
    if config.model.num_experts % p.expert:
        return "expert", p.expert, f"does not divide model.num_experts = {config.model.num_experts}"
    return _tensor_problem(config, p) or _pipeline_problem(config, p)


def _stage_problem(config: Config, p: ParallelConfig, i: int) -> tuple[str, Any, str] | None:
    """`_problem` of the rows of training stage `i`."""
    stage, count = config.stages[i], shares(p)
    if stage.batch % count:
        return "data_shard", p.data_shard, f"{count} processes do not divide stages.{i}.batch = {stage.batch}"
    if stage.length % p.context or stage.length // p.context < config.model.short_conv_kernel_size - 1:
        return "context", p.context, f"does not cut stages.{i}.length = {stage.length} into even shares longer than a convolution"
    for axis in ("context", "pipeline"):
        if getattr(p, axis) > 1 and stage.segment is not None:
            why = f"does not go with stages.{i}.segment = {stage.segment}, which computes rows piece by piece; leave one of the two"
            return axis, getattr(p, axis), why
    (field, micro), share = _micro_batch(config, i), stage.batch // count
    if micro is not None and share > micro and share % micro:
        return "data_shard", p.data_shard, f"a process's {share} sequences of stages.{i} are no multiple of {field} = {micro}"
    return None


def _micro_batch(config: Config, i: int) -> tuple[str, int | None]:
    """The setting that says how many sequences a micro-batch of training stage `i` has, and its value."""
    own = config.stages[i].micro_batch
    return ("train.micro_batch", config.train.micro_batch) if own is None else (f"stages.{i}.micro_batch", own)


def _tensor_problem(config: Config, p: ParallelConfig) -> tuple[str, Any, str] | None:
    """What the tensor axis cuts must be a multiple of it."""
    m, tensor = config.model, p.tensor
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


def _pipeline_problem(config: Config, p: ParallelConfig) -> tuple[str, Any, str] | None:
    """`_problem` of the pipeline."""
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
        share = stage.batch // shares(p)
        field, micro = _micro_batch(config, i)
        count = share // min(micro or share, share)
        if count >= p.pipeline and (p.pipeline_virtual == 1 or count % p.pipeline == 0):
            continue
        fit = [n for n in range(1, share + 1) if share % n == 0 and share // n % p.pipeline == 0]
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
            layout = ", ".join(f"{name} = {getattr(near, name)}" for name in AXES)
            changed = [name for name in UNCUT if getattr(near, name) != getattr(config.parallel, name)]
            layout += "".join(f", {name} = {UNCUT[name]}" for name in changed)
            return f"the nearest possible layout is {layout}" + (f" on {count} processes" if count != processes else "")
    return "start one process"  # which always can be


def _possible(config: Config, processes: int) -> list[ParallelConfig]:
    found = []
    for sizes in _products(processes, len(AXES)):
        one = dataclasses.replace(config.parallel, **dict(zip(AXES, sizes, strict=True)))
        found += [one, dataclasses.replace(one, **UNCUT)]
    return [p for p in found if _problem(config, p, processes) is None]


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ways of writing `number` as a product of so many factors, in order."""
    if factors == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        for rest in _products(number // first, factors - 1):
            yield (first, *rest)


def _distance(p: ParallelConfig, asked: ParallelConfig) -> float:
    """Factors between two layouts, axis by axis; a tie goes to more shards."""
    apart = sum(abs(math.log(getattr(p, name) / max(1, getattr(asked, name)))) for name in AXES)
    changed = sum(getattr(p, name) != getattr(asked, name) for name in UNCUT)
    return apart + 1e-3 * changed - 1e-6 * p.data_shard
