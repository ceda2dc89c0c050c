"""Cutting a model over a mesh with FSDP2, and naming what each process holds.

Matrices are cut by rows over the `data` axis of the dense mesh and come together a layer at a time while they are used; a stack of
experts is cut by experts, first among their owners (the `expert` axis), then over `data_shard`. The rest, norms, decays, filters,
depth queries, is a thousandth of the weights and stays whole on every process: it needs its own type (decay and filters are float32
in a bfloat16 model) and would leave most processes with nothing.

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

from atoll.nn.block_residual import Stream
from atoll.nn.latent_moe import Experts
from atoll.parallel.context import Context, cut_context
from atoll.parallel.experts import share_out
from atoll.parallel.mesh import Mesh

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
    """A cut model by parameter name. `held`: what this process steps, plain tensors; `cuts`: of those that are not whole."""

    model: nn.Module
    mesh: Mesh
    held: dict[str, nn.Parameter]
    cuts: dict[str, Cut]
    num_parameters: int  # of the whole model, as a checkpoint stores them
    context: Context | None

    def wrap(self, name: str, local: Tensor) -> Tensor:
        """A tensor that goes with the parameter `name` (its gradient, its momentum), as a DTensor when that is cut."""
        cut = self.cuts.get(name)
        return local if cut is None or local.dim() != len(cut.shape) else cut.wrap(local)

    def take_gradients(self) -> None:
        """Hand the gradients that FSDP has reduced to `held`. Of whole parameters they are still this process's own."""
        for name, p in self.model.named_parameters():
            if name in self.cuts:
                self.held[name].grad = None if p.grad is None else cast(DTensor, p.grad).to_local()

    def tensors(self) -> dict[str, Tensor]:
        """The model's tensors under its own names, in the type they are stored in: live, but for cut ones that are held wider."""
        self.settle()
        state = self.model.state_dict()
        for name, cut in self.cuts.items():
            state[name] = cut.wrap(self.held[name].detach().to(cut.dtype))
        return {name: t.detach() for name, t in state.items()}

    def settle(self) -> None:
        """Let go of whatever was brought together: the next pass starts from what `held` then is."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def shard(model: Any, mesh: Mesh, outputs: type) -> Sharded:
    """Cut `model` (whole, the same on every process) over `mesh`, in place. `outputs`: the dataclass that its forward returns."""
    for kind in (Stream, outputs):
        _register(kind)
    count, dtypes = model.num_parameters(), {n: p.dtype for n, p in model.named_parameters()}
    shapes = {n: p.shape for n, p in model.named_parameters()}
    layers = model.language_model.model.layers
    context = None if mesh.context is None else cut_context(model, mesh.context)
    for moe in model.moe_layers():
        if mesh.expert_size > 1:
            share_out(moe, mesh.whole["expert"])
    whole = {p for n, p in model.named_parameters() if not _is_cut(n, p)}
    compute = next(dtypes[n] for n, p in model.named_parameters() if p not in whole)
    for p in model.parameters():
        if p not in whole and p.dtype in LOW_PRECISION:
            p.data = p.data.float()
    types = {"param_dtype": compute, "reduce_dtype": torch.float32} if compute in LOW_PRECISION else {}
    policy = MixedPrecisionPolicy(**types, cast_forward_inputs=False)
    for layer in layers:
        if mesh.expert_size > 1 and layer.block_sparse_moe is not None:
            fully_shard(layer.block_sparse_moe.experts, mesh=mesh.experts, mp_policy=policy, ignored_params=whole)
        fully_shard(layer, mesh=mesh.dense, mp_policy=policy, ignored_params=whole)
    fully_shard(model, mesh=mesh.dense, mp_policy=policy, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by all processes' targets already
            module.set_force_sum_reduction_for_comms(True)
    model.register_forward_hook(_let_go)
    return Sharded(model, mesh, *_held(model, mesh, shapes, dtypes), count, context)


def _held(
    model: Any, mesh: Mesh, shapes: dict[str, torch.Size], dtypes: dict[str, torch.dtype]
) -> tuple[dict[str, nn.Parameter], dict[str, Cut]]:
    held, cuts = {}, {}
    owned = {n for n, _ in _owned(model)} if mesh.expert_size > 1 else set()
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            place = (mesh.whole, (Replicate(), Shard(0), Shard(0))) if name in owned else (mesh.dense, (Replicate(), Shard(0)))
            cuts[name] = Cut(*place, shapes[name], dtypes[name])
            held[name] = nn.Parameter(p.to_local().detach(), p.requires_grad)
        else:
            held[name] = p
    return held, cuts


def _let_go(model: Any, args: Any, output: Any) -> None:
    """After an evaluation the root's weights are given up: FSDP keeps them for a backward pass, and the next one would go wrong."""
    if not torch.is_grad_enabled():
        model.reshard()


def _owned(model: Any) -> Iterable[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield from ((f"{name}.{leaf}", p) for leaf, p in module.named_parameters())


def _is_cut(name: str, p: nn.Parameter) -> bool:
    """Matrices of more than one row, and stacks of experts. Filters [C,1,taps] are stacks of nothing."""
    return (p.dim() == 2 and p.shape[0] > 1) or (p.dim() == 3 and ".experts." in name)


# ---------------------------------------------------------------- what FSDP must see into

_REGISTERED: set[type] = set()  # classes that carry tensors into and out of the cut modules: its hooks hang on those tensors


def _register(kind: type) -> None:
    if kind not in _REGISTERED:
        register_dataclass(kind)
        _REGISTERED.add(kind)
