"""The mesh: which process stands where on which axis.

Ranks are numbered with the tensor axis innermost, then expert, context, data_shard and data_replicate, and pipeline outermost: what
exchanges most lies within a machine as long as it fits into one, and what passes between stages, little, goes between machines. Weights are
cut along context as along data_shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.config import ParallelConfig
from atoll.parallel.layouts import size


@dataclass(frozen=True)
class Mesh:
    """One mesh in several views. The first four are of the processes that hold the same layers, a stage of the pipeline.

    whole: (data_replicate, expert, data_shard), in the order in which a stack of experts is cut: to its owners, then among their shards;
    its data_shard holds the context and the tensor axis. dense: (data_replicate, data), the processes of this one's tensor rank: every
    other matrix, or what the tensor axis leaves of it, is cut along the last axis. grid: (data_replicate, tensor, data), the same in the
    order in which a matrix is cut, None where tensor is 1. copy: (data_replicate, data) with the tensor axis in data, a whole stage.
    context, tensor, pipeline: those axes alone, None where they are 1; `pipelines` are the ranks of every pipeline.
    stage: one group of a stage's processes. peers: one group of those of dense.
    """

    whole: DeviceMesh
    dense: DeviceMesh
    grid: DeviceMesh | None
    copy: DeviceMesh
    context: DeviceMesh | None
    tensor: DeviceMesh | None
    pipeline: DeviceMesh | None
    pipelines: list[list[int]]
    stage: dist.ProcessGroup
    peers: dist.ProcessGroup

    @property
    def experts(self) -> DeviceMesh:
        """(data_replicate, data_shard): the processes that hold parts or copies of the same experts."""
        return self.whole["data_replicate", "data_shard"]

    @property
    def expert_size(self) -> int:
        """Processes among which the experts are shared out."""
        return self.whole["expert"].size()

    @property
    def tensor_size(self) -> int:
        """Processes that compute the same tokens with parts of the same matrices."""
        return 1 if self.tensor is None else self.tensor.size()

    @property
    def tensor_rank(self) -> int:
        """This process's number among those."""
        return 0 if self.tensor is None else self.tensor.get_local_rank()

    @property
    def counts(self) -> bool:
        """Whether this process is the one, of those that read the same tokens, that counts them: it has the last stage, and the loss."""
        last = self.pipeline is None or self.pipeline.get_local_rank() == self.pipeline.size() - 1
        return last and self.tensor_rank == 0

    def over_peers(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce in place over the processes that hold the same weights but for FSDP: of one stage and tensor rank, all replicas."""
        dist.all_reduce(tensor, op, group=self.peers)

    def over_tensor(self, tensor: Tensor) -> None:
        """Sum in place over the tensor axis."""
        if self.tensor is not None:
            dist.all_reduce(tensor, group=self.tensor.get_group())

    def first_of_tensor(self, tensor: Tensor) -> None:
        """That of the first process of the tensor axis, in place."""
        if self.tensor is not None:
            dist.broadcast(tensor, group=self.tensor.get_group(), group_src=0)

    def over_copy(self, tensor: Tensor) -> None:
        """Sum in place what the parts of one copy of the stage have found."""
        dist.all_reduce(tensor, group=self.copy.get_group("data"))

    def over_stages(self, tensor: Tensor) -> None:
        """Sum in place over the pipeline."""
        if self.pipeline is not None:
            dist.all_reduce(tensor, group=self.pipeline.get_group())


def make_mesh(p: ParallelConfig, device: str) -> Mesh:
    """The mesh of the processes now running; `device` is its type, "cpu" or "cuda". The layout has passed `check`."""
    at = torch.arange(size(p)).view(p.pipeline, p.data_replicate, p.data_shard * p.context, p.expert, p.tensor)

    def within_stages(ranks: Tensor, *names: str) -> DeviceMesh:
        return DeviceMesh(device, ranks, mesh_dim_names=("pipeline", *names))[names]

    def line(ranks: Tensor, name: str) -> DeviceMesh:
        """The mesh of one axis: this process's row of `ranks`."""
        return DeviceMesh(device, ranks, mesh_dim_names=("others", name))[name]

    whole = within_stages(at.transpose(2, 3).flatten(3), "data_replicate", "expert", "data_shard")
    # Ranks ascend along every axis: torch numbers the processes of a group so, and a mesh in another order would contradict it.
    copy = within_stages(at.flatten(2), "data_replicate", "data")
    stage = line(at.flatten(1), "stage").get_group()
    grid, dense, peers = None, copy, stage
    if p.tensor > 1:
        grid = within_stages(at.flatten(2, 3).transpose(2, 3), "data_replicate", "tensor", "data")
        dense = grid["data_replicate", "data"]
        peers = line(at.flatten(1, 3).transpose(1, 2).flatten(0, 1), "peers").get_group()
    context = line(at.view(-1, p.context, p.expert * p.tensor).transpose(1, 2).flatten(0, 1), "context") if p.context > 1 else None
    pipelines = at.flatten(1).T
    pipeline = line(pipelines, "pipeline") if p.pipeline > 1 else None
    tensor = None if grid is None else grid["tensor"]
    return Mesh(whole, dense, grid, copy, context, tensor, pipeline, pipelines.tolist(), stage, peers)
