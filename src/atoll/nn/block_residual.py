"""Attention over depth: what a layer reads is a learned average of earlier blocks' sums, not their plain total.

Attention Residuals, arXiv 2603.15031, eq. 8-10 and Fig. 2; block size counted in decoder layers as in Kimi K3's release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from atoll.nn.linear import Weight
from atoll.ops.attn_res import Block, attn_res_sum, block_refusal, depth_weights, open_block, two_phase_pays
from atoll.ops.norm import rms_norm

Schedule = Literal["auto", "one-pass", "two-phase"]


class Reader(NamedTuple):
    """One place that reads over depth: key norm [D], query [1, D] or [D], and eps of both norms."""

    norm: Tensor
    query: Tensor
    eps: float


@dataclass(frozen=True)
class Stream:
    """What flows from layer to layer. Each tensor [B,T,D]; never changed in place.

    `bank` holds the finished sources, the first of them the embedding; `prefix` the running sum of the current block, None right
    after a block was closed; `delta` what is still to be added to it: the next read does so in its own pass. `block` is phase one
    of the block's readers, where the mixes are made in two phases, and `turns` their queries in order.
    """

    bank: tuple[Tensor, ...]
    prefix: Tensor | None
    delta: Tensor | None = None
    block: Block | None = None
    turns: tuple[Tensor, ...] = ()

    def rows(self) -> list[Tensor]:
        """Every source a mix may read, the running sum last."""
        prefix = self.settle().prefix
        return [*self.bank] if prefix is None else [*self.bank, prefix]

    def settle(self) -> Stream:
        """Add what is still to be added."""
        if self.delta is None or self.prefix is None:
            return self
        return replace(self, prefix=self.prefix + self.delta, delta=None)

    def add(self, x: Tensor) -> Stream:
        """Add a sublayer's output to the running sum: at once or in the pass of the next read."""
        if self.prefix is None:
            return replace(self, prefix=x)
        return replace(self.settle(), delta=x)

    def close(self, readers: Sequence[Reader] = (), *, schedule: Schedule = "auto", partial_dtype: torch.dtype | None = None) -> Stream:
        """Put the running sum into the bank and start a new block, which these readers will read, in this order.

        schedule: "two-phase" makes the readers' mixes over the finished sources at once; "one-pass" (or no readers) makes each
        when it is asked for; "auto" takes what moves fewer bytes on a GPU, one pass elsewhere. partial_dtype: see `open_block`.
        """
        prefix = self.pause().prefix
        bank = self.bank if prefix is None else (*self.bank, prefix)
        return Stream(bank, None).open(readers, schedule=schedule, partial_dtype=partial_dtype)

    def open(self, readers: Sequence[Reader], *, schedule: Schedule = "auto", partial_dtype: torch.dtype | None = None) -> Stream:
        """The block that is running, with these of its readers still to come; as `close`, but the bank stays."""
        if not readers or not _in_two_phases(self.bank, readers, schedule, partial_dtype):
            return self
        queries, norms = [r.query.view(-1) for r in readers], [r.norm for r in readers]
        block = open_block(self.bank, queries, norms, readers[0].eps, partial_dtype=partial_dtype)
        return replace(self, block=block, turns=tuple(r.query for r in readers))

    def pause(self) -> Stream:
        """Bank and settled sum alone: what is handed over where the layers are cut."""
        if self.block is not None:
            self.block.close()
        return Stream(self.bank, self.settle().prefix)


def _in_two_phases(bank: Sequence[Tensor], readers: Sequence[Reader], schedule: Schedule, partial: torch.dtype | None) -> bool:
    if schedule == "two-phase" or not bank:
        return bool(bank)
    if schedule == "one-pass" or not bank[0].is_cuda or block_refusal(bank, [t for r in readers for t in (r.query, r.norm)]):
        return False
    size = bank[0].element_size()
    return two_phase_pays(len(bank), len(readers), size, partial.itemsize if partial else size, training=torch.is_grad_enabled())


