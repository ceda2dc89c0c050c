"""KDA in chunks, in plain torch: every causal 16-token tile is a dense matmul, and only the chunk states are computed in order.

Kimi Linear, arXiv 2510.26692, §3.1 (the chunkwise form). Per head and chunk, with G the cumulative log-decay inside the chunk,
S the state entering it and the unit queries Q already scaled:

    A[i,j]   = beta_i sum_c k_i k_j exp(G_i - G_j), j < i      Aqk[i,j] = sum_c q_i k_j exp(G_i - G_j), j <= i
    T        = (I + A)^-1                                      X = T diag(beta) (V - (K exp G) S)
    O        = (Q exp G) S + Aqk X                             S' = exp(G_C) S + (K exp(G_C - G))^T X

Diagonal tiles: `tiles.py`. Tiles are joined in pairs until they fill the chunk: queries and keys of the later half carry the decay
from its start, keys of the earlier half the decay to its end, so every exponent there is at most zero; the inverse grows with them.

The backward pass is written out. Two facts make it short. With D = T^T dX the gradient of A is -D X^T, that of V is beta D, that of the
logit of beta (1 - beta) <D, X>: neither V nor T's factors are needed. And G enters only through exp(±G) beside q and k, so that
dG_i = q_i dq_i + k_i (dk_i as row) - k_i (dk_i as column), plus <S', dS'> at the chunk's last token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.kda.layout import Layout, chunk_layout
from atoll.ops.kda.reference import L2_EPS, compute_dtype, kda_recurrent
from atoll.ops.kda.tiles import (
    TILE,
    Tiles,
    anchor,
    anchor_limit,
    bounded_scores,
    pair_gradients,
    pair_scores,
    sum_from,
    sum_up_to,
)

_KEEP_ELEMENTS = 1 << 23  # above this many query elements the backward pass recomputes the forward instead of keeping it


class _Join(NamedTuple):
    """What one round of joining pairs of blocks used: later rows, earlier tails and both decays."""

    query: Tensor
    key: Tensor
    tail: Tensor
    first: Tensor
    second: Tensor


class _Chunks(NamedTuple):
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


class _Spec(NamedTuple):
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


def _place(x: Tensor, layout: Layout, spec: _Spec) -> Tensor:
    """Input [B, T, H, D] as [M, C, D] in the chunk order."""
    flat = x.reshape(spec.tokens * spec.heads, -1)
    return flat.index_select(0, layout.rows).view(layout.chunks * layout.heads, layout.size, -1)


def _return(x: Tensor, layout: Layout, like: Tensor) -> Tensor:
    """[M, C, D] back to the shape of an input."""
    return x.reshape(-1, x.shape[-1]).index_select(0, layout.places).view(*like.shape[:3], -1)


def _blank(x: Tensor, layout: Layout) -> Tensor:
    """Zero the padded places of [M, C, D]."""
    if layout.padding is not None:
        x.view(-1, x.shape[-1]).index_fill_(0, layout.padding, 0.0)
    return x


def _reciprocal_norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_().add_(L2_EPS).rsqrt_()


def _gate(g: Tensor, A_log: Tensor, dt_bias: Tensor, layout: Layout, spec: _Spec) -> Tensor:
    """[M, C, K]: sigmoid of the gate logits when decay is bounded, else the log-decay. No decay where padded."""
    rate = A_log.to(spec.dtype).exp()[:, None, None]
    logits = _place(g, layout, spec).to(spec.dtype).view(layout.chunks, layout.heads, layout.size, -1)
    shifted = torch.addcmul(dt_bias.to(spec.dtype)[:, None] * rate, logits, rate)
    if spec.lower_bound is None:
        shifted = torch.nn.functional.logsigmoid(shifted.div_(-rate)).mul_(rate)  # softplus without its threshold
    else:
        shifted.sigmoid_()
    return _blank(shifted.view(-1, layout.size, g.shape[-1]), layout)


def _tiles(q: Tensor, k: Tensor, norms: tuple[Tensor, Tensor], gate: Tensor, layout: Layout, spec: _Spec) -> Tiles:
    """Normalise, and spread the decay over queries and keys. q and k [B, T, H, K]."""
    query, key = _place(q, layout, spec).to(spec.dtype), _place(k, layout, spec).to(spec.dtype)
    query.mul_((norms[0] * spec.scale).index_select(0, layout.rows).view(*query.shape[:2], 1))
    key.mul_(norms[1].index_select(0, layout.rows).view(*key.shape[:2], 1))
    if spec.lower_bound is None:
        up = sum_up_to(gate, TILE).exp_()
        suffix = sum_from(gate.roll(-1, 1).view(-1, TILE, gate.shape[-1]).index_fill(1, _last(gate.device), 0.0), TILE)
        return Tiles(up, query.mul(up), key.mul(up), torch.cat((query, key)), suffix.exp_().view(key.shape).mul_(key))
    up = sum_up_to(gate, TILE, spec.lower_bound).exp_().mul_(anchor(spec.lower_bound))
    column = key / up
    tail = (column.view(-1, TILE, column.shape[-1]) * up.view(-1, TILE, up.shape[-1])[:, -1:]).view(column.shape)
    return Tiles(up, query.mul_(up), key.mul_(up), column, tail)


def _last(device: torch.device) -> Tensor:
    return torch.tensor([TILE - 1], device=device)


def _join(query: Tensor, key: Tensor, tail: Tensor, decay: Tensor) -> tuple[_Join, Tensor, Tensor, Tensor, Tensor]:
    """Join pairs of blocks [n, 2, s, K] with decays [n, 2, K]: what was used, and the four factors of the joined blocks."""
    first, second = decay[:, 0, None], decay[:, 1, None]
    used = _Join(query[:, 1], key[:, 1], tail[:, 0], first, second)
    merged = torch.stack((query[:, 0], query[:, 1] * first), 1), torch.stack((key[:, 0], key[:, 1] * first), 1)
    return used, *merged, torch.stack((tail[:, 0] * second, tail[:, 1]), 1), decay[:, 0] * decay[:, 1]


def _below(top: Tensor, low: Tensor, bottom: Tensor) -> Tensor:
    """[[top, 0], [low, bottom]]."""
    n, s, _ = low.shape
    out = low.new_zeros(n, 2 * s, 2 * s)
    out[:, :s, :s], out[:, s:, :s], out[:, s:, s:] = top, low, bottom
    return out


def _scaled(a: Tensor, b: Tensor, factor: float) -> Tensor:
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


def _combine(tiles: Tiles, decay: Tensor, scores: tuple[Tensor, Tensor], beta: Tensor, size: int, spec: _Spec) -> tuple[Any, ...]:
    """From tiles to chunks: joined factors, decay, Aqk, inverse, and the joins for the backward pass."""
    query, key, tail = (x.view(-1, TILE, x.shape[-1]) for x in (tiles.query, tiles.key, tiles.tail))
    scores_q, inverse = scores[0], tile_inverse(scores[1].mul_(beta.view(-1, TILE, 1)))
    joins, width = [], TILE
    while width < size:
        pairs = [x.view(-1, 2, width, x.shape[-1]) for x in (query, key, tail)]
        used, query, key, tail, decay = _join(*pairs, decay.view(-1, 2, decay.shape[-1]))
        cross_q = _scaled(used.query, used.tail.transpose(1, 2), spec.lift)
        cross_k = _scaled(used.key, used.tail.transpose(1, 2), spec.lift).mul_(beta.view(-1, 2, width, 1)[:, 1])
        halves = [x.view(-1, 2, width, width) for x in (scores_q, inverse)]
        scores_q = _below(halves[0][:, 0], cross_q, halves[0][:, 1])
        low = torch.bmm(halves[1][:, 1], torch.bmm(cross_k, halves[1][:, 0])).neg_()
        inverse = _below(halves[1][:, 0], low, halves[1][:, 1])
        joins.append(used)
        width *= 2
    shape = tiles.query.shape
    return query.view(shape), key.view(shape), tail.view(shape), decay, scores_q, inverse, joins


def _prepare(inputs: tuple[Tensor, ...], layout: Layout, spec: _Spec) -> tuple[_Chunks, list[_Join]]:
    q, k, _, g, beta, A_log, dt_bias = inputs
    norms = (_reciprocal_norm(q.reshape(-1, q.shape[-1]), spec.dtype), _reciprocal_norm(k.reshape(-1, k.shape[-1]), spec.dtype))
    gate = _gate(g, A_log, dt_bias, layout, spec)
    tiles = _tiles(q, k, norms, gate, layout, spec)
    strength = _blank(torch.sigmoid(_place(beta[..., None], layout, spec).to(spec.dtype)), layout)[..., 0]
    if spec.lower_bound is None:
        query, key = tiles.column.chunk(2)
        scores = pair_scores(query, key, gate)
    else:
        scores = bounded_scores(tiles.query, tiles.column, 0), bounded_scores(tiles.key, tiles.column, -1)
    decay = tiles.up.view(-1, TILE, tiles.up.shape[-1])[:, -1] * spec.lift
    query, key, tail, decay, scores_q, inverse, joins = _combine(tiles, decay, scores, strength, layout.size, spec)
    weighted = torch.bmm(inverse * strength[:, None, :], key)
    return _Chunks(tiles, query, key, tail, decay, scores_q, inverse, weighted, gate, strength, *norms), joins


def _slice(x: Tensor, layout: Layout, step: tuple[int, int]) -> Tensor:
    return x[step[0] * layout.heads : step[1] * layout.heads]


def _scan(chunks: _Chunks, v: Tensor, state: Tensor | None, layout: Layout, spec: _Spec) -> tuple[Tensor, Tensor, Tensor]:
    """The states, chunk by chunk. Returns X [M, C, V], the entering states [M, K, V], the final states [N, H, K, V]."""
    value = _place(v, layout, spec).to(spec.dtype)
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
        entry = _slice(entering, layout, step)
        entry.copy_(current[:count])
        part = _slice(x, layout, step)
        part.baddbmm_(_slice(chunks.weighted, layout, step), entry, alpha=-spec.lift)
        current = entry * _slice(chunks.decay, layout, step)[..., None]
        current.baddbmm_(_slice(chunks.tail, layout, step).transpose(1, 2), part)
    finals[:active] = current[:active]
    return x, entering, finals.view(shape).index_select(0, layout.rank)


def _outputs(chunks: _Chunks, x: Tensor, entering: Tensor, spec: _Spec) -> Tensor:
    return torch.bmm(chunks.scores, x).baddbmm_(chunks.query, entering, alpha=spec.lift)


def _scan_back(chunks: _Chunks, dout: Tensor, dfinal: Tensor, layout: Layout, spec: _Spec) -> tuple[Tensor, Tensor, Tensor]:
    """The reverse scan. Returns dX [M, C, V], the gradients of the leaving states [M, K, V] and of the initial ones [N, H, K, V]."""
    heads, shape = layout.heads, dfinal.shape
    dx = torch.bmm(chunks.scores.transpose(1, 2), dout)
    read = _scaled(chunks.query.transpose(1, 2), dout, spec.lift)
    leaving = dfinal.new_empty(dx.shape[0], *shape[2:])
    current = dfinal.index_select(0, layout.order).view(-1, *shape[2:])  # gradient of each document's state after its last chunk so far
    for step in reversed(layout.steps):
        count = (step[1] - step[0]) * heads
        leave = _slice(leaving, layout, step)
        leave.copy_(current[:count])
        part = _slice(dx, layout, step)
        part.baddbmm_(_slice(chunks.tail, layout, step), leave)
        before = torch.addcmul(_slice(read, layout, step), leave, _slice(chunks.decay, layout, step)[..., None], out=current[:count])
        before.baddbmm_(_slice(chunks.weighted, layout, step).transpose(1, 2), part, alpha=-spec.lift)
    return dx, leaving, current.view(shape).index_select(0, layout.rank)


class _Rows(NamedTuple):
    """Gradients of the tile factors, each [M, C, K]."""

    query: Tensor
    key: Tensor
    tail: Tensor
    scores_q: Tensor  # [M*C/16, 16, 16] diagonal tiles
    scores_k: Tensor


def _split(joins: list[_Join], rows: _Rows, spec: _Spec) -> _Rows:
    """From chunks back to tiles: the reverse of the joins, widest first."""
    query, key, tail, scores_q, scores_k = rows
    for used in reversed(joins):
        width = used.query.shape[1]
        blocks = [x.view(-1, 2, width, x.shape[-1]) for x in (query, key, tail)]
        quads = [x.view(-1, 2 * width, 2 * width) for x in (scores_q, scores_k)]
        low_q, low_k = (x[:, width:, :width] for x in quads)
        dquery = torch.mul(blocks[0][:, 1], used.first).baddbmm_(low_q, used.tail, alpha=spec.lift)
        dkey = torch.mul(blocks[1][:, 1], used.first).baddbmm_(low_k, used.tail, alpha=spec.lift)
        dtail = torch.mul(blocks[2][:, 0], used.second)
        dtail.baddbmm_(low_q.transpose(1, 2), used.query, alpha=spec.lift).baddbmm_(low_k.transpose(1, 2), used.key, alpha=spec.lift)
        query, key = torch.stack((blocks[0][:, 0], dquery), 1), torch.stack((blocks[1][:, 0], dkey), 1)
        tail = torch.stack((dtail, blocks[2][:, 1]), 1)
        scores_q, scores_k = (torch.stack((x[:, :width, :width], x[:, width:, width:]), 1) for x in quads)
    shape = rows.query.shape
    return _Rows(query.view(shape), key.view(shape), tail.view(shape), scores_q.view(-1, TILE, TILE), scores_k.view(-1, TILE, TILE))


def _tile_gradients(chunks: _Chunks, rows: _Rows, spec: _Spec) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of unit queries (scaled) and keys, of G inside each tile, and the sums <q, dq>, <k, dk> of each row."""
    tiles = chunks.tiles
    if spec.lower_bound is None:
        return _pair_tile_gradients(chunks, rows)
    flat = [x.view(-1, TILE, x.shape[-1]) for x in (tiles.query, tiles.key, tiles.column)]
    shape = tiles.query.shape
    drow_q = rows.query.view(flat[0].shape).baddbmm_(rows.scores_q, flat[2]).view(shape)
    drow_k = rows.key.view(flat[0].shape).baddbmm_(rows.scores_k, flat[2]).view(shape)
    dcolumn = rows.tail.view(flat[0].shape) * tiles.up.view(flat[0].shape)[:, -1:]
    dcolumn.baddbmm_(rows.scores_q.transpose(1, 2), flat[0]).baddbmm_(rows.scores_k.transpose(1, 2), flat[1])
    dcolumn = dcolumn.view(shape)
    along_q, along_k, along_column = drow_q * tiles.query, drow_k * tiles.key, dcolumn * tiles.column
    sum_q, sum_k = along_q.sum(-1, keepdim=True), along_k.sum(-1, keepdim=True).add_(along_column.sum(-1, keepdim=True))
    dG = along_q.add_(along_k).sub_(along_column)
    return drow_q.mul_(tiles.up), drow_k.mul_(tiles.up).add_(dcolumn.div_(tiles.up)), dG, sum_q, sum_k


