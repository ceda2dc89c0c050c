"""Attention over depth: what a layer reads is a learned average of earlier blocks' sums, not their plain total.

Attention Residuals, arXiv 2603.15031, eq. 8-10 and Fig. 2; block size counted in decoder layers as in Kimi K3's release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from atoll.nn.linear import Weight
from atoll.ops import attn_res

Mode = Literal["block", "full", "plain"]


@dataclass(frozen=True)
class Stream:
    """What flows from layer to layer: `bank`, the finished sources (the first is the embedding), and `prefix`, the running
    sum of the current block, or None right after a block was closed. Each [B,T,D]. Never changed in place."""

    bank: tuple[Tensor, ...]
    prefix: Tensor | None

    def rows(self) -> list[Tensor]:
        """Every source a mix may read, the running sum last."""
        return [*self.bank] if self.prefix is None else [*self.bank, self.prefix]

    def close(self) -> Stream:
        """Put the running sum into the bank and start a new one."""
        return self if self.prefix is None else Stream((*self.bank, self.prefix), None)

    def add(self, x: Tensor) -> Stream:
        """Add a sublayer's output to the running sum."""
        return Stream(self.bank, x if self.prefix is None else self.prefix + x)


class BlockResidual(nn.Module):
    """The mix before one sublayer: softmax over sources of <rmsnorm(source) * norm, query>, applied to the raw sources.

    Holds the pseudo-query (zero at the start: a uniform average) and the key norm's weight. Independent of the rest: in
    any network, `x = residual(stream)`, then `stream = stream.add(layer(x))`, and `stream.close()` at each block's end.
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

    def forward(self, stream: Stream, probe: list[Tensor] | None = None) -> Tensor:
        return mix(stream, self.norm.weight, self.query.weight, self.eps, probe)


def mix(stream: Stream, norm: Tensor, query: Tensor, eps: float, probe: list[Tensor] | None = None) -> Tensor:
    """[B,T,D] from a stream, norm [D] and query [1,D]. A single source is its own mix. `probe` gets the mean weights [rows]."""
    rows = stream.rows()
    if len(rows) == 1:
        return rows[0]
    if probe is None:
        return attn_res(rows, query.view(-1), norm, eps=eps)
    out, weights = attn_res(rows, query.view(-1), norm, eps=eps, return_weights=True)
    probe.append(weights.detach().float().flatten(1).mean(1))
    return out