@dataclass
class DepthProbe:
    """What is looked at over depth, one entry a mix or sublayer, scalars on the device.

    `weights`: mean weight of each source of a mix [rows]. `outputs`: RMS of a sublayer's output; `sums`: of the running sum with it;
    `gradients`: of the loss's gradient with respect to the output, NaN until a backward pass.
    """

    weights: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def see(self, stream: Stream, x: Tensor) -> None:
        """A sublayer's output, about to be added."""
        total = x if stream.prefix is None else stream.prefix + x
        slot = torch.full((), float("nan"), device=x.device)
        for held, value in ((self.outputs, _rms(x)), (self.sums, _rms(total)), (self.gradients, slot)):
            held.append(value)
        if x.requires_grad:
            x.register_hook(lambda g: _keep(slot, g))


def _keep(slot: Tensor, gradient: Tensor) -> None:
    slot.copy_(_rms(gradient))  # and return nothing: a hook's result would take the gradient's place


def _rms(x: Tensor) -> Tensor:
    return x.detach().float().square().mean().sqrt()


def read(
    stream: Stream, reader: Reader, *, out_norm: Tensor | None = None, out_eps: float | None = None, probe: DepthProbe | None = None
) -> tuple[Tensor, Stream]:
    """The mix [B,T,D] over a stream, with an RMSNorm of weight `out_norm` [D] after it if given, and the stream with its sum settled.

    A single source is its own mix. `probe` gets the mean weights.
    """
    out_eps = reader.eps if out_eps is None else out_eps
    turn = next((i for i, query in enumerate(stream.turns) if query is reader.query), None)
    if probe is not None:
        stream = stream.settle()
        _look(stream.rows(), reader, probe)
    if stream.block is not None and turn is not None:
        out, prefix = stream.block.mix(turn, stream.prefix, delta=stream.delta, out_norm=out_norm, out_eps=out_eps)
        return out, replace(stream, prefix=prefix, delta=None)
    rows = [*stream.bank] if stream.prefix is None else [*stream.bank, stream.prefix]
    if len(rows) == 1:
        stream = stream.settle()
        (lone,) = stream.rows()
        return lone if out_norm is None else rms_norm(lone, out_norm, out_eps), stream
    out, prefix = attn_res_sum(
        rows, reader.query.view(-1), reader.norm, reader.eps, delta=stream.delta, out_norm=out_norm, out_eps=out_eps
    )  # fmt: skip
    return out, stream if stream.prefix is None else replace(stream, prefix=prefix, delta=None)


def _look(rows: list[Tensor], reader: Reader, probe: DepthProbe) -> None:
    if len(rows) > 1:
        weights = depth_weights(rows, reader.query.view(-1), reader.norm, reader.eps)
        probe.weights.append(weights.float().flatten(1).mean(1))


class BlockResidual(nn.Module):
    """The mix before one sublayer: softmax over sources of <rmsnorm(source) * norm, query>, applied to the raw sources.

    Holds the pseudo-query (zero at the start: a uniform average) and the key norm's weight. Independent of the rest: in any network

        stream = Stream((embedding,), None)                    # or Stream((), embedding).close(readers)
        x, stream = residual(stream); stream = stream.add(layer(x))
        stream = stream.close([r.reader() for r in the next block's residuals])        # at each block's end

    Without readers, or on a CPU, each mix is a pass of its own; with them a block's mixes share what they read (docs/residuals.md).
    """

    def __init__(self, dim: int, *, eps: float = 1e-5, **factory) -> None:
        super().__init__()
        self.eps = eps
        self.norm, self.query = Weight(dim, **factory), Weight(1, dim, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Query 0, norm 1 (arXiv 2603.15031 §3)."""
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.query.weight)

    def reader(self) -> Reader:
        return Reader(self.norm.weight, self.query.weight, self.eps)

    def forward(
        self, stream: Stream, *, out_norm: Tensor | None = None, out_eps: float | None = None, probe: DepthProbe | None = None
    ) -> tuple[Tensor, Stream]:
        """See `read`."""
        return read(stream, self.reader(), out_norm=out_norm, out_eps=out_eps, probe=probe)