def _pair_tile_gradients(chunks: _Chunks, rows: _Rows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tiles, gate = chunks.tiles, chunks.gate
    query, key = tiles.column.chunk(2)
    dquery, drow, dcolumn = pair_gradients(query, key, gate, rows.scores_q, rows.scores_k)
    suffix = sum_from(gate.roll(-1, 1).view(-1, TILE, gate.shape[-1]).index_fill(1, _last(gate.device), 0.0), TILE).exp_()
    dquery.addcmul_(rows.query, tiles.up)
    drow.addcmul_(rows.key, tiles.up)
    dcolumn.addcmul_(rows.tail, suffix.view(dcolumn.shape))
    along_q, along_k = dquery * query, (drow + dcolumn) * key
    dG = along_q + (drow - dcolumn) * key
    return dquery, drow + dcolumn, dG, along_q.sum(-1, keepdim=True), along_k.sum(-1, keepdim=True)


def _unnormalise(dunit: Tensor, along: Tensor, norm: Tensor, x: Tensor, factor: float, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Gradient of the raw vector x from that of factor * x * norm, given <unit, dunit>: norm * (factor * d - norm * x * along)."""
    moved = dunit.view(-1, dunit.shape[-1]).index_select(0, layout.places).mul_(norm * factor)
    scale = along.view(-1, 1).index_select(0, layout.places).mul_(norm).mul_(norm)
    return moved.addcmul_(x.reshape(moved.shape).to(dtype), scale, value=-1).to(x.dtype).view(x.shape)


def _gate_gradients(
    chunks: _Chunks, dlog: Tensor, inputs: tuple[Tensor, ...], layout: Layout, spec: _Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of g, A_log and dt_bias from that of the log-decay [M, C, K]."""
    g, A_log, dt_bias = inputs[3], inputs[5], inputs[6]
    rate = A_log.to(spec.dtype).exp()
    if spec.lower_bound is None:
        slope = _softplus_slope(g, dt_bias, rate, spec)
        dlog, value = _return(dlog, layout, g), _return(chunks.gate, layout, g)
        # every term of this gradient holds exp(value): below the rounding of the sums it came from there is only their noise
        dlog.masked_fill_(value < math.log(torch.finfo(spec.dtype).eps), 0.0)
        draw = dlog * slope
        return draw.to(g.dtype), (dlog * value).sum((0, 1, 3)).to(A_log.dtype), draw.sum((0, 1)).to(dt_bias.dtype)
    inner = dlog.mul_(chunks.gate).mul_(1 - chunks.gate).mul_(spec.lower_bound)  # gradient of rate * (g + bias)
    draw = _return(inner, layout, g).mul_(rate[:, None])
    dbias = draw.sum((0, 1))
    # d A_log = sum draw * (g + bias)
    dlograte = (draw * g.to(spec.dtype)).sum((0, 1)).add_(dbias * dt_bias.to(spec.dtype)).sum(1)
    return draw.to(g.dtype), dlograte.to(A_log.dtype), dbias.to(dt_bias.dtype)


def _softplus_slope(g: Tensor, dt_bias: Tensor, rate: Tensor, spec: _Spec) -> Tensor:
    return torch.sigmoid(g.to(spec.dtype) + dt_bias.to(spec.dtype)).mul_(-rate[:, None])


def _chunk_gradients(
    chunks: _Chunks, x: Tensor, entering: Tensor, dx: Tensor, dout: Tensor, leaving: Tensor, spec: _Spec
) -> tuple[_Rows, Tensor, Tensor, Tensor]:
    """Gradients of the chunk factors, of v, of beta's logit, and the last token's share of dG [M, K]."""
    delta = torch.bmm(chunks.inverse.transpose(1, 2), dx)
    dlogit = (delta * x).sum(-1).mul_(1 - chunks.beta)
    dvalue = delta.mul_(chunks.beta[..., None])
    back = dvalue.neg()
    dscores_q = torch.bmm(dout, x.transpose(1, 2)).tril_()
    dscores_k = torch.bmm(back, x.transpose(1, 2)).tril_(-1)
    dquery, dkey = _scaled(dout, entering.transpose(1, 2), spec.lift), _scaled(back, entering.transpose(1, 2), spec.lift)
    dtail = torch.bmm(x, leaving.transpose(1, 2))
    last = (entering * leaving).sum(-1).mul_(chunks.decay).add_((chunks.tail * dtail).sum(1))
    return _Rows(dquery, dkey, dtail, dscores_q, dscores_k), dvalue, dlogit, last


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, spec: _Spec, state: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        chunks, joins = _prepare(inputs, layout, spec)
        x, entering, final = _scan(chunks, inputs[2], state, layout, spec)
        out = _return(_outputs(chunks, x, entering, spec), layout, inputs[2]).to(inputs[2].dtype)
        ctx.layout, ctx.spec, ctx.has_state, ctx.joins = layout, spec, state is not None, len(joins)
        ctx.keep = inputs[0].numel() <= _KEEP_ELEMENTS
        kept = [*chunks.tiles, *chunks[1:], *(t for join in joins for t in join), x, entering] if ctx.keep else []
        ctx.save_for_backward(*inputs, *([] if state is None else [state]), *kept)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dfinal = grad_outputs
        layout, spec = ctx.layout, ctx.spec
        saved = ctx.saved_tensors  # once: recompute hooks refuse a second unpack
        inputs, rest = saved[:7], saved[7:]
        state, rest = (rest[0], rest[1:]) if ctx.has_state else (None, rest)
        if ctx.keep:
            chunks = _Chunks(Tiles(*rest[:5]), *rest[5:16])
            joins = [_Join(*rest[16 + 5 * j : 21 + 5 * j]) for j in range(ctx.joins)]
            x, entering = rest[-2:]
        else:
            chunks, joins = _prepare(inputs, layout, spec)
            x, entering, _ = _scan(chunks, inputs[2], state, layout, spec)
        return None, None, *_backward(chunks, joins, x, entering, inputs, state, dout, dfinal, layout, spec)


def _backward(
    chunks: _Chunks,
    joins: list[_Join],
    x: Tensor,
    entering: Tensor,
    inputs: tuple[Tensor, ...],
    state: Tensor | None,
    dout: Tensor,
    dfinal: Tensor,
    layout: Layout,
    spec: _Spec,
) -> tuple[Tensor | None, ...]:
    """Gradients of the initial state and of the seven inputs."""
    q, k, v, _, beta = inputs[:5]
    dout = _blank(_place(dout, layout, spec).to(spec.dtype), layout)
    dx, leaving, dstate = _scan_back(chunks, dout, dfinal.to(spec.dtype), layout, spec)
    rows, dvalue, dlogit, last = _chunk_gradients(chunks, x, entering, dx, dout, leaving, spec)
    dquery, dkey, dG, along_q, along_k = _tile_gradients(chunks, _split(joins, rows, spec), spec)
    dG.view(dvalue.shape[0], layout.size, -1)[:, -1].add_(last)
    dlog = sum_from(dG, layout.size)
    return (
        None if state is None else dstate.to(state.dtype),
        _unnormalise(dquery, along_q, chunks.norm_q, q, spec.scale, layout, spec.dtype),
        _unnormalise(dkey, along_k, chunks.norm_k, k, 1.0, layout, spec.dtype),
        _return(dvalue, layout, v).to(v.dtype),
        (g := _gate_gradients(chunks, dlog, inputs, layout, spec))[0],
        _return(dlogit[..., None], layout, beta[..., None])[..., 0].to(beta.dtype),
        *g[1:],
    )


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float,
    initial_state: Tensor | None,
    boundaries: list[int] | None,
    size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The chunked path; arguments as `kda_recurrent`, `size` the chunk's tokens (16, 32, 64 or 128).

    Returns:
        o [B, T, H, V] in v's dtype, final state [N, H, K, V] in at least float32.
    """
    batch, length, heads, width = k.shape
    edges = [n * length for n in range(batch + 1)] if boundaries is None else boundaries
    if lower_bound is not None and abs(lower_bound) > anchor_limit():
        raise ValueError(
            f"kda: lower_bound = {lower_bound}: below {-anchor_limit():.2f} a chunk's factors leave float32's range; use backend recurrent"
        )
    if batch * length == 0:
        return kda_recurrent(q, k, v, g, beta, A_log, dt_bias, lower_bound, scale, initial_state, boundaries)
    layout = chunk_layout(tuple(edges), size or chunk_size(width), heads, q.device)
    spec = _Spec(lower_bound, scale, compute_dtype(q, k, v, g, beta), batch * length, heads)
    return _ChunkKDA.apply(layout, spec, initial_state, q, k, v, g, beta, A_log, dt_bias)  # pyright: ignore[reportReturnType]
