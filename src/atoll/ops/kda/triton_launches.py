"""The launches of one KDA call on a GPU: three kernels forward, six backward (three of them the forward's again).

Segments of cut documents take one launch more forward, and two more backward, and a short one to join them; see `triton_scan.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from atoll.ops.dispatch import launch
from atoll.ops.kda import triton_scan as scans
from atoll.ops.kda.table import TOKENS, Table
from atoll.ops.kda.triton_gradient import gradient_kernel, pair_gradient_kernel
from atoll.ops.kda.triton_path import BFLOAT16, BFLOAT16_WIDE, FLOAT32, Config
from atoll.ops.kda.triton_prepare import gate_kernel, prepare_kernel

BLOCK = 32  # tokens that share an anchor


def shift(lower_bound: float) -> int:
    """Powers of two between the decay at a block's start and its anchor: half of what 31 tokens can decay."""
    return math.ceil((BLOCK - 1) / 2 * abs(lower_bound) / math.log(2))


class Call(NamedTuple):
    """What every launch of one call shares."""

    table: Table
    heads: int
    width: int
    value: int
    scale: float
    lower_bound: float
    dot: Any
    store: torch.dtype
    precision: str
    config: Config


def make_call(q: Tensor, v: Tensor, table: Table, scale: float, lower_bound: float, config: Config | None) -> Call:
    wide = q.dtype == torch.float32 or v.dtype == torch.float32
    dot, store = (tl.float32, torch.float32) if wide else (tl.bfloat16, torch.bfloat16)
    config = config or (FLOAT32 if wide else BFLOAT16 if q.shape[3] <= 128 else BFLOAT16_WIDE)
    return Call(table, q.shape[2], q.shape[3], v.shape[3], scale, lower_bound, dot, store, "tf32x3" if wide else "tf32", config)


class _Prepared(NamedTuple):
    """What the scans read of each chunk and head; see `prepare_kernel`."""

    query: Tensor
    erase: Tensor
    tail: Tensor
    write: Tensor
    scores: Tensor
    decay_end: Tensor


class _Kept(NamedTuple):
    """What the backward pass uses of a chunk beside that: N^T, G [64, K], its sums over blocks [2, K], reciprocal norms [B, T, H]."""

    turned_inverse: Tensor
    decay: Tensor
    sums: Tensor
    norms_q: Tensor
    norms_k: Tensor


def _prepare(inputs: tuple[Tensor, ...], call: Call, keep: bool) -> tuple[_Prepared, _Kept]:
    q, k, v, g, beta, A_log, dt_bias = inputs
    table, config = call.table, call.config
    places, size = table.chunks * call.heads, TOKENS
    float32 = functools.partial(q.new_empty, dtype=torch.float32)
    query, erase, tail = (q.new_empty(places, size, call.width, dtype=call.store) for _ in range(3))
    write = q.new_empty(places, size, call.value, dtype=call.store)
    scores = q.new_empty(places, size, size, dtype=call.store)
    out = _Prepared(query, erase, tail, write, scores, float32(places, call.width))
    inverse = float32(places if keep else 0, size, size)
    norms = [float32(beta.shape if keep else 0) for _ in range(2)]
    kept = _Kept(inverse, float32(places, size, call.width), float32(places, 2, call.width), *norms)
    launch(gate_kernel, (places,), q,
        g, A_log, dt_bias, table.starts, table.counts, kept.decay, kept.sums, out.decay_end, call.lower_bound, call.heads,
        K=call.width, num_warps=1,
    )  # fmt: skip
    launch(prepare_kernel, (places,), q,
        q, k, v, beta, table.starts, table.counts, kept.decay, kept.sums, query, erase, tail, write, scores, inverse, *norms,
        call.scale, call.heads,
        K=call.width, C=min(config.prepare_channels, call.width), V=call.value, SOLVE=min(config.prepare_columns, call.width, call.value),
        SHIFT=shift(call.lower_bound), DOT=call.dot, PRECISION=call.precision, KEEP=keep,
        num_warps=config.prepare_warps, maxnreg=config.prepare_registers or None,
    )  # fmt: skip
    return out, kept


