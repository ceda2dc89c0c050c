"""The context axis: a flat row of documents is cut into contiguous shares, one a process, also in the middle of a document.

KDA (Kimi K3 report §5.1.2, eq. 17). A share maps the state S that enters it to M S + S', both found from its own tokens: S' starting from
nothing, M (and what each token reads of S, a row P) by the same recurrence without values from the identity. One all-gather of M and S'
a layer, of a size that does not depend on the tokens, and each process folds what came before it in its document: S ← M_j S + S'_j. Its
outputs are then those from nothing, plus P S. The convolutions take the last inputs of the process before. MLA gathers the latents of all.

All of it is written in terms of operations that have gradients, and an all-gather whose gradient is summed back to where it came from;
every process is in every exchange, also one that needs nothing from it, so that the backward passes meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.nn.cache import DeltaState
from atoll.nn.carry import DeltaCarry, Share, share_of
from atoll.nn.delta_attention import DeltaAttention
from atoll.nn.latent_attention import LatentAttention
from atoll.nn.pooled_cache import DeltaRows
from atoll.ops import kda
from atoll.ops.norm import gated_rms_norm


class Context:
    """The processes that cut a row among them. `share` is set for the length of a training pass; without it modules work as ever."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.share: Share | None = None

    def share_of(self, bounds: list[int]) -> Share:
        """This process's share of a row with segment `bounds`, whose tokens are a multiple of the processes."""
        each = bounds[-1] // self.size
        return share_of(bounds, self.rank * each, (self.rank + 1) * each)

    @contextmanager
    def taking(self, bounds: list[int]) -> Iterator[None]:
        """A block, forward and backward, in which the model is given this process's share of a row with segment `bounds`."""
        self.share = self.share_of(bounds)
        try:
            yield
        finally:
            self.share = None

    def gather(self, x: Tensor) -> Tensor:
        """[processes, ...]: every process's `x`."""
        return _Gather.apply(x, self.group)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty(group.size(), *x.shape)
        dist.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grads[0].contiguous()
        back = torch.empty_like(grad)
        dist.all_to_all_single(back, grad, group=ctx.group)
        return back.sum(0), None


class ContextDelta(DeltaAttention):
    """`DeltaAttention` over a share of the row."""

    context: Context

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, cache: DeltaState | DeltaCarry | DeltaRows | None = None) -> Tensor:
        share = self.context.share
        if share is None:
            return super().forward(x, cu_seqlens=cu_seqlens, cache=cache)
        q, k, v = self._convolved(x, cu_seqlens, self._window(x, share))
        shape = q.shape
        parts = [q, k, v, self.f_b_proj(self.f_a_proj(x)).view(shape), self.b_proj(x)]
        out = self._attend(parts, share, cu_seqlens)
        out = gated_rms_norm(out, self.o_norm.weight, self._gate(x).view(shape), self.eps)
        return self.o_proj(out.flatten(2).to(x.dtype))

    def _window(self, x: Tensor, share: Share) -> DeltaState:
        """The convolutions' inputs just before each segment: of the first, what the process before had last of its document."""
        taps = self.q_conv1d.weight.shape[-1] - 1
        last = self.context.gather(x[0, -taps:])[max(0, self.context.rank - 1)]
        known = torch.arange(taps, device=x.device) >= taps - share.before
        last = torch.where(known[:, None], last, 0 * last)
        inputs = torch.cat([p(last) for p in (self.q_proj, self.k_proj, self.v_proj)], -1)[None]
        rest = inputs.new_zeros(len(share.bounds) - 2, *inputs.shape[1:])
        return DeltaState(window=torch.cat([inputs, rest]))

    def _attend(self, parts: list[Tensor], share: Share, cu_seqlens: Tensor | None) -> Tensor:
        q, k, v, g, beta = parts
        fixed = {"lower_bound": self.lower_bound, "output_final_state": True}
        scales = self.A_log, self.dt_bias.view(self.num_heads, self.head_dim)
        out, ends = kda(q, k, v, g, beta, *scales, cu_seqlens=cu_seqlens, **fixed)
        assert ends is not None
        exact, n = ends.dtype, share.first
        reads, moves = ends.new_zeros(1, n, *k.shape[2:]), ends.new_zeros(self.num_heads, self.head_dim, self.head_dim)
        if share.before:
            one = torch.eye(self.head_dim, dtype=exact, device=v.device).expand(1, *moves.shape)
            head = [t[:, :n] for t in (q, k, torch.zeros_like(k, dtype=exact), g, beta)]
            reads, whole = kda(head[0], head[1], head[2], head[3], head[4], *scales, initial_state=one, **fixed)
            assert whole is not None
            moves = whole[0] if len(share.bounds) == 2 else moves
        every = self.context.gather(torch.cat([moves, ends[-1]], -1))
        state = (0 * every).sum(0)[..., self.head_dim :]
        for j in range(self.context.rank):
            move, end = every[j].split([self.head_dim, self.head_dim], -1)
            state = move @ state + end
        first = out[:, :n].to(exact) + torch.einsum("bthk,hkv->bthv", reads.to(exact), state)
        return torch.cat([first.to(out.dtype), out[:, n:]], 1)


class ContextLatent(LatentAttention):
    """`LatentAttention` of a share's queries over the latents of the whole row."""

    context: Context

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        share = self.context.share
        if share is None:
            return super().forward(x, **call)
        q = self._queries(x)
        rows = self.context.gather(self._latent_rows(x)[0]).flatten(0, 1)[None, share.start - share.before : share.stop]
        return self._output(x, self._attend_from(q, rows, share.before, share.bounds))


def cut_context(model: Any, mesh: DeviceMesh) -> Context:
    """Let the mixers of `model` work on shares of a row over the one axis of `mesh`; the returned `Context` says which."""
    context = Context(mesh)
    kinds = {DeltaAttention: ContextDelta, LatentAttention: ContextLatent}
    for module in model.modules():
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]
            cast(ContextDelta, module).context = context
    return context
