"""Experts shared out among processes: tokens travel to the experts, at latent width, and their sums travel back.

A token is sent once to each process that owns one of its experts, with its choices there, and one partial sum comes back; so a
layer moves at most min(k, processes) rows of L numbers a token and direction, forward, and as many backward. Routing is not
touched: every process routes its own tokens over all experts.

`Dispatcher` is all that the experts' module knows. Another way of moving tokens is another class with its two methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.nn.latent_moe import Experts, LatentMoE
from atoll.ops import experts_mlp
from atoll.ops.situ import wide


@dataclass(frozen=True)
class Arrived:
    """What came to the experts of this process: `rows` [A,L], one a choice, its `ids` among the experts here [A], its `weights` [A]."""

    rows: Tensor
    ids: Tensor
    weights: Tensor
    way_back: Any  # the dispatcher's own


class Dispatcher(Protocol):
    """Moves tokens to the experts they chose and their sums back. Both are collectives: every process calls them alike."""

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Arrived:
        """x [T,L], ids int64 [T,k] over all experts, weights [T,k] → what this process's experts must do. Gradients to x and weights."""
        ...

    def combine(self, out: Tensor, arrived: Arrived) -> Tensor:
        """out [A,L], weighted outputs in the order of `arrived`, → [T,L], each token's sum over all its experts."""
        ...


class AllToAll:
    """A `Dispatcher` on `all_to_all_single`; any number of tokens may go anywhere, also none. Waits for the device to know the numbers."""

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        """`experts`: of each process of `group`; process r owns those from r·experts on."""
        self.group, self.experts, self.size = group, experts, group.size()

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Arrived:
        order, pair_token, sizes, sent = self._plan(ids)
        chosen = ids.reshape(-1).index_select(0, order) % self.experts
        counts = torch.stack([torch.stack([s.sum(), s.new_tensor(len(s))]) for s in sizes.split(sent)])
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        (choices_out, rows_out), (choices_in, rows_in) = (c.t().tolist() for c in (counts, theirs))
        rows, share = _Send.apply(
            x.index_select(0, pair_token),
            weights.reshape(-1).index_select(0, order),
            (rows_out, rows_in),
            (choices_out, choices_in),
            self.group,
        )
        here = _send(chosen, choices_out, choices_in, self.group)
        each = _send(sizes, rows_out, rows_in, self.group)
        pair = torch.repeat_interleave(torch.arange(len(each), device=x.device), each, output_size=sum(choices_in))
        return Arrived(rows.index_select(0, pair), here, share, (pair, pair_token, rows_out, rows_in, ids.shape[0]))

    def _plan(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Choices in order of (owner, token): their places in the flattened ids; the token and number of choices of each (owner, token)
        pair that occurs; and how many pairs go to each owner."""
        tokens, k = ids.shape
        token = torch.arange(tokens, device=ids.device).repeat_interleave(k)
        key = (ids.reshape(-1) // self.experts) * max(1, tokens) + token
        key, order = key.sort(stable=True)
        pairs, sizes = torch.unique_consecutive(key, return_counts=True)
        sent = torch.bincount(pairs // max(1, tokens), minlength=self.size).tolist()
        return order, pairs % max(1, tokens), sizes, sent

    def combine(self, out: Tensor, arrived: Arrived) -> Tensor:
        pair, pair_token, rows_out, rows_in, tokens = arrived.way_back
        exact = wide(out.dtype)
        partial = out.new_zeros(sum(rows_in), out.shape[1], dtype=exact).index_add(0, pair, out.to(exact))
        back = _Return.apply(partial.to(out.dtype), (rows_in, rows_out), self.group)
        whole = back.new_zeros(tokens, out.shape[1], dtype=exact).index_add(0, pair_token, back.to(exact))
        return whole.to(out.dtype)


def _send(x: Tensor, out: list[int], into: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of x, `out[r]` of them to process r, for `into[r]` from each."""
    y = x.new_empty(sum(into), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), into, out, group=group)
    return y


class _Send(torch.autograd.Function):
    """Rows and weights together, so that forward and backward their two exchanges come in one order on every process."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, by_row: Any, by_choice: Any, group: Any) -> tuple[Tensor, Tensor]:
        ctx.by_row, ctx.by_choice, ctx.group = by_row, by_choice, group
        return _send(rows, by_row[0], by_row[1], group), _send(weights, by_choice[0], by_choice[1], group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        pairs = zip(grads, (ctx.by_row, ctx.by_choice), strict=True)
        return *(_send(g, into, out, ctx.group) for g, (out, into) in pairs), None, None, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, by_row: Any, group: Any) -> Tensor:
        ctx.by_row, ctx.group = by_row, group
        return _send(rows, by_row[0], by_row[1], group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        out, into = ctx.by_row
        return _send(grads[0], into, out, ctx.group), None, None


# ---------------------------------------------------------------- the placement


class OwnedExperts(Experts):
    """This process's experts of a layer, their weights [E/processes, ...]; called with all choices of this process's tokens."""

    dispatcher: Dispatcher

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
        """As `experts_mlp` with the weights of all processes."""
        came = self.dispatcher.dispatch(x, ids, weights)
        ones = came.ids.unsqueeze(1), came.weights.unsqueeze(1)
        return self.dispatcher.combine(experts_mlp(came.rows, *ones, self.w1, self.w3, self.w2, **options), came)


def share_out(moe: LatentMoE, mesh: DeviceMesh) -> None:
    """Leave `moe` with this process's part of its experts over the one axis of `mesh`; the others' weights are dropped."""
    owners, here = mesh.size(), mesh.get_local_rank()
    for name, w in list(moe.experts.named_parameters()):
        setattr(moe.experts, name, nn.Parameter(w.detach().chunk(owners)[here].clone(), w.requires_grad))
    for name, scale in list(moe.experts.named_buffers()):
        moe.experts.register_buffer(name, scale.chunk(owners)[here].clone())
    moe.experts.__class__ = OwnedExperts
    cast(OwnedExperts, moe.experts).dispatcher = AllToAll(mesh.get_group(), moe.num_experts // owners)
