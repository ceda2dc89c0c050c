"""Cutting a model over a mesh with FSDP2, and naming what each process holds.

Matrices are cut by rows over the `data` axis of the dense mesh and come together a layer at a time while they are used; a stack of
experts is cut by experts, first among their owners (the `expert` axis), then over `data_shard`. The rest, norms, decays, filters,
depth queries, is a thousandth of the weights and stays whole on every process: it needs its own type (decay and filters are float32
in a bfloat16 model) and would leave most processes with nothing. All of this is of what the tensor axis, which comes first, has left.

In a bfloat16 model the cut matrices are held in float32, their masters, and rounded as they are brought together, so gradients are
reduced and kept in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.export import register_dataclass

from atoll.config import ParallelConfig
from atoll.nn.block_residual import Stream
from atoll.nn.latent_moe import Experts
from atoll.parallel.context import Context, cut_context
from atoll.parallel.experts import share_out
from atoll.parallel.images import look_together
from atoll.parallel.mesh import Mesh
from atoll.parallel.pipeline import Pipelined
from atoll.parallel.pipeline_stages import cut_layers, layers_here
from atoll.parallel.pipeline_wire import Wire
from atoll.parallel.tensor import Kind, cut_tensor, kind_of

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Cut:
    """How one parameter is cut: its shape as a whole and, a mesh axis each, where it goes."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    dtype: torch.dtype  # it computes in, and is stored in; what is held may be wider

    def wrap(self, local: Tensor) -> DTensor:
        """A tensor cut as the parameter is, of which this process holds `local`; shares its memory."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)


@dataclass(frozen=True)
class Sharded:
    """A cut model by tensor name.

    held: what this process steps, plain tensors. cuts: of parameters and buffers that are not whole. by_fsdp: parameters whose gradients
    FSDP reduces. kinds: what the tensor axis does with each, see `parallel.tensor`; empty without it.
    """

    model: nn.Module
    mesh: Mesh
    held: dict[str, nn.Parameter]
    cuts: dict[str, Cut]
    by_fsdp: frozenset[str]
    kinds: dict[str, Kind]
    num_parameters: int  # of the whole model, as a checkpoint stores them
    context: Context | None
    pipeline: Pipelined | None  # the model as it is called where its layers are cut among processes

    def wrap(self, name: str, local: Tensor) -> Tensor:
        """A tensor that goes with the parameter `name` (its gradient, its momentum), as a DTensor when that is cut."""
        cut = self.cuts.get(name)
        return local if cut is None or local.dim() != len(cut.shape) else cut.wrap(local)

    def take_gradients(self) -> None:
        """Hand the gradients that FSDP has reduced to `held`. Of whole parameters they are still this process's own."""
        for name, p in self.model.named_parameters():
            if name in self.by_fsdp:
                self.held[name].grad = None if p.grad is None else cast(DTensor, p.grad).to_local()

    def tensors(self) -> dict[str, Tensor]:
        """The model's tensors under its own names, in the type they are stored in: live, but for cut ones that are held wider."""
        self.settle()
        state = self.model.state_dict()
        for name, cut in self.cuts.items():
            local = self.held[name].detach() if name in self.held else state[name]
            state[name] = cut.wrap(local.to(cut.dtype))
        return {name: t.detach() for name, t in state.items()}

    def settle(self) -> None:
        """Let go of whatever was brought together: the next pass starts from what `held` then is."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def shard(model: Any, mesh: Mesh, layout: ParallelConfig, outputs: type) -> Sharded:
    """Cut `model` (whole, the same on every process) over `mesh`, that of `layout`, in place. `outputs`: the dataclass that its forward
    returns."""
    for kind in (Stream, outputs):
        _register(kind)
    count, whole_ones = model.num_parameters(), {n: (t.shape, t.dtype) for n, t in model.state_dict().items()}
    compute = model.language_model.lm_head.weight.dtype
    pipeline = None
    if mesh.pipeline is not None:
        mine, every = cut_layers(model, layout, mesh.pipeline.get_local_rank())
        pipeline = Pipelined(model, mine, every, Wire(mesh.pipelines), mesh.stage, compute)
    kinds: dict[str, Kind] = {} if mesh.tensor is None else {n: kind_of(n) for n, _ in model.named_parameters()}
    if mesh.tensor is not None:
        cut_tensor(model, mesh.tensor)
    context = None if mesh.context is None else cut_context(model, mesh.context)
    for moe in model.moe_layers():
        if mesh.expert_size > 1:
            share_out(moe, mesh.whole["expert"])
    _apply_fsdp(model, mesh, {p for n, p in model.named_parameters() if not _is_cut(n, whole_ones[n][0])}, compute)
    model.register_forward_hook(_let_go)
    if model.vision_tower is not None:
        look_together(model, mesh)
    cuts = _cuts(model, mesh, kinds, whole_ones)
    by_fsdp = frozenset(n for n, p in model.named_parameters() if isinstance(p, DTensor))
    held = {n: _held(p) for n, p in model.named_parameters()}
    return Sharded(model, mesh, held, cuts, by_fsdp, kinds, count, context, pipeline)


def _apply_fsdp(model: Any, mesh: Mesh, whole: set[nn.Parameter], compute: torch.dtype) -> None:
    """Cut all parameters but those of `whole` with FSDP2; they are brought together in type `compute`."""
    for p in model.parameters():
        if p not in whole and p.dtype in LOW_PRECISION:
            p.data = p.data.float()
    types = {"param_dtype": compute, "reduce_dtype": torch.float32} if compute in LOW_PRECISION else {}
    policy = MixedPrecisionPolicy(**types, cast_forward_inputs=False)
    for layer in layers_here(model):
        if _experts_apart(mesh) and layer.block_sparse_moe is not None:
            fully_shard(layer.block_sparse_moe.experts, mesh=mesh.experts, mp_policy=policy, ignored_params=whole)
        fully_shard(layer, mesh=mesh.dense, mp_policy=policy, ignored_params=whole)
    fully_shard(model, mesh=mesh.dense, mp_policy=policy, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by all processes' targets already
            module.set_force_sum_reduction_for_comms(True)


def _experts_apart(mesh: Mesh) -> bool:
    """Whether experts are cut over other processes than the rest of their layer."""
    return mesh.expert_size > 1 or mesh.tensor is not None


def _held(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(p.to_local().detach(), p.requires_grad) if isinstance(p, DTensor) else p


def _cuts(model: Any, mesh: Mesh, kinds: dict[str, Kind], whole: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Cut]:
    """How every tensor lies that is not whole on this process."""
    owned = {n for n, _ in _owned(model)} if _experts_apart(mesh) else set()
    cuts = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        by_data = Shard(0) if isinstance(t, DTensor) else Replicate()
        by_tensor = {"column": Shard(0), "row": Shard(1)}.get(kinds.get(name, ""), Replicate())
        if name in owned:
            place = (mesh.whole, (Replicate(), Shard(0), by_data))
        elif mesh.grid is not None:
            place = (mesh.grid, (Replicate(), by_tensor, by_data))
        else:
            place = (mesh.dense, (Replicate(), by_data))
        if any(isinstance(p, Shard) for p in place[1]) and name in whole:
            cuts[name] = Cut(*place, *whole[name])
    return cuts


def _let_go(model: Any, args: Any, output: Any) -> None:
    """After an evaluation the root's weights are given up: FSDP keeps them for a backward pass, and the next one would go wrong."""
    if not torch.is_grad_enabled():
        model.reshard()


def _owned(model: Any) -> Iterable[tuple[str, Tensor]]:
    """Stacks of experts, and of their scales."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield from ((f"{name}.{leaf}", t) for leaf, t in module.state_dict().items())


def _is_cut(name: str, shape: torch.Size) -> bool:
    """Matrices of more than one row, and stacks of experts. Filters [C,1,taps] are stacks of nothing."""
    return (len(shape) == 2 and shape[0] > 1) or (len(shape) == 3 and ".experts." in name)


# ---------------------------------------------------------------- what FSDP must see into

_REGISTERED: set[type] = set()  # classes that carry tensors into and out of the cut modules: its hooks hang on those tensors


def _register(kind: type) -> None:
    if kind not in _REGISTERED:
        register_dataclass(kind)
        _REGISTERED.add(kind)
