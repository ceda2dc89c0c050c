"""The forward pass of chunked KDA in plain torch: tiles, chunks, the scan over them; formulas in `chunk.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.ops.kda.layout import Layout
from atoll.ops.kda.reference import L2_EPS
from atoll.ops.kda.tiles import TILE, Tiles, anchor, bounded_scores, pair_scores, sum_from, sum_up_to


class Join(NamedTuple):
    """What one round of joining pairs of blocks used: later rows, earlier tails and both decays."""

    query: Tensor
    key: Tensor
    tail: Tensor
    first: Tensor
    second: Tensor


class Chunks(NamedTuple):
    """Everything the scan and the backward pass read; matrices [M, ...] with M = chunks * heads."""

    tiles: Tiles
    query: Tensor  # [M, C, K] scaled unit query * exp(G) * anchor
    key: Tensor  # [M, C, K] unit key * exp(G) * anchor
    tail: Tensor  # [M, C, K] unit key * exp(G_end - G)
    decay: Tensor  # [M, K] exp(G_end)
    scores: Tensor  # [M, C, C] Aqk
    inverse: Tensor  # [M, C, C] T
    weighted: Tensor  # [M, C, K] T diag(beta) (K exp(G) * anchor)
    gate: Tensor  # [M, C, K] sigmoid (bounded), or the log-decay (unbounded); zero where padded
    beta: Tensor  # [M, C]
    norm_q: Tensor  # [tokens*H, 1] reciprocal L2 norms
    norm_k: Tensor


class Spec(NamedTuple):
    """The arguments that are not tensors."""

    lower_bound: float | None
    scale: float
    dtype: torch.dtype
    tokens: int
    heads: int

    @property
    def lift(self) -> float:
        """Undoes the anchor on rows that meet a state or an earlier block."""
        return 1.0 / anchor(self.lower_bound)


def chunk_size(width: int) -> int:
    """Tokens a chunk, from the key width only, so that a prefix and the whole sequence are cut alike. Measured on two cores."""
    return 16 if width <= 32 else 32 if width <= 64 else 64


def place(x: Tensor, layout: Layout, spec: Spec) -> Tensor:
    """Input [B, T, H, D] as [M, C, D] in the chunk order."""
    flat = x.reshape(spec.tokens * spec.heads, -1)
    return flat.index_select(0, layout.rows).view(layout.chunks * layout.heads, layout.size, -1)


def put_back(x: Tensor, layout: Layout, like: Tensor) -> Tensor:
    """[M, C, D] back to the shape of an input."""
    return x.reshape(-1, x.shape[-1]).index_select(0, layout.places).view(*like.shape[:3], -1)


def blank(x: Tensor, layout: Layout) -> Tensor:
    """Zero the padded places of [M, C, D]."""
    if layout.padding is not None:
        x.view(-1, x.shape[-1]).index_fill_(0, layout.padding, 0.0)
    return x


def _reciprocal_norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_().add_(L2_EPS).rsqrt_()


def _gate(g: Tensor, A_log: Tensor, dt_bias: Tensor, layout: Layout, spec: Spec) -> Tensor:
    """[M, C, K]: sigmoid of the gate logits when decay is bounded, else the log-decay. No decay where padded."""
    rate = A_log.to(spec.dtype).exp()[:, None, None]
    logits = place(g, layout, spec).to(spec.dtype).view(layout.chunks, layout.heads, layout.size, -1)
    shifted = torch.addcmul(dt_bias.to(spec.dtype)[:, None] * rate, logits, rate)
    if spec.lower_bound is None:
        shifted = torch.nn.functional.logsigmoid(shifted.div_(-rate)).mul_(rate)  # softplus without its threshold
    else:
        shifted.sigmoid_()
    return blank(shifted.view(-1, layout.size, g.shape[-1]), layout)


def _tiles(q: Tensor, k: Tensor, norms: tuple[Tensor, Tensor], gate: Tensor, layout: Layout, spec: Spec) -> Tiles:
    """Normalise, and spread the decay over queries and keys. q and k [B, T, H, K]."""
    query, key = place(q, layout, spec).to(spec.dtype), place(k, layout, spec).to(spec.dtype)
    query.mul_((norms[0] * spec.scale).index_select(0, layout.rows).view(*query.shape[:2], 1))
    key.mul_(norms[1].index_select(0, layout.rows).view(*key.shape[:2], 1))
    if spec.lower_bound is None:
        up = sum_up_to(gate, TILE).exp_()
        suffix = sum_from(gate.roll(-1, 1).view(-1, TILE, gate.shape[-1]).index_fill(1, last_row(gate.device), 0.0), TILE)
        return Tiles(up, query.mul(up), key.mul(up), torch.cat((query, key)), suffix.exp_().view(key.shape).mul_(key))
    up = sum_up_to(gate, TILE, spec.lower_bound).exp_().mul_(anchor(spec.lower_bound))
    column = key / up
    tail = (column.view(-1, TILE, column.shape[-1]) * up.view(-1, TILE, up.shape[-1])[:, -1:]).view(column.shape)
    return Tiles(up, query.mul_(up), key.mul_(up), column, tail)


def last_row(device: torch.device) -> Tensor:
    return torch.tensor([TILE - 1], device=device)


def _join(query: Tensor, key: Tensor, tail: Tensor, decay: Tensor) -> tuple[Join, Tensor, Tensor, Tensor, Tensor]:
    """Join pairs of blocks [n, 2, s, K] with decays [n, 2, K]: what was used, and the four factors of the joined blocks."""
    first, second = decay[:, 0, None], decay[:, 1, None]
    used = Join(query[:, 1], key[:, 1], tail[:, 0], first, second)
    merged = torch.stack((query[:, 0], query[:, 1] * first), 1), torch.stack((key[:, 0], key[:, 1] * first), 1)
    return used, *merged, torch.stack((tail[:, 0] * second, tail[:, 1]), 1), decay[:, 0] * decay[:, 1]


def _below(top: Tensor, low: Tensor, bottom: Tensor) -> Tensor:
    """[[top, 0], [low, bottom]]."""
    n, s, _ = low.shape
    out = low.new_zeros(n, 2 * s, 2 * s)
    out[:, :s, :s], out[:, s:, :s], out[:, s:, s:] = top, low, bottom
    return out


def scaled(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """factor * a @ b."""
    return torch.bmm(a, b) if factor == 1.0 else torch.baddbmm(a.new_zeros(1, 1, 1), a, b, beta=0, alpha=factor)


def tile_inverse(scores: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower A [n, 16, 16]: exactly on 4 x 4 blocks, then by doubling, so that no high power of A appears.

    A 16-wide Neumann series would lose digits when keys are alike and decay is slow.
    """
    size = scores.shape[-1]
    index = torch.arange(size, device=scores.device)
    eye = torch.eye(size, dtype=scores.dtype, device=scores.device)
    block = scores * (index[:, None] // 4 == index // 4)
    inverse = torch.bmm(eye - block, torch.baddbmm(eye, block, block))  # (I - D)(I + D²), since D⁴ = 0
    width = 4
    while width < size:
        pair = (index[:, None] // (2 * width) == index // (2 * width)) & (index[:, None] // width != index // width)
        inverse = torch.baddbmm(inverse, torch.bmm(inverse, scores * pair), inverse, alpha=-1)
        width *= 2
    return inverse


def _combine(tiles: Tiles, decay: Tensor, scores: tuple[Tensor, Tensor], beta: Tensor, size: int, spec: Spec) -> tuple[Any, ...]:
    """From tiles to chunks: joined factors, decay, Aqk, inverse, and the joins for the backward pass."""
    query, key, tail = (x.view(-1, TILE, x.shape[-1]) for x in (tiles.query, tiles.key, tiles.tail))
    scores_q, inverse = scores[0], tile_inverse(scores[1].mul_(beta.view(-1, TILE, 1)))
    joins, width = [], TILE
    while width < size:
        pairs = [x.view(-1, 2, width, x.shape[-1]) for x in (query, key, tail)]
        used, query, key, tail, decay = _join(*pairs, decay.view(-1, 2, decay.shape[-1]))
        cross_q = scaled(used.query, used.tail.transpose(1, 2), spec.lift)
        cross_k = scaled(used.key, used.tail.transpose(1, 2), spec.lift).mul_(beta.view(-1, 2, width, 1)[:, 1])
        halves = [x.view(-1, 2, width, width) for x in (scores_q, inverse)]
        scores_q = _below(halves[0][:, 0], cross_q, halves[0][:, 1])
        low = torch.bmm(halves[1][:, 1], torch.bmm(cross_k, halves[1][:, 0])).neg_()
        inverse = _below(halves[1][:, 0], low, halves[1][:, 1])
        joins.append(used)
        width *= 2
    shape = tiles.query.shape
    return query.view(shape), key.view(shape), tail.view(shape), decay, scores_q, inverse, joins


def prepare(inputs: tuple[Tensor, ...], layout: Layout, spec: Spec) -> tuple[Chunks, list[Join]]:
    q, k, _, g, beta, A_log, dt_bias = inputs
    norms = (_reciprocal_norm(q.reshape(-1, q.shape[-1]), spec.dtype), _reciprocal_norm(k.reshape(-1, k.shape[-1]), spec.dtype))
    gate = _gate(g, A_log, dt_bias, layout, spec)
    tiles = _tiles(q, k, norms, gate, layout, spec)
    strength = blank(torch.sigmoid(place(beta[..., None], layout, spec).to(spec.dtype)), layout)[..., 0]
    if spec.lower_bound is None:
        query, key = tiles.column.chunk(2)
        scores = pair_scores(query, key, gate)
    else:
        scores = bounded_scores(tiles.query, tiles.column, 0), bounded_scores(tiles.key, tiles.column, -1)
    decay = tiles.up.view(-1, TILE, tiles.up.shape[-1])[:, -1] * spec.lift
    query, key, tail, decay, scores_q, inverse, joins = _combine(tiles, decay, scores, strength, layout.size, spec)
    weighted = torch.bmm(inverse * strength[:, None, :], key)
    return Chunks(tiles, query, key, tail, decay, scores_q, inverse, weighted, gate, strength, *norms), joins


def slice_of(x: Tensor, layout: Layout, step: tuple[int, int]) -> Tensor:
    return x[step[0] * layout.heads : step[1] * layout.heads]


def scan(chunks: Chunks, v: Tensor, state: Tensor | None, layout: Layout, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """The states, chunk by chunk. Returns X [M, C, V], the entering states [M, K, V], the final states [N, H, K, V]."""
    value = place(v, layout, spec).to(spec.dtype)
    x = torch.bmm(chunks.inverse * chunks.beta[:, None, :], value)
    documents, heads = layout.order.numel(), layout.heads
    shape = (documents, heads, chunks.decay.shape[-1], value.shape[-1])
    current = value.new_zeros(shape) if state is None else state.to(spec.dtype).index_select(0, layout.order)
    current = current.reshape(documents * heads, *shape[2:])
    entering = value.new_empty(x.shape[0], *shape[2:])
    finals = value.new_empty(current.shape)
    active = documents * heads
    for step in layout.steps:
        count = (step[1] - step[0]) * heads
        finals[count:active] = current[count:active]  # documents that ended before this step
        active = count
        entry = slice_of(entering, layout, step)
        entry.copy_(current[:count])
        part = slice_of(x, layout, step)
        part.baddbmm_(slice_of(chunks.weighted, layout, step), entry, alpha=-spec.lift)
        current = entry * slice_of(chunks.decay, layout, step)[..., None]
        current.baddbmm_(slice_of(chunks.tail, layout, step).transpose(1, 2), part)
    finals[:active] = current[:active]
    return x, entering, finals.view(shape).index_select(0, layout.rank)


def outputs(chunks: Chunks, x: Tensor, entering: Tensor, spec: Spec) -> Tensor:
    return torch.bmm(chunks.scores, x).baddbmm_(chunks.query, entering, alpha=spec.lift)
