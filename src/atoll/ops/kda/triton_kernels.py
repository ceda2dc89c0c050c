"""Triton kernels of chunked KDA with bounded decay. Imported only where Triton is; launched by `triton_path.py`.

Notation as in `chunk.py`, chunks of 64 tokens, four tiles of 16. Decay is kept in powers of two. Column block j of the score
matrices has one anchor, 2^ANCHOR above the decay at its start, shared by its own rows and every row below: [64, K] x [K, 16]
products, one a block, and rows above the block are masked after the product. No kernel reads what another program of the same
launch wrote, and no sum is atomic: results do not depend on scheduling.

Intermediates are chunk-major, [chunks, heads, 64, D], filled with zeros past a document's end, so the scans load without masks.
"""

# ruff: noqa: N803  (constexpr arguments are capitals by Triton's habit)

import triton
import triton.language as tl

TOKENS = 64  # tokens a chunk
TILE = 16

_LOG2E = tl.constexpr(1.4426950408889634)
_EPS = tl.constexpr(1e-6)


@triton.jit
def _mm(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(DOT), b.to(DOT), input_precision=PRECISION)


@triton.jit
def _mma(a, b, acc, DOT: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(DOT), b.to(DOT), acc, input_precision=PRECISION)


@triton.jit
def _rows(pointer, start, first, count, h, H, D: tl.constexpr, N: tl.constexpr):
    """Rows first … first+N-1 of a chunk of [T, H, D] in float32, zero from `count` on."""
    row = first + tl.arange(0, N)
    at = (start + row).to(tl.int64)[:, None] * (H * D) + h * D + tl.arange(0, D)[None, :]
    return tl.load(pointer + at, mask=(row < count)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _unit(x):
    """Reciprocal L2 norms of the rows, as a column."""
    return tl.rsqrt(tl.sum(x * x, 1) + _EPS)[:, None]


@triton.jit
def _gate(g, first, count, h, A_log, dt_bias, K: tl.constexpr, N: tl.constexpr):
    """Sigmoid of the gate logits, zero from `count` on."""
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + tl.arange(0, K)).to(tl.float32)
    row = first + tl.arange(0, N)
    return tl.where((row < count)[:, None], tl.sigmoid(rate * (g + bias[None, :])), 0.0)


@triton.jit
def _offset(total, J0: tl.constexpr, J1: tl.constexpr, BELOW: tl.constexpr):
    """For each tile I, the sum of the totals [4, K] of tiles J in [J0, J1) that lie before I (BELOW) or after it."""
    tile = tl.arange(0, 4)[:, None]
    out = tl.zeros_like(total)
    for J in tl.static_range(J0, J1):
        one = tl.sum(tl.where(tile == J, total, 0.0), 0)[None, :]
        out += tl.where(tile > J, one, 0.0) if BELOW else tl.where(tile < J, one, 0.0)
    return out


@triton.jit
def _column_factor(pointer_k, pointer_g, start, first, count, h, H, A_log, dt_bias, decay, K: tl.constexpr, ANCHOR: tl.constexpr):
    """exp(-G) / anchor and unit keys of the 16 tokens of a column block, G from the block's start."""
    key = _rows(pointer_k, start, first, count, h, H, K, 16)
    gate = _gate(_rows(pointer_g, start, first, count, h, H, K, 16), first, count, h, A_log, dt_bias, K, 16)
    down = tl.exp2(-decay * tl.cumsum(gate, 0)) * (1.0 / ANCHOR)
    return key * _unit(key), down


