"""The tensor axis: the processes of it hold the same tokens and cut heads, inner widths and vocabulary among them.

Activations between sublayers are whole and alike on all of them. A sublayer takes its input through `TensorAxis.enter` (nothing forward;
backward the sum of the gradients) and gives its output through `TensorAxis.leave` (the sum; backward nothing), so that it costs one
all-reduce each way, and what lies outside sees whole values and whole gradients alone. Inside, a process runs its own heads, or its own
channels of a dense MLP and of the shared experts.

Routed experts stay whole: each process routes, projects and computes 1/N of the tokens, and its rows are added to its part of the shared
experts' sum, before the one all-reduce. To the experts a tensor rank is one more rank with tokens of its own: nothing is computed or sent
twice, each token is counted once in balancing, matrices keep their width (cut to I/N, each would still be fed every token, each token's
row would travel N times over the expert axis, and Muon would have to gather every expert), and FSDP cuts them over this axis too.

`TABLE` says of every parameter which of five it is; cutting refuses one that it does not name.

column  rows are cut: heads, channels or tokens of the vocabulary. The gradient of what is held is whole.
row     columns are cut, and the outputs summed. The gradient of what is held is whole.
tokens  whole on each process of the axis, used for a part of the tokens and cut by FSDP over the axis, which sums the gradient.
summed  the same on each, inside a sublayer: each has seen a part (its heads, its tokens), so gradients are summed over the axis.
alike   the same on each, outside: each has the whole gradient already, and a sum would be N times it. The first one's is taken, so that
        copies stay the same to the bit.
"""

from __future__ import annotations

import re
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.nn.delta_attention import DeltaAttention
from atoll.nn.head import Head
from atoll.nn.latent_attention import LatentAttention
from atoll.nn.latent_moe import LatentMoE, Routing
from atoll.parallel.pipeline_stages import layers_here
from atoll.parallel.tensor_loss import vocabulary_cross_entropy

Kind = Literal["column", "row", "tokens", "summed", "alike"]

TABLE: tuple[tuple[Kind, str], ...] = (
    # KDA and MLA, by heads
    ("column", r"self_attn\.([qkv]_proj|[qkv]_conv1d|f_b_proj|b_proj|g_proj|g_b_proj|q_b_proj|kv_b_proj)\.weight"),
    ("column", r"self_attn\.(A_log|dt_bias)"),
    ("row", r"self_attn\.o_proj\.weight"),
    ("summed", r"self_attn\.(f_a_proj|g_a_proj|q_a_proj|q_a_layernorm|kv_a_proj_with_mqa|kv_a_layernorm|o_norm)\.weight"),
    # dense MLP and shared experts, by channels
    ("column", r"(mlp|block_sparse_moe\.shared_experts)\.(gate|up)_proj\.weight"),
    ("row", r"(mlp|block_sparse_moe\.shared_experts)\.down_proj\.weight"),
    # routed experts, by tokens
    ("tokens", r"block_sparse_moe\.experts\.w[123]"),
    ("summed", r"block_sparse_moe\.(gate|routed_expert_(down_proj|norm|up_proj))\.weight"),
    # embedding and head, by tokens of the vocabulary
    ("column", r"language_model\.(model\.embed_tokens|lm_head)\.weight"),
    # between sublayers
    ("alike", r"(input|post_attention)_layernorm\.weight"),
    ("alike", r"(self_attention|mlp)_res_(norm|proj)\.weight"),
    ("alike", r"language_model\.model\.(norm|output_attn_res_norm|output_attn_res_proj)\.weight"),
    ("alike", r"(vision_tower|mm_projector)\..*"),
)

_LAYER = re.compile(r"language_model\.model\.layers\.\d+\.")


def kind_of(name: str) -> Kind:
    """What `TABLE` says of the parameter `name`. Raises ValueError when it says nothing."""
    inner = _LAYER.sub("", name, count=1)
    for kind, pattern in TABLE:
        if re.fullmatch(pattern, inner):
            return kind
    raise ValueError(f"{name}: no rule of parallel.tensor.TABLE names it; say there how the tensor axis treats it")