class _Pieces(NamedTuple):
    """Of each piece of a cut document: the state it ends in when it starts from zero [S,H,K,V], and its transition [S,H,K,K]."""

    local: Tensor
    carry: Tensor


def _pieces(made: _Prepared, call: Call) -> _Pieces | None:
    """None when no document is cut."""
    table, config = call.table, call.config
    if not table.cut:
        return None
    shape = (table.segments, call.heads, call.width)
    out = _Pieces(*(made.query.new_empty(*shape, n, dtype=torch.float32) for n in (call.value, call.width)))
    columns = min(config.keep_columns, call.value, call.width)
    launch(scans.local_kernel, (table.segments * call.heads * ((call.value + call.width) // columns),), made.query,
        made.erase, made.tail, made.write, made.decay_end, table.first, table.owner, table.first_segment, *out, call.heads,
        K=call.width, V=call.value, BV=columns, DOT=call.dot, PRECISION=call.precision,
        num_warps=config.keep_warps, num_stages=config.keep_stages,
    )  # fmt: skip
    return out


def _join(local: Tensor, carry: Tensor, edge: Tensor | None, call: Call, back: bool) -> Tensor:
    """The state (gradient of the state) at the near edge of every segment [S,H,K,V]."""
    out = torch.empty_like(local)
    columns, width, most = min(32, call.value), call.width, call.config.join_channels
    launch(scans.join_kernel, (call.table.documents * call.heads * (call.value // columns),), local,
        local, carry, call.table.first_segment, edge, out, call.heads,
        K=width, C=width if width <= most else min(64, most), V=call.value, BV=columns, BACK=back, HAS_EDGE=edge is not None, num_warps=8,
    )  # fmt: skip
    return out


def _scan(made: _Prepared, state: Tensor | None, call: Call, o: Tensor | None, final: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """Outputs into `o` and states into `final` where given; with `keep`, the entering states and updates. `state` one a segment."""
    table, config = call.table, call.config
    places, size = (table.chunks * call.heads, TOKENS) if keep else (0, 0)
    entering = made.query.new_empty(places, call.width, call.value)
    updates = made.query.new_empty(places, size, call.value)
    if keep:
        columns, warps, stages = config.keep_columns, config.keep_warps, config.keep_stages
    else:
        columns, warps, stages = config.scan_columns, config.scan_warps, config.scan_stages
    columns = min(columns, call.value)
    launch(scans.scan_kernel, (table.segments * call.heads * (call.value // columns),), made.query,
        made.query, made.erase, made.tail, made.write, made.scores, made.decay_end, table.starts, table.counts, table.first,
        table.owner, table.first_segment, state, final, o, entering, updates, call.heads,
        K=call.width, V=call.value, BV=columns, DOT=call.dot, PRECISION=call.precision, HAS_INITIAL=state is not None,
        STORE_FINAL=final is not None, STORE_O=o is not None, STORE_STATES=keep, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return entering, updates


def _scan_back(
    made: _Prepared, do: Tensor, dfinal: Tensor | None, dinitial: Tensor | None, call: Call, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """Gradients of the leaving states and of the updates; `dfinal` one a segment, `dinitial` one a document (without `keep` a piece)."""
    table, config = call.table, call.config
    places, size = (table.chunks * call.heads, TOKENS) if keep else (0, 0)
    leaving = made.query.new_empty(places, call.width, call.value)
    dupdates = made.query.new_empty(places, size, call.value, dtype=torch.float32)  # N^T, which comes next, would amplify rounding
    columns = min(config.back_columns, call.value)
    launch(scans.scan_back_kernel, (table.segments * call.heads * (call.value // columns),), made.query,
        made.query, made.erase, made.tail, made.scores, made.decay_end, table.starts, table.counts, table.first,
        table.owner, table.first_segment, do, dfinal, dinitial, dupdates, leaving, call.heads,
        K=call.width, V=call.value, BV=columns, DOT=call.dot, PRECISION=call.precision,
        HAS_DFINAL=dfinal is not None, STORE_DINITIAL=dinitial is not None, STORE=keep,
        num_warps=config.back_warps, num_stages=config.back_stages,
    )  # fmt: skip
    return leaving, dupdates


def _gradients(
    inputs: tuple[Tensor, ...],
    o: Tensor,
    do: Tensor,
    kept: _Kept,
    entering: Tensor,
    leaving: Tensor,
    updates: Tensor,
    dupdates: Tensor,
    call: Call,
) -> tuple[Tensor, ...]:
    """Gradients of all seven inputs."""
    q, k, v, g, beta, A_log, dt_bias = inputs
    table, config = call.table, call.config
    channels = min(config.gradient_channels, call.width)
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    dscores, dinner = (torch.empty_like(kept.turned_inverse, dtype=call.store) for _ in range(2))
    dquery, drow, dcol = (q.new_empty(table.chunks * call.heads, TOKENS, call.width, dtype=call.store) for _ in range(3))
    along_q, along_k = (torch.empty_like(beta, dtype=torch.float32) for _ in range(2))
    dend = q.new_empty(table.chunks, call.heads, call.width, dtype=torch.float32)
    dbias, drate = (torch.zeros_like(dend) if table.padded else torch.empty_like(dend) for _ in range(2))  # empty slots write no share
    launch(pair_gradient_kernel, (table.chunks * call.heads,), q,
        v, beta, o, table.starts, table.counts, kept.turned_inverse, updates, dupdates, entering, leaving, do,
        dv, dbeta, along_q, along_k, dscores, dinner, dquery, drow, dcol, dend, call.scale, call.heads,
        K=call.width, C=min(config.pairs_channels, call.width), V=call.value, BV=min(config.pairs_columns, call.value),
        DOT=call.dot, PRECISION=call.precision, ALONG=channels < call.width,
        num_warps=config.pairs_warps, num_stages=config.pairs_stages,
    )  # fmt: skip
    launch(gradient_kernel, (table.chunks * call.heads * (call.width // channels),), q,
        q, k, g, A_log, dt_bias, table.starts, table.counts, kept.decay, kept.sums, kept.norms_q, kept.norms_k,
        dscores, dinner, dquery, drow, dcol, dend, along_q, along_k,
        dq, dk, dg, dbias, drate, call.scale, call.lower_bound, call.heads,
        K=call.width, C=channels, SHIFT=shift(call.lower_bound), DOT=call.dot, PRECISION=call.precision,
        num_warps=config.gradient_warps, maxnreg=config.gradient_registers or None,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta, drate.sum((0, 2)).to(A_log.dtype), dbias.sum(0).to(dt_bias.dtype)


def forward(inputs: tuple[Tensor, ...], state: Tensor | None, final: Tensor | None, o: Tensor, call: Call) -> None:
    """Writes `o`, and `final` where given."""
    made, _ = _prepare(inputs, call, keep=False)
    pieces = _pieces(made, call)
    _scan(made, state if pieces is None else _join(*pieces, state, call, back=False), call, o, final, keep=False)


def backward(
    inputs: tuple[Tensor, ...], o: Tensor, state: Tensor | None, do: Tensor, dfinal: Tensor | None, dstate: Tensor | None, call: Call
) -> tuple[Tensor, ...]:
    """Gradients of the seven inputs; writes `dstate` where given."""
    made, kept = _prepare(inputs, call, keep=True)
    pieces = _pieces(made, call)
    if pieces is not None:
        state = _join(*pieces, state, call, back=False)
        local = torch.empty_like(pieces.local)
        _scan_back(made, do, None, local, call, keep=False)
        dfinal = _join(local, pieces.carry, dfinal, call, back=True)
        del local
    entering, updates = _scan(made, state, call, None, None, keep=True)
    leaving, dupdates = _scan_back(made, do, dfinal, dstate, call)
    del made, pieces, state, dfinal
    return _gradients(inputs, o, do, kept, entering, leaving, updates, dupdates, call)