@triton.jit
def _inverse(A, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower A: exactly on 4 x 4 blocks, then by doubling."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    eye = tl.where(i == j, 1.0, 0.0)
    block = tl.where(i // 4 == j // 4, A, 0.0)
    inverse = tl.dot(eye - block, tl.dot(block, block, eye, input_precision=PRECISION), input_precision=PRECISION)
    for level in tl.static_range(2, 6):
        low = tl.where((i // (2 << level) == j // (2 << level)) & (i // (1 << level) != j // (1 << level)), A, 0.0)
        low = tl.dot(inverse, low, input_precision=PRECISION)
        inverse = inverse - tl.dot(low, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _store(pointer, x, place, M: tl.constexpr, N: tl.constexpr):
    """x [M, N] at matrix number `place`."""
    at = place.to(tl.int64) * (M * N) + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(pointer + at, x.to(pointer.dtype.element_ty))


@triton.jit
def _load(pointer, place, first, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr):
    """Rows first … first+ROWS-1, columns COLUMN … COLUMN+WIDTH-1 of matrix number `place` of [., M, N]."""
    at = place.to(tl.int64) * (M * N) + (first + tl.arange(0, ROWS))[:, None] * N + COLUMN + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointer + at)


@triton.jit
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, starts, counts, query, key, tail, decay_end, inverse, scores, scale, lower_bound, H,
    K: tl.constexpr, ANCHOR: tl.constexpr, DOT: tl.constexpr, KEYDOT: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """One (chunk, head): decayed queries, keys and tails, (I + A)^-1 and Aqk. H fastest, so neighbours share cache lines."""
    place = tl.program_id(0)
    chunk, h = place // H, place % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    decay = lower_bound * _LOG2E
    gate = _gate(_rows(g, start, 0, count, h, H, K, 64), 0, count, h, A_log, dt_bias, K, 64)
    tiles = tl.reshape(gate * decay, [4, 16, K])
    inside = tl.cumsum(tiles, 1)
    total = tl.sum(tiles, 1)
    prefix = tl.exp2(tl.reshape(inside + _offset(total, 0, 3, True)[:, None, :], [64, K]))
    suffix = tl.exp2(tl.reshape(total[:, None, :] - inside + _offset(total, 1, 4, False)[:, None, :], [64, K]))
    tl.store(decay_end + place.to(tl.int64) * K + tl.arange(0, K), tl.exp2(tl.sum(total, 0)))
    x = _rows(q, start, 0, count, h, H, K, 64)
    unit_q = x * _unit(x)
    x = _rows(k, start, 0, count, h, H, K, 64)
    unit_k = x * _unit(x)
    _store(query, unit_q * prefix * scale, place, 64, K)
    _store(key, unit_k * prefix, place, 64, K)
    _store(tail, unit_k * suffix, place, 64, K)
    row = tl.arange(0, 64)
    strength = tl.sigmoid(tl.load(beta + (start + row) * H + h, mask=row < count, other=0.0).to(tl.float32))
    strength = tl.where(row < count, strength, 0.0)
    a0 = _score_block(0, inside, total, unit_q, unit_k, strength, k, g, start, count, h, H, A_log, dt_bias, decay, scale, scores, place, K, ANCHOR, DOT, KEYDOT, PRECISION)
    a1 = _score_block(1, inside, total, unit_q, unit_k, strength, k, g, start, count, h, H, A_log, dt_bias, decay, scale, scores, place, K, ANCHOR, DOT, KEYDOT, PRECISION)
    a2 = _score_block(2, inside, total, unit_q, unit_k, strength, k, g, start, count, h, H, A_log, dt_bias, decay, scale, scores, place, K, ANCHOR, DOT, KEYDOT, PRECISION)
    a3 = _score_block(3, inside, total, unit_q, unit_k, strength, k, g, start, count, h, H, A_log, dt_bias, decay, scale, scores, place, K, ANCHOR, DOT, KEYDOT, PRECISION)
    joined = tl.join(tl.join(a0, a1), tl.join(a2, a3))  # [64, 16, pair, half]
    A = tl.reshape(tl.permute(joined, [0, 3, 2, 1]), [64, 64])
    _store(inverse, _inverse(A, 64, INVERSE), place, 64, 64)


@triton.jit
def _row_factor(inside, total, J: tl.constexpr, K: tl.constexpr, ANCHOR: tl.constexpr):
    """exp(G) * anchor of the 64 rows, G from the start of tile J; below one in tiles before J, whose entries are masked later."""
    return tl.exp2(tl.reshape(inside + _offset(total, J, 3, True)[:, None, :], [64, K])) * ANCHOR


@triton.jit
def _score_block(
    J: tl.constexpr, inside, total, unit_q, unit_k, strength, k, g, start, count, h, H, A_log, dt_bias, decay, scale, scores, place,
    K: tl.constexpr, ANCHOR: tl.constexpr, DOT: tl.constexpr, KEYDOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns 16J … 16J+15 of Aqk (stored) and of A (returned, [64, 16])."""
    up = _row_factor(inside, total, J, K, ANCHOR)
    unit, down = _column_factor(k, g, start, J * 16, count, h, H, A_log, dt_bias, decay, K, ANCHOR)
    column = tl.trans(unit * down)
    i = tl.arange(0, 64)[:, None]
    j = J * 16 + tl.arange(0, 16)[None, :]
    aqk = tl.where(i >= j, _mm(unit_q * up, column, DOT, PRECISION) * scale, 0.0)
    at = place.to(tl.int64) * 4096 + i * 64 + j
    tl.store(scores + at, aqk.to(scores.dtype.element_ty))
    return tl.where(i > j, _mm(unit_k * up, column, KEYDOT, PRECISION) * strength[:, None], 0.0)


@triton.jit
def scan_kernel(
    query, key, tail, decay_end, inverse, scores, v, beta, starts, counts, first_chunk, initial, final, o, entering, updates, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    HAS_INITIAL: tl.constexpr, STORE_FINAL: tl.constexpr, STORE_O: tl.constexpr, STORE_STATES: tl.constexpr,
):  # fmt: skip
    """One (document, head, BV value columns): states in order, outputs; for the backward pass also entering states and updates X."""
    block, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    col = block * BV + tl.arange(0, BV)
    row = tl.arange(0, 64)
    channel = tl.arange(0, K)
    at_state = (n * H + h).to(tl.int64) * (K * V) + channel[:, None] * V + col[None, :]
    if HAS_INITIAL:
        state = tl.load(initial + at_state).to(tl.float32)
    else:
        state = tl.zeros([K, BV], tl.float32)
    for chunk in range(tl.load(first_chunk + n), tl.load(first_chunk + n + 1)):
        place = (chunk * H + h).to(tl.int64)
        start = tl.load(starts + chunk).to(tl.int64)
        count = tl.load(counts + chunk)
        here = (row < count)[:, None]
        at_v = (start + row)[:, None] * (H * V) + h * V + col[None, :]
        value = tl.load(v + at_v, mask=here, other=0.0).to(tl.float32)
        strength = tl.sigmoid(tl.load(beta + (start + row) * H + h, mask=row < count, other=0.0).to(tl.float32))
        strength = tl.where(row < count, strength, 0.0)
        held = state.to(DOT)
        if STORE_STATES:
            tl.store(entering + place * (K * V) + channel[:, None] * V + col[None, :], held.to(entering.dtype.element_ty))
        rest = (value - _mm(_load(key, place, 0, 64, K, 64, 0, K), held, DOT, PRECISION)) * strength[:, None]
        x = _mm(_load(inverse, place, 0, 64, 64, 64, 0, 64), rest, DOT, PRECISION).to(DOT)
        if STORE_STATES:
            tl.store(updates + place * (64 * V) + row[:, None] * V + col[None, :], x.to(updates.dtype.element_ty))
        if STORE_O:
            out = _mm(_load(query, place, 0, 64, K, 64, 0, K), held, DOT, PRECISION)
            out = _mma(_load(scores, place, 0, 64, 64, 64, 0, 64), x, out, DOT, PRECISION)
            tl.store(o + at_v, out.to(o.dtype.element_ty), mask=here)
        fade = tl.load(decay_end + place * K + channel)[:, None]
        state = _mma(tl.trans(_load(tail, place, 0, 64, K, 64, 0, K)), x, state * fade, DOT, PRECISION)
    if STORE_FINAL:
        tl.store(final + at_state, state)


@triton.jit
def scan_back_kernel(
    query, key, tail, decay_end, inverse, scores, beta, starts, counts, first_chunk, updates, do, dfinal, dinitial, dv, leaving, dbeta, H, BLOCKS,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    HAS_DFINAL: tl.constexpr, STORE_DINITIAL: tl.constexpr,
):  # fmt: skip
    """The reverse scan of one (document, head, BV columns): dv, gradients of the leaving states, and this block's share of beta's."""
    block, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    col = block * BV + tl.arange(0, BV)
    row = tl.arange(0, 64)
    channel = tl.arange(0, K)
    at_state = (n * H + h).to(tl.int64) * (K * V) + channel[:, None] * V + col[None, :]
    if HAS_DFINAL:
        dstate = tl.load(dfinal + at_state).to(tl.float32)
    else:
        dstate = tl.zeros([K, BV], tl.float32)
    first = tl.load(first_chunk + n)
    last = tl.load(first_chunk + n + 1)
    for step in range(first, last):
        chunk = first + last - 1 - step
        place = (chunk * H + h).to(tl.int64)
        start = tl.load(starts + chunk).to(tl.int64)
        count = tl.load(counts + chunk)
        here = (row < count)[:, None]
        at_v = (start + row)[:, None] * (H * V) + h * V + col[None, :]
        up = tl.load(do + at_v, mask=here, other=0.0).to(DOT)
        strength = tl.sigmoid(tl.load(beta + (start + row) * H + h, mask=row < count, other=0.0).to(tl.float32))
        strength = tl.where(row < count, strength, 0.0)
        held = dstate.to(DOT)
        tl.store(leaving + place * (K * V) + channel[:, None] * V + col[None, :], held.to(leaving.dtype.element_ty))
        dx = _mm(tl.trans(_load(scores, place, 0, 64, 64, 64, 0, 64)), up, DOT, PRECISION)
        dx = _mma(_load(tail, place, 0, 64, K, 64, 0, K), held, dx, DOT, PRECISION)
        delta = _mm(tl.trans(_load(inverse, place, 0, 64, 64, 64, 0, 64)), dx, DOT, PRECISION)
        x = tl.load(updates + place * (64 * V) + row[:, None] * V + col[None, :]).to(tl.float32)
        share = tl.sum(delta * x, 1) * (1 - strength)
        tl.store(dbeta + ((start + row) * H + h) * BLOCKS + block, share, mask=row < count)
        dvalue = delta * strength[:, None]
        tl.store(dv + at_v, dvalue.to(dv.dtype.element_ty), mask=here)
        fade = tl.load(decay_end + place * K + channel)[:, None]
        dstate = _mma(tl.trans(_load(query, place, 0, 64, K, 64, 0, K)), up, dstate * fade, DOT, PRECISION)
        dstate = _mma(tl.trans(_load(key, place, 0, 64, K, 64, 0, K)), -dvalue, dstate, DOT, PRECISION)
    if STORE_DINITIAL:
        tl.store(dinitial + at_state, dstate)


@triton.jit
def _insert(acc, x, J: tl.constexpr, K: tl.constexpr):
    """acc [64, K] with x [16, K] added to the rows of tile J."""
    tile = tl.arange(0, 4)[:, None, None]
    return acc + tl.reshape(tl.where(tile == J, x[None, :, :], 0.0), [64, K])


@triton.jit
def _gradient_block(
    J: tl.constexpr, dq, dkr, dkc, inside, total, unit_q, unit_k, k, g, do, dv, updates, start, count, h, H, A_log, dt_bias, decay, scale, place,
    K: tl.constexpr, V: tl.constexpr, ANCHOR: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what column block J of the scores gives to queries, keys as rows and keys as columns."""
    up = _row_factor(inside, total, J, K, ANCHOR)
    unit, down = _column_factor(k, g, start, J * 16, count, h, H, A_log, dt_bias, decay, K, ANCHOR)
    column = unit * down
    x = _load(updates, place, J * 16, 64, V, 16, 0, V)
    dout = _rows(do, start, 0, count, h, H, V, 64)
    dvalue = _rows(dv, start, 0, count, h, H, V, 64)
    i = tl.arange(0, 64)
    j = J * 16 + tl.arange(0, 16)
    dscore_q = tl.where(i[:, None] >= j[None, :], _mm(dout, tl.trans(x), DOT, PRECISION) * scale, 0.0)
    dscore_k = tl.where(i[:, None] > j[None, :], -_mm(dvalue, tl.trans(x), DOT, PRECISION), 0.0)
    dq += _mm(dscore_q, column, DOT, PRECISION) * up
    dkr += _mm(dscore_k, column, DOT, PRECISION) * up
    # the transposed products anew: a transposed accumulator as an operand is miscompiled by some Triton versions on Hopper
    dscore_q = tl.where(i[None, :] >= j[:, None], _mm(x, tl.trans(dout), DOT, PRECISION) * scale, 0.0)
    dscore_k = tl.where(i[None, :] > j[:, None], -_mm(x, tl.trans(dvalue), DOT, PRECISION), 0.0)
    dcolumn = _mm(dscore_q, unit_q * up, DOT, PRECISION)
    dcolumn = _mma(dscore_k, unit_k * up, dcolumn, DOT, PRECISION)
    return dq, dkr, _insert(dkc, dcolumn * down, J, K)


@triton.jit
def gradient_kernel(
    q, k, g, beta, A_log, dt_bias, starts, counts, entering, leaving, updates, do, dv, dq_out, dk_out, dg_out, dbias, drate, scale, lower_bound, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, ANCHOR: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (chunk, head): gradients of q, k, g, and this chunk's share of those of dt_bias and A_log."""
    place = tl.program_id(0)
    chunk, h = place // H, place % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    row = tl.arange(0, 64)
    decay = lower_bound * _LOG2E
    dq = tl.zeros([64, K], tl.float32)
    dkr = tl.zeros([64, K], tl.float32)
    dkc = tl.zeros([64, K], tl.float32)
    last = tl.zeros([K], tl.float32)
    for b in tl.static_range(0, V, BV):
        col = b + tl.arange(0, BV)
        at_v = (start + row)[:, None] * (H * V) + h * V + col[None, :]
        dout = tl.load(do + at_v, mask=(row < count)[:, None], other=0.0)
        dvalue = tl.load(dv + at_v, mask=(row < count)[:, None], other=0.0)
        state = _load(entering, place, 0, K, V, K, b, BV)
        dstate = _load(leaving, place, 0, K, V, K, b, BV)
        dq = _mma(dout, tl.trans(state), dq, DOT, PRECISION)
        dkr = _mma(-dvalue, tl.trans(state), dkr, DOT, PRECISION)
        dkc = _mma(_load(updates, place, 0, 64, V, 64, b, BV), tl.trans(dstate), dkc, DOT, PRECISION)
        last += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    raw_g = _rows(g, start, 0, count, h, H, K, 64)
    gate = _gate(raw_g, 0, count, h, A_log, dt_bias, K, 64)
    tiles = tl.reshape(gate * decay, [4, 16, K])
    inside = tl.cumsum(tiles, 1)
    total = tl.sum(tiles, 1)
    prefix = tl.exp2(tl.reshape(inside + _offset(total, 0, 3, True)[:, None, :], [64, K]))
    suffix = tl.exp2(tl.reshape(total[:, None, :] - inside + _offset(total, 1, 4, False)[:, None, :], [64, K]))
    raw_q = _rows(q, start, 0, count, h, H, K, 64)
    norm_q = _unit(raw_q)
    unit_q = raw_q * norm_q
    raw_k = _rows(k, start, 0, count, h, H, K, 64)
    norm_k = _unit(raw_k)
    unit_k = raw_k * norm_k
    dq = dq * prefix * scale
    dkr = dkr * prefix
    dkc = dkc * suffix
    last = last * tl.exp2(tl.sum(total, 0)) + tl.sum(unit_k * dkc, 0)
    dq, dkr, dkc = _gradient_block(0, dq, dkr, dkc, inside, total, unit_q, unit_k, k, g, do, dv, updates, start, count, h, H, A_log, dt_bias, decay, scale, place, K, V, ANCHOR, DOT, PRECISION)
    dq, dkr, dkc = _gradient_block(1, dq, dkr, dkc, inside, total, unit_q, unit_k, k, g, do, dv, updates, start, count, h, H, A_log, dt_bias, decay, scale, place, K, V, ANCHOR, DOT, PRECISION)
    dq, dkr, dkc = _gradient_block(2, dq, dkr, dkc, inside, total, unit_q, unit_k, k, g, do, dv, updates, start, count, h, H, A_log, dt_bias, decay, scale, place, K, V, ANCHOR, DOT, PRECISION)
    dq, dkr, dkc = _gradient_block(3, dq, dkr, dkc, inside, total, unit_q, unit_k, k, g, do, dv, updates, start, count, h, H, A_log, dt_bias, decay, scale, place, K, V, ANCHOR, DOT, PRECISION)
    dlog = unit_q * dq + unit_k * (dkr - dkc) + tl.where((row == 63)[:, None], last[None, :], 0.0)
    dlog = tl.cumsum(dlog, 0, reverse=True)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    draw = dlog * gate * (1 - gate) * (lower_bound * rate)
    bias = tl.load(dt_bias + h * K + tl.arange(0, K)).to(tl.float32)
    tl.store(dbias + place.to(tl.int64) * K + tl.arange(0, K), tl.sum(draw, 0))
    tl.store(drate + place.to(tl.int64) * K + tl.arange(0, K), tl.sum(draw * (raw_g + bias[None, :]), 0))
    at = (start + row)[:, None] * (H * K) + h * K + tl.arange(0, K)[None, :]
    here = (row < count)[:, None]
    tl.store(dg_out + at, draw.to(dg_out.dtype.element_ty), mask=here)
    dq = norm_q * (dq - unit_q * tl.sum(unit_q * dq, 1)[:, None])
    tl.store(dq_out + at, dq.to(dq_out.dtype.element_ty), mask=here)
    dk = dkr + dkc
    dk = norm_k * (dk - unit_k * tl.sum(unit_k * dk, 1)[:, None])
    tl.store(dk_out + at, dk.to(dk_out.dtype.element_ty), mask=here)
