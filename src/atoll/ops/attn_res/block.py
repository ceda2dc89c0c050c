"""The mixes of a block in two phases: all its queries on the finished sources at once, then each with the block's running sum.

Queries do not depend on activations, so finished sources are read once a block instead of once a sublayer, and their gradients
are written once a block: a mix hands the gradient of its `mean` back, and phase one's backward pass takes all of them together.
Source: Attention Residuals, arXiv 2603.15031, algorithm 1, with softmax's halves joined by the log of their sums.

Nothing but the sources is kept for the backward pass. The means, one [N, D] a query, are dropped when the block ends and made again,
all at once, when its last mix asks for one; each then gives its place to its own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.attn_res.block_launch import PhaseOne, block_refusal, phase_one, phase_one_backward
from atoll.ops.attn_res.mix import apply_mix, check, mix_gradients, rows_of
from atoll.ops.attn_res.mix_launch import mix_refusal
from atoll.ops.attn_res.two_phase import phase_one_backward_torch, phase_one_torch
from atoll.ops.dispatch import use_triton
from atoll.ops.situ import wide


def two_phase_pays(finished: int, queries: int, element: int, partial: int, *, training: bool) -> bool:
    """Whether a block of `queries` mixes on `finished` sources moves fewer bytes in two phases than in as many single mixes.

    Rows of D a token, c = partial / element (bytes a number): a single mix reads finished + 1 rows and writes one. In two phases
    the block reads the sources twice (scores, values) and each query writes its mean, reads it again, reads the running sum and
    writes the mix. Backward, a single mix reads as much and its gradient, writes finished + 1 rows, and the sum of each source's
    gradients costs three rows more; in two phases a query makes its mean again, reads it, the running sum and the gradient, writes
    two gradients, and one is read twice; the block reads the sources five times, writes their gradients and adds them to the rest.
    """
    c = partial / element
    single, double = queries * (finished + 2), 2 * finished + queries * (2 * c + 2)
    if training:
        single += queries * (2 * (finished + 1) + 1 + 3 * finished)
        double += queries * (c + c + 2 + 1 + c + 2 * c) + 9 * finished
    return double < single


class _Phase:
    """What the gradients of one block share: how to make phase one again, and its result while they need it. Holds no graph."""

    def __init__(
        self, rows: list[Tensor], queries: Sequence[Tensor], norms: Sequence[Tensor], eps: float, partial: torch.dtype, triton: bool
    ):
        self.rows, self.queries, self.norms = [x.detach() for x in rows], list(queries), list(norms)
        self.eps, self.partial, self.triton = eps, partial, triton
        self.held: PhaseOne | None = None
        self.fresh: set[int] = set()  # queries whose mean in `held` has not given its place to a gradient

    def compute(self) -> PhaseOne:
        with torch.no_grad():
            path = phase_one if self.triton else phase_one_torch
            return path(self.rows, self.queries, self.norms, self.eps, self.partial)

    def again(self, i: int) -> PhaseOne:
        """Phase one with query i's mean; made again, for all queries, where it is not at hand."""
        if self.held is None or i not in self.fresh:
            self.held, self.fresh = self.compute(), set(range(len(self.queries)))
        return self.held

    def take(self) -> PhaseOne:
        """Phase one for its own backward pass, the last to need it."""
        held, self.held = self.held, None
        return self.compute() if held is None else held


