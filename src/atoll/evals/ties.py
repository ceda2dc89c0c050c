"""Near-tied router decisions of a model: where they are, and what the model computes when one falls the other way.

A token's experts are the k largest of score + bias. Where the k-th and the next lie within the arithmetic's error, two right
implementations may choose differently, and their outputs differ by far more than that error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tie:
    """One decision that could fall the other way: in MoE layer `layer` (0-based among decoder layers), for the token (row, position),
    `chosen` was taken before `other`, by `margin` of biased score."""

    layer: int
    row: int
    position: int
    margin: float
    chosen: int
    other: int


@dataclass
class Pass:
    """One forward pass: logits float64 [B,T,V], experts [B·T,k] and biased scores [B·T,E] of every MoE layer."""

    logits: Tensor
    routing: list[Tensor]
    scores: list[Tensor]


def moe_indices(model: Any) -> list[int]:
    """Decoder layers that have routed experts, in order."""
    return [i for i in range(model.config.num_hidden_layers) if not model.config.is_dense(i)]


@torch.no_grad()
def observe(model: Any, input_ids: Tensor, flips: Iterable[Tie] = (), routing: list[Tensor] | None = None) -> Pass:
    """Run `model` on `input_ids` [B,T], with every decision of `flips` reversed and all others free (or all forced by `routing`).

    A reversed decision changes what later layers see, so their decisions are taken anew: layers are run up to the first reversed one
    as they chose themselves, that one as told, the rest free; and so on for the next. One pass more than there are reversed layers.
    """
    layers, length = moe_indices(model), input_ids.shape[1]
    seen = _run(model, input_ids, list(routing) if routing is not None else [None] * len(layers))
    for layer in sorted({f.layer for f in flips}):
        at = layers.index(layer)
        told = seen.routing[at].clone()
        for f in flips:
            if f.layer == layer:
                row = told[f.row * length + f.position]
                row[row == f.chosen] = f.other
        seen = _run(model, input_ids, [*seen.routing[:at], told, *[None] * (len(layers) - at - 1)])
    return seen


def _run(model: Any, input_ids: Tensor, routing: list[Tensor | None]) -> Pass:
    with _scores(model) as scores:
        out = model(input_ids, routing=routing)
    return Pass(out.logits.double(), out.routing, scores)


@contextmanager
def _scores(model: Any) -> Iterator[list[Tensor]]:
    """Collects every MoE layer's biased scores [B·T,E] while it is open."""
    found: list[Tensor] = []

    def keep(gate: Any, _args: Any, scores: Tensor) -> None:
        found.append((scores + gate.e_score_correction_bias).detach())

    hooks = [moe.gate.register_forward_hook(keep) for moe in model.moe_layers()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def near_ties(model: Any, seen: Pass, within: float) -> list[Tie]:
    """Every pair of a chosen and an unchosen expert whose biased scores lie within `within`, smallest margin first."""
    length, ties = seen.logits.shape[1], []
    for layer, ids, scores in zip(moe_indices(model), seen.routing, seen.scores, strict=True):
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ids, True)
        lowest = scores.gather(1, ids).amin(1, keepdim=True)
        highest = scores.masked_fill(chosen, -torch.inf).amax(1, keepdim=True)
        ins, outs = chosen & (scores <= highest + within), ~chosen & (scores >= lowest - within)
        for token in (ins.any(1) & outs.any(1)).nonzero().flatten().tolist():
            row, position = divmod(token, length)
            for e in ins[token].nonzero().flatten().tolist():
                for f in outs[token].nonzero().flatten().tolist():
                    margin = float(scores[token, e].double() - scores[token, f].double())
                    if abs(margin) <= within:
                        ties.append(Tie(layer, row, position, margin, e, f))
    return sorted(ties, key=lambda t: abs(t.margin))