class TensorAxis:
    """The processes of one tensor group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def enter(self, x: Tensor) -> Tensor:
        """`x`, whose gradient is summed over the processes."""
        return _Enter.apply(x, self.group)  # type: ignore[no-any-return]

    def leave(self, x: Tensor) -> Tensor:
        """`x` summed over the processes; the gradient, alike on all, is that of each."""
        return _Leave.apply(x, self.group)  # type: ignore[no-any-return]

    def spread(self, x: Tensor) -> Tensor:
        """[..., n] of each process side by side, [..., N n]; each takes its own part of the gradient."""
        return _Spread.apply(x, self.group)  # type: ignore[no-any-return]

    def share(self, tokens: int) -> slice:
        """This process's rows of so many: as even as can be, the first processes one more."""
        return slice(self.rank * tokens // self.size, (self.rank + 1) * tokens // self.size)

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """This process's part of a whole tensor, a copy."""
        return x.chunk(self.size, dim)[self.rank].clone()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = x.new_empty(group.size(), *x.shape)
        dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1), group=group)
        return torch.cat(list(parts), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0].chunk(ctx.group.size(), -1)[ctx.group.rank()], None


def _summed(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


# ---------------------------------------------------------------- modules


class TensorMoE(LatentMoE):
    """`LatentMoE` whose routed experts take this process's part of the tokens, and whose shared experts its part of their channels."""

    axis: TensorAxis

    def forward(self, x: Tensor, *, mask: Tensor | None = None, routing: Routing | None = None) -> Tensor:
        """As `LatentMoE`; `routing` records, or forces, the experts of all tokens. Its balance loss is this process's part of the whole."""
        flat = self.axis.enter(x.reshape(-1, x.shape[-1]))
        counted = torch.ones(len(flat), dtype=torch.bool, device=x.device) if mask is None else mask.reshape(-1)
        mine = self.axis.share(len(flat))
        own = None if routing is None else Routing(None if routing.ids is None else routing.ids[mine])
        out = F.pad(self._routed(flat[mine], counted[mine], own), (0, 0, mine.start, len(flat) - mine.stop))
        if routing is not None and own is not None:
            self._note(routing, own, counted, mine)
        if self.shared_experts is not None:
            out = out + self.shared_experts(flat)
        return self.axis.leave(out).view_as(x)

    def _note(self, routing: Routing, own: Routing, counted: Tensor, mine: slice) -> None:
        if own.balance_loss is not None:  # a mean over these tokens
            routing.balance_loss = own.balance_loss * (counted[mine].sum() / counted.sum().clamp(min=1))
        if routing.ids is None and own.ids is not None:
            whole = F.pad(own.ids, (0, 0, mine.start, len(counted) - mine.stop))
            dist.all_reduce(whole, group=self.axis.group)
            routing.ids = whole


class TensorEmbedding(nn.Embedding):
    """This process's rows of the embedding; tokens of other rows come from the others."""

    axis: TensorAxis

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] of ids [...] over the whole vocabulary."""
        local = input - self.axis.rank * self.weight.shape[0]
        here = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(here, local, 0), self.weight)
        return self.axis.leave(torch.where(here.unsqueeze(-1), rows, 0))


class TensorHead(Head):
    """This process's rows of the output head."""

    axis: TensorAxis

    def logits(self, hidden: Tensor) -> Tensor:
        """As of a whole head: gathered, so for generation, not for a loss."""
        return self.axis.spread(super().logits(self.axis.enter(hidden)))

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return vocabulary_cross_entropy(hidden, self.weight, targets, self.axis.group)


def cut_tensor(model: Any, mesh: DeviceMesh) -> TensorAxis:
    """Leave `model` (whole layers, the same on every process of it) with this process's part over the one axis of `mesh`."""
    axis, dims = TensorAxis(mesh), {"column": 0, "row": 1}
    for name, p in list(model.named_parameters()):
        kind = kind_of(name)
        if kind in dims:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(axis.cut(p.detach(), dims[kind]), p.requires_grad))
    for layer in layers_here(model):
        _cut_heads(layer.self_attn, axis)
        if layer.mlp is not None:
            _summing(layer.mlp, axis)
    kinds = {LatentMoE: TensorMoE, nn.Embedding: TensorEmbedding, Head: TensorHead}
    for module in model.language_model.modules():
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]
            cast(TensorMoE, module).axis = axis
    return axis


def _cut_heads(mixer: DeltaAttention | LatentAttention, axis: TensorAxis) -> None:
    mixer.num_heads //= axis.size
    _summing(mixer, axis)


def _summing(module: nn.Module, axis: TensorAxis) -> None:
    """Let a module take its first argument through `enter` and give what it returns through `leave`, whatever its class."""

    def leave(_: nn.Module, args: Any, out: Any) -> Tensor:
        return axis.leave(out)

    module.register_forward_pre_hook(lambda _, args: (axis.enter(args[0]), *args[1:]))
    module.register_forward_hook(leave)