class Block:
    """The mixes of one block, made by `open_block`: `mix(i, …)` is query i's; `close()` at the block's end frees the means.

    `means[i]`, `lses[i]`: query i's mix over the finished sources alone [N, D] and the log of its sum of exp(score) [N].
    """

    def __init__(
        self, sources: Sequence[Tensor], queries: Sequence[Tensor], norms: Sequence[Tensor], eps: float, partial: torch.dtype, triton: bool
    ) -> None:
        self.shape, self.dtype = sources[0].shape, sources[0].dtype
        rows = [rows_of(s) for s in sources]
        self.phase = _Phase(rows, queries, norms, eps, partial, triton)
        leaves, count = [*rows, *queries, *norms], len(queries)
        self.means: Sequence[Tensor] | None
        self.lses: Sequence[Tensor] | None
        if torch.compiler.is_compiling():
            mean, lse = _op(rows, list(queries), list(norms), eps, partial, triton)
            self.means, self.lses = mean.unbind(0), lse.unbind(0)
        elif torch.is_grad_enabled() and any(t.requires_grad for t in leaves):
            made: Any = _Open.apply(self.phase, *leaves)
            self.means, self.lses = made[:count], made[count:]
        else:
            held = self.phase.compute()
            self.means, self.lses = held.mean.unbind(0), held.lse.unbind(0)

    def close(self) -> None:
        """Forget the means; a mix that asks for one later makes all of them again."""
        self.means = self.lses = None

    def find(self, query: Tensor) -> int | None:
        """The number of the query that is this very tensor."""
        return next((i for i, q in enumerate(self.phase.queries) if q is query), None)

    def mix(
        self,
        i: int,
        partial: Tensor | None = None,
        *,
        delta: Tensor | None = None,
        out_norm: Tensor | None = None,
        out_eps: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Query i over the finished sources and the running sum `partial + delta`: the mix [..., D], and that sum.

        Without `partial`, as for a block's first sublayer, over the finished sources alone. `out_norm` as in `attn_res`.
        """
        phase = self.phase
        out_eps = phase.eps if out_eps is None else out_eps
        if partial is not None and (partial.shape != self.shape or partial.dtype != self.dtype):
            raise ValueError(
                f"partial is {partial.dtype} {list(partial.shape)}; it must be {self.dtype} {list(self.shape)}, as the sources"
            )
        rows = [] if partial is None else [rows_of(partial)]
        step = None if delta is None else rows_of(delta)
        if self.means is None or self.lses is None:
            held = phase.again(i)
            mean, lse = held.mean[i], held.lse[i]
        else:
            mean, lse = self.means[i], self.lses[i]
        vectors = (phase.queries[i], phase.norms[i], out_norm)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            out, last = _Merge.apply(phase, i, self.dtype, mean, lse, step, out_eps, *vectors, *rows)  # type: ignore[misc]
        else:
            out, last, _ = apply_mix(rows, step, mean, lse, *vectors, phase.eps, out_eps, self.dtype, False, phase.triton)
        return out.view(self.shape), partial if delta is None else last.view(self.shape)


def open_block(
    sources: Sequence[Tensor],
    queries: Sequence[Tensor],
    norm_weights: Sequence[Tensor],
    eps: float = 1e-5,
    *,
    partial_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Block:
    """Phase one of a block: sources as in `attn_res`, Q queries and norm weights, each [D].

    partial_dtype: of the mixes over the finished sources that wait for their turn, Q of the sources' size; the sources' own by
    default, which rounds once more than a single mix does; float32 is exact to rounding.
    Raises ValueError as `attn_res`, or where the kernels are asked for and refuse.
    """
    if not queries or len(queries) != len(norm_weights):
        raise ValueError(f"{len(queries)} queries and {len(norm_weights)} norm weights: one or more of each are expected, as many")
    for query, norm in zip(queries, norm_weights, strict=True):
        check(sources, query, norm)
    vectors, on_card = [*queries, *norm_weights], sources[0].is_cuda
    refusal = ""
    if on_card or backend == "triton":
        refusal = mix_refusal(list(sources), vectors) or block_refusal(list(sources), vectors)
    triton = use_triton("attn_res block", backend, on_card, refusal)
    dtype = partial_dtype or sources[0].dtype
    if sources[0].dtype == torch.float64:
        dtype = torch.float64
    return Block(sources, queries, norm_weights, eps, dtype, triton)


class _Open(torch.autograd.Function):
    """Phase one. Its backward pass runs after that of every mix of the block, as autograd has it, and sees all gradients at once."""

    @staticmethod
    def forward(ctx: Any, phase: _Phase, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.phase = phase
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves)
        held = phase.compute()
        return *held.mean.unbind(0), *held.lse.unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        phase: _Phase = ctx.phase
        count = len(phase.queries)
        held = phase.take()
        d_mean = _gathered(held.mean, grads[:count])
        d_lse = _gathered(torch.empty_like(held.lse), grads[count:])
        leaves = ctx.saved_tensors
        d_sources, d_keys = _phase_one_backward(d_mean, d_lse, list(leaves[: -2 * count]), held, phase.triton)
        return None, *d_sources.unbind(0), *_of_vectors(d_keys, leaves[-2 * count : -count], leaves[-count:])


def _gathered(into: Tensor, grads: Sequence[Tensor | None]) -> Tensor:
    """The gradients in `into` [Q, …]; most lie there already, written by the mixes."""
    for slot, grad in zip(into, grads, strict=True):
        if grad is None:
            slot.zero_()
        elif grad.data_ptr() != slot.data_ptr():
            slot.copy_(grad)
    return into


def _of_vectors(d_keys: Tensor, queries: Sequence[Tensor], norms: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the queries, then of the norm weights: a key is their product."""
    d_queries = d_keys * torch.stack(list(norms)).to(d_keys.dtype)
    d_norms = d_keys * torch.stack(list(queries)).to(d_keys.dtype)
    return [*d_queries.to(queries[0].dtype).unbind(0), *d_norms.to(norms[0].dtype).unbind(0)]


def _phase_one_backward(d_mean: Tensor, d_lse: Tensor, sources: list[Tensor], held: PhaseOne, triton: bool) -> tuple[Tensor, Tensor]:
    return (phase_one_backward if triton else phase_one_backward_torch)(d_mean, d_lse, sources, held)


class _Merge(torch.autograd.Function):
    """Phase two of one query. Keeps the running sum, which exists anyway, and not the mean."""

    @staticmethod
    def forward(
        ctx: Any,
        phase: _Phase,
        i: int,
        dtype: torch.dtype,
        mean: Tensor,
        lse: Tensor,
        delta: Tensor | None,
        out_eps: float,
        query: Tensor,
        norm: Tensor,
        out_norm: Tensor | None,
        *rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, last, _ = apply_mix(rows, delta, mean, lse, query, norm, out_norm, phase.eps, out_eps, dtype, False, phase.triton)
        ctx.phase, ctx.i, ctx.out_eps, ctx.summed = phase, i, out_eps, delta is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, norm, out_norm, *([last] if ctx.summed else rows))
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, norm, out_norm, *rows = ctx.saved_tensors
        phase: _Phase = ctx.phase
        d_out, d_last = grads
        held = phase.again(ctx.i)
        mean, lse = held.mean[ctx.i], held.lse[ctx.i]
        if d_out is None:  # only the sum was used
            d_out = torch.zeros_like(mean)
        phase.fresh.discard(ctx.i)  # its place takes the gradient
        d_last = d_last if ctx.summed else None
        d = mix_gradients(
            d_out, d_last, None, rows, mean, lse, query, norm, out_norm, phase.eps, ctx.out_eps, phase.triton, mean
        )  # fmt: skip
        some = d.sources[-1] if ctx.summed else None
        d_out_norm = None if out_norm is None else d.out_norm
        return None, None, None, d.mean, d.lse, some, None, d.query, d.norm, d_out_norm, *d.sources


# ---------------------------------------------------------------- registration, for torch.compile


def _open(
    sources: list[Tensor], queries: list[Tensor], norms: list[Tensor], eps: float, partial: torch.dtype, triton: bool
) -> tuple[Tensor, Tensor]:
    held = (phase_one if triton else phase_one_torch)(sources, queries, norms, eps, partial)
    return held.mean, held.lse


def _open_backward(
    d_mean: Tensor,
    d_lse: Tensor,
    sources: list[Tensor],
    queries: list[Tensor],
    norms: list[Tensor],
    eps: float,
    partial: torch.dtype,
    triton: bool,
) -> tuple[Tensor, list[Tensor]]:
    held = (phase_one if triton else phase_one_torch)(sources, queries, norms, eps, partial)
    d_sources, d_keys = _phase_one_backward(d_mean.contiguous(), d_lse.contiguous(), sources, held, triton)
    return d_sources, [t.clone() for t in _of_vectors(d_keys, queries, norms)]


_op = torch.library.custom_op("atoll::attn_res_block", _open, mutates_args=())
_back = torch.library.custom_op("atoll::attn_res_block_backward", _open_backward, mutates_args=())


@_op.register_fake
def _fake(
    sources: list[Tensor], queries: list[Tensor], norms: list[Tensor], eps: float, partial: torch.dtype, triton: bool
) -> tuple[Tensor, Tensor]:
    like, count = sources[0], len(queries)
    return like.new_empty(count, *like.shape, dtype=partial), like.new_empty(count, like.shape[0], dtype=wide(like.dtype))


@_back.register_fake
def _back_fake(
    d_mean: Tensor,
    d_lse: Tensor,
    sources: list[Tensor],
    queries: list[Tensor],
    norms: list[Tensor],
    eps: float,
    partial: torch.dtype,
    triton: bool,
) -> tuple[Tensor, list[Tensor]]:
    return sources[0].new_empty(len(sources), *sources[0].shape), [torch.empty_like(t) for t in (*queries, *norms)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    sources, queries, norms, ctx.eps, ctx.partial, ctx.triton = inputs
    ctx.counts = len(sources), len(queries)
    ctx.save_for_backward(*sources, *queries, *norms)


def _gradients(ctx: Any, d_mean: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
    many, count = ctx.counts
    saved = list(ctx.saved_tensors)
    sources, queries, norms = saved[:many], saved[many : many + count], saved[many + count :]
    d_sources, d_vectors = _back(d_mean, d_lse, sources, queries, norms, ctx.eps, ctx.partial, ctx.triton)
    return list(d_sources.unbind(0)), d_vectors[:count], d_vectors[count:], None, None, None


_op.register_autograd(_gradients, setup_context=_setup)
