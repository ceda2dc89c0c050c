"""The backward pass of chunked KDA in plain torch, from the gradients of outputs and final states; formulas in `chunk.py`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.ops.kda.chunk_forward import Chunks, Join, Spec, blank, last_row, place, put_back, scaled, slice_of
from atoll.ops.kda.layout import Layout
from atoll.ops.kda.tiles import TILE, pair_gradients, sum_from


def _scan_back(chunks: Chunks, dout: Tensor, dfinal: Tensor, layout: Layout, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """The reverse scan. Returns dX [M, C, V], the gradients of the leaving states [M, K, V] and of the initial ones [N, H, K, V]."""
    heads, shape = layout.heads, dfinal.shape
    dx = torch.bmm(chunks.scores.transpose(1, 2), dout)
    read = scaled(chunks.query.transpose(1, 2), dout, spec.lift)
    leaving = dfinal.new_empty(dx.shape[0], *shape[2:])
    current = dfinal.index_select(0, layout.order).view(-1, *shape[2:])  # gradient of each document's state after its last chunk so far
    for step in reversed(layout.steps):
        count = (step[1] - step[0]) * heads
        leave = slice_of(leaving, layout, step)
        leave.copy_(current[:count])
        part = slice_of(dx, layout, step)
        part.baddbmm_(slice_of(chunks.tail, layout, step), leave)
        before = torch.addcmul(slice_of(read, layout, step), leave, slice_of(chunks.decay, layout, step)[..., None], out=current[:count])
        before.baddbmm_(slice_of(chunks.weighted, layout, step).transpose(1, 2), part, alpha=-spec.lift)
    return dx, leaving, current.view(shape).index_select(0, layout.rank)


class _Rows(NamedTuple):
    """Gradients of the tile factors, each [M, C, K]."""

    query: Tensor
    key: Tensor
    tail: Tensor
    scores_q: Tensor  # [M*C/16, 16, 16] diagonal tiles
    scores_k: Tensor


def _split(joins: list[Join], rows: _Rows, spec: Spec) -> _Rows:
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


def _tile_gradients(chunks: Chunks, rows: _Rows, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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


def _pair_tile_gradients(chunks: Chunks, rows: _Rows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tiles, gate = chunks.tiles, chunks.gate
    query, key = tiles.column.chunk(2)
    dquery, drow, dcolumn = pair_gradients(query, key, gate, rows.scores_q, rows.scores_k)
    suffix = sum_from(gate.roll(-1, 1).view(-1, TILE, gate.shape[-1]).index_fill(1, last_row(gate.device), 0.0), TILE).exp_()
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


def _gate_gradients(chunks: Chunks, dlog: Tensor, inputs: tuple[Tensor, ...], layout: Layout, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of g, A_log and dt_bias from that of the log-decay [M, C, K]."""
    g, A_log, dt_bias = inputs[3], inputs[5], inputs[6]
    rate = A_log.to(spec.dtype).exp()
    if spec.lower_bound is None:
        slope = _softplus_slope(g, dt_bias, rate, spec)
        dlog, value = put_back(dlog, layout, g), put_back(chunks.gate, layout, g)
        # every term of this gradient holds exp(value): below the rounding of the sums it came from there is only their noise
        dlog.masked_fill_(value < math.log(torch.finfo(spec.dtype).eps), 0.0)
        draw = dlog * slope
        return draw.to(g.dtype), (dlog * value).sum((0, 1, 3)).to(A_log.dtype), draw.sum((0, 1)).to(dt_bias.dtype)
    inner = dlog.mul_(chunks.gate).mul_(1 - chunks.gate).mul_(spec.lower_bound)  # gradient of rate * (g + bias)
    draw = put_back(inner, layout, g).mul_(rate[:, None])
    dbias = draw.sum((0, 1))
    # d A_log = sum draw * (g + bias)
    dlograte = (draw * g.to(spec.dtype)).sum((0, 1)).add_(dbias * dt_bias.to(spec.dtype)).sum(1)
    return draw.to(g.dtype), dlograte.to(A_log.dtype), dbias.to(dt_bias.dtype)


def _softplus_slope(g: Tensor, dt_bias: Tensor, rate: Tensor, spec: Spec) -> Tensor:
    return torch.sigmoid(g.to(spec.dtype) + dt_bias.to(spec.dtype)).mul_(-rate[:, None])


def _chunk_gradients(
    chunks: Chunks, x: Tensor, entering: Tensor, dx: Tensor, dout: Tensor, leaving: Tensor, spec: Spec
) -> tuple[_Rows, Tensor, Tensor, Tensor]:
    """Gradients of the chunk factors, of v, of beta's logit, and the last token's share of dG [M, K]."""
    delta = torch.bmm(chunks.inverse.transpose(1, 2), dx)
    dlogit = (delta * x).sum(-1).mul_(1 - chunks.beta)
    dvalue = delta.mul_(chunks.beta[..., None])
    back = dvalue.neg()
    dscores_q = torch.bmm(dout, x.transpose(1, 2)).tril_()
    dscores_k = torch.bmm(back, x.transpose(1, 2)).tril_(-1)
    dquery, dkey = scaled(dout, entering.transpose(1, 2), spec.lift), scaled(back, entering.transpose(1, 2), spec.lift)
    dtail = torch.bmm(x, leaving.transpose(1, 2))
    last = (entering * leaving).sum(-1).mul_(chunks.decay).add_((chunks.tail * dtail).sum(1))
    return _Rows(dquery, dkey, dtail, dscores_q, dscores_k), dvalue, dlogit, last


def backward(
    chunks: Chunks,
    joins: list[Join],
    x: Tensor,
    entering: Tensor,
    inputs: tuple[Tensor, ...],
    state: Tensor | None,
    dout: Tensor,
    dfinal: Tensor,
    layout: Layout,
    spec: Spec,
) -> tuple[Tensor | None, ...]:
    """Gradients of the initial state and of the seven inputs."""
    q, k, v, _, beta = inputs[:5]
    dout = blank(place(dout, layout, spec).to(spec.dtype), layout)
    dx, leaving, dstate = _scan_back(chunks, dout, dfinal.to(spec.dtype), layout, spec)
    rows, dvalue, dlogit, last = _chunk_gradients(chunks, x, entering, dx, dout, leaving, spec)
    dquery, dkey, dG, along_q, along_k = _tile_gradients(chunks, _split(joins, rows, spec), spec)
    dG.view(dvalue.shape[0], layout.size, -1)[:, -1].add_(last)
    dlog = sum_from(dG, layout.size)
    return (
        None if state is None else dstate.to(state.dtype),
        _unnormalise(dquery, along_q, chunks.norm_q, q, spec.scale, layout, spec.dtype),
        _unnormalise(dkey, along_k, chunks.norm_k, k, 1.0, layout, spec.dtype),
        put_back(dvalue, layout, v).to(v.dtype),
        (g := _gate_gradients(chunks, dlog, inputs, layout, spec))[0],
        put_back(dlogit[..., None], layout, beta[..., None])[..., 0].to(beta.dtype),
        *g[1:],
    )
