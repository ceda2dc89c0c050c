"""Triton kernels of chunked KDA with bounded decay. Imported only where Triton is; launched by `triton_path.py`.

Notation as in `chunk.py`, chunks of 64 tokens, four tiles of 16. Decay is kept in powers of two. Column block j of the score
matrices has one anchor, 2^ANCHOR above the decay at its start, shared by its own rows and every row below: [64, K] x [K, 16]
products, one a block, and rows above the block are masked after the product. No kernel reads what another program of the same
launch wrote, and no sum is atomic: results do not depend on scheduling.

Intermediates are chunk-major, [chunks, heads, 64, D], filled with zeros past a document's end, so the scans load without masks.
"""

# ruff: noqa: E501  (calls of Triton functions are long lists of the same names)

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
def _rows(pointer, start, first, count, h, H, D: tl.constexpr, N: tl.constexpr, C0, C: tl.constexpr):
    """Rows first … first+N-1, channels C0 … C0+C-1 of a chunk of [T, H, D], zero from row `count` on."""
    row = first + tl.arange(0, N)
    at = (start + row).to(tl.int64)[:, None] * (H * D) + h * D + C0 + tl.arange(0, C)[None, :]
    return tl.load(pointer + at, mask=(row < count)[:, None], other=0.0)


@triton.jit
def _norms(pointer, start, first, count, h, H, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """Reciprocal L2 norms of N rows, as a column; C channels are held at once."""
    total = tl.zeros([N], tl.float32)
    for c in tl.static_range(0, D, C):
        x = _rows(pointer, start, first, count, h, H, D, N, c, C).to(tl.float32)
        total += tl.sum(x * x, 1)
    return tl.rsqrt(total + _EPS)[:, None]


@triton.jit
def _gate(g, first, count, h, A_log, dt_bias, K: tl.constexpr, N: tl.constexpr, C0: tl.constexpr, C: tl.constexpr):
    """Sigmoid of the gate logits [N, C], zero from `count` on."""
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + C0 + tl.arange(0, C)).to(tl.float32)
    row = first + tl.arange(0, N)
    return tl.where((row < count)[:, None], tl.sigmoid(rate * (g.to(tl.float32) + bias[None, :])), 0.0)


@triton.jit
def _before(total, J):
    """For each tile I, the sum of the totals [4, C] of the tiles in [J, I)."""
    tile = tl.arange(0, 4)[:, None]
    out = tl.zeros_like(total)
    for P in tl.static_range(0, 3):
        one = tl.sum(tl.where(tile == P, total, 0.0), 0)[None, :]
        out += tl.where((tile > P) & (P >= J), one, 0.0)
    return out


@triton.jit
def _after(total):
    """For each tile, the sum of the totals [4, C] of the tiles after it."""
    tile = tl.arange(0, 4)[:, None]
    out = tl.zeros_like(total)
    for P in tl.static_range(1, 4):
        out += tl.where(tile < P, tl.sum(tl.where(tile == P, total, 0.0), 0)[None, :], 0.0)
    return out


@triton.jit
def _row_factor(inside, total, J, C: tl.constexpr, ANCHOR: tl.constexpr):
    """exp(G) * anchor of the 64 rows, G from the start of tile J; below one in tiles before J, whose entries are masked later."""
    return tl.exp2(tl.reshape(inside + _before(total, J)[:, None, :], [64, C])) * ANCHOR


@triton.jit
def _column_factor(
    k, g, norm, start, first, count, h, H, A_log, dt_bias, decay, K: tl.constexpr, C0: tl.constexpr, C: tl.constexpr, ANCHOR: tl.constexpr
):
    """Unit keys of the 16 tokens of a column block, and exp(-G) / anchor, G from the block's start."""
    key = _rows(k, start, first, count, h, H, K, 16, C0, C).to(tl.float32)
    gate = _gate(_rows(g, start, first, count, h, H, K, 16, C0, C), first, count, h, A_log, dt_bias, K, 16, C0, C)
    return key * norm, tl.exp2(-decay * tl.cumsum(gate, 0)) * (1.0 / ANCHOR)


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
def _store(pointer, x, place, M: tl.constexpr, N: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr):
    """x [M, WIDTH] at columns COLUMN … COLUMN+WIDTH-1 of matrix number `place` of [., M, N]."""
    at = place.to(tl.int64) * (M * N) + tl.arange(0, M)[:, None] * N + COLUMN + tl.arange(0, WIDTH)[None, :]
    tl.store(pointer + at, x.to(pointer.dtype.element_ty))


@triton.jit
def _load(pointer, place, first, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMN, WIDTH: tl.constexpr):
    """Rows first … first+ROWS-1, columns COLUMN … COLUMN+WIDTH-1 of matrix number `place` of [., M, N]."""
    at = place.to(tl.int64) * (M * N) + (first + tl.arange(0, ROWS))[:, None] * N + COLUMN + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointer + at)


@triton.jit
def _insert_columns(acc, x, J):
    """acc [64, 64] with x [64, 16] added to columns 16J … 16J+15."""
    tile = tl.arange(0, 4)[None, :, None]
    return acc + tl.reshape(tl.where(tile == J, x[:, None, :], 0.0), [64, 64])


@triton.jit
def _insert_rows(acc, x, J, C: tl.constexpr):
    """acc [64, C] with x [16, C] added to rows 16J … 16J+15."""
    tile = tl.arange(0, 4)[:, None, None]
    return acc + tl.reshape(tl.where(tile == J, x[None, :, :], 0.0), [64, C])


@triton.jit
def _load_transposed(pointer, place, column):
    """Columns column … column+15 of a [64, 64] matrix, as [16, 64]."""
    return tl.load(pointer + place.to(tl.int64) * 4096 + tl.arange(0, 64)[None, :] * 64 + (column + tl.arange(0, 16))[:, None])


@triton.jit
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, starts, counts, query, key, tail, decay_end, inverse, scores, scale, lower_bound, H,
    K: tl.constexpr, C: tl.constexpr, ANCHOR: tl.constexpr, DOT: tl.constexpr, KEYDOT: tl.constexpr, PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """One (chunk, head): decayed queries, keys and tails, (I + A)^-1 and Aqk; C channels at once. Heads fastest, so neighbours share lines."""
    place = tl.program_id(0)
    chunk, h = place // H, place % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    decay = lower_bound * _LOG2E
    norm_q = _norms(q, start, 0, count, h, H, K, 64, C)
    norm_k = _norms(k, start, 0, count, h, H, K, 64, C)
    aqk = tl.zeros([64, 64], tl.float32)
    akk = tl.zeros([64, 64], tl.float32)
    for c in tl.static_range(0, K, C):
        gate = _gate(_rows(g, start, 0, count, h, H, K, 64, c, C), 0, count, h, A_log, dt_bias, K, 64, c, C)
        tiles = tl.reshape(gate * decay, [4, 16, C])
        inside = tl.cumsum(tiles, 1)
        total = tl.sum(tiles, 1)
        unit_q = _rows(q, start, 0, count, h, H, K, 64, c, C).to(tl.float32) * norm_q
        unit_k = _rows(k, start, 0, count, h, H, K, 64, c, C).to(tl.float32) * norm_k
        factor = tl.exp2(tl.reshape(inside + _before(total, 0)[:, None, :], [64, C]))
        _store(query, unit_q * factor * scale, place, 64, K, c, C)
        _store(key, unit_k * factor, place, 64, K, c, C)
        factor = tl.exp2(tl.reshape(total[:, None, :] - inside + _after(total)[:, None, :], [64, C]))
        _store(tail, unit_k * factor, place, 64, K, c, C)
        tl.store(decay_end + place.to(tl.int64) * K + c + tl.arange(0, C), tl.exp2(tl.sum(total, 0)))
        for J in range(4):
            up = _row_factor(inside, total, J, C, ANCHOR)
            norm = _norms(k, start, J * 16, count, h, H, K, 16, C)
            unit, down = _column_factor(k, g, norm, start, J * 16, count, h, H, A_log, dt_bias, decay, K, c, C, ANCHOR)
            column = tl.trans(unit * down)
            aqk = _insert_columns(aqk, _mm(unit_q * up, column, DOT, PRECISION), J)
            akk = _insert_columns(akk, _mm(unit_k * up, column, KEYDOT, PRECISION), J)
    row = tl.arange(0, 64)
    strength = tl.sigmoid(tl.load(beta + (start + row) * H + h, mask=row < count, other=0.0).to(tl.float32))
    strength = tl.where(row < count, strength, 0.0)
    _store(scores, tl.where(row[:, None] >= row[None, :], aqk * scale, 0.0), place, 64, 64, 0, 64)
    akk = tl.where(row[:, None] > row[None, :], akk * strength[:, None], 0.0)
    _store(inverse, _inverse(akk, 64, INVERSE), place, 64, 64, 0, 64)


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
def _gradient_block(
    J, dq, dkr, dkc, inside, total, unit_q, unit_k, k, g, dscores_q, dscores_k, start, count, h, H, A_log, dt_bias, decay, place,
    K: tl.constexpr, C0: tl.constexpr, C: tl.constexpr, ANCHOR: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what column block J of the scores gives to queries, keys as rows and keys as columns."""
    up = _row_factor(inside, total, J, C, ANCHOR)
    norm = _norms(k, start, J * 16, count, h, H, K, 16, C)
    unit, down = _column_factor(k, g, norm, start, J * 16, count, h, H, A_log, dt_bias, decay, K, C0, C, ANCHOR)
    column = unit * down
    dq += _mm(_load(dscores_q, place, 0, 64, 64, 64, J * 16, 16), column, DOT, PRECISION) * up
    dkr += _mm(_load(dscores_k, place, 0, 64, 64, 64, J * 16, 16), column, DOT, PRECISION) * up
    dcolumn = _mm(_load_transposed(dscores_q, place, J * 16), unit_q * up, DOT, PRECISION)
    dcolumn = _mma(_load_transposed(dscores_k, place, J * 16), unit_k * up, dcolumn, DOT, PRECISION)
    return dq, dkr, _insert_rows(dkc, dcolumn * down, J, C)


@triton.jit
def _gradient_channels(
    q, k, g, beta, A_log, dt_bias, entering, leaving, updates, do, dv, dscores_q, dscores_k, dg_out, dbias, drate, norm_q, norm_k, start, count, h, H, scale, lower_bound, place,
    K: tl.constexpr, C0: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, ANCHOR: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Channels C0 … C0+C-1: stores dg and the shares of dt_bias and A_log, returns the gradients of unit queries and keys [64, C]."""
    row = tl.arange(0, 64)
    decay = lower_bound * _LOG2E
    dq = tl.zeros([64, C], tl.float32)
    dkr = tl.zeros([64, C], tl.float32)
    dkc = tl.zeros([64, C], tl.float32)
    last = tl.zeros([C], tl.float32)
    for b in range(0, V, BV):
        dout = _rows(do, start, 0, count, h, H, V, 64, b, BV)
        dvalue = _rows(dv, start, 0, count, h, H, V, 64, b, BV)
        state = _load(entering, place, C0, K, V, C, b, BV)
        dstate = _load(leaving, place, C0, K, V, C, b, BV)
        dq = _mma(dout, tl.trans(state), dq, DOT, PRECISION)
        dkr = _mma(-dvalue, tl.trans(state), dkr, DOT, PRECISION)
        dkc = _mma(_load(updates, place, 0, 64, V, 64, b, BV), tl.trans(dstate), dkc, DOT, PRECISION)
        last += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    raw_g = _rows(g, start, 0, count, h, H, K, 64, C0, C)
    gate = _gate(raw_g, 0, count, h, A_log, dt_bias, K, 64, C0, C)
    tiles = tl.reshape(gate * decay, [4, 16, C])
    inside = tl.cumsum(tiles, 1)
    total = tl.sum(tiles, 1)
    unit_q = _rows(q, start, 0, count, h, H, K, 64, C0, C).to(tl.float32) * norm_q
    unit_k = _rows(k, start, 0, count, h, H, K, 64, C0, C).to(tl.float32) * norm_k
    factor = tl.exp2(tl.reshape(inside + _before(total, 0)[:, None, :], [64, C]))
    dq = dq * factor * scale
    dkr = dkr * factor
    dkc = dkc * tl.exp2(tl.reshape(total[:, None, :] - inside + _after(total)[:, None, :], [64, C]))
    last = last * tl.exp2(tl.sum(total, 0)) + tl.sum(unit_k * dkc, 0)
    for J in range(4):
        dq, dkr, dkc = _gradient_block(
            J,
            dq,
            dkr,
            dkc,
            inside,
            total,
            unit_q,
            unit_k,
            k,
            g,
            dscores_q,
            dscores_k,
            start,
            count,
            h,
            H,
            A_log,
            dt_bias,
            decay,
            place,
            K,
            C0,
            C,
            ANCHOR,
            DOT,
            PRECISION,
        )
    dlog = unit_q * dq + unit_k * (dkr - dkc) + tl.where((row == 63)[:, None], last[None, :], 0.0)
    dlog = tl.cumsum(dlog, 0, reverse=True)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    draw = dlog * gate * (1 - gate) * (lower_bound * rate)
    channel = C0 + tl.arange(0, C)
    bias = tl.load(dt_bias + h * K + channel).to(tl.float32)
    tl.store(dbias + place.to(tl.int64) * K + channel, tl.sum(draw, 0))
    tl.store(drate + place.to(tl.int64) * K + channel, tl.sum(draw * (raw_g.to(tl.float32) + bias[None, :]), 0))
    at = (start + row)[:, None] * (H * K) + h * K + channel[None, :]
    tl.store(dg_out + at, draw.to(dg_out.dtype.element_ty), mask=(row < count)[:, None])
    return dq, dkr + dkc, tl.sum(unit_q * dq, 1)[:, None], tl.sum(unit_k * (dkr + dkc), 1)[:, None]


@triton.jit
def _score_gradients(
    do,
    dv,
    updates,
    dscores_q,
    dscores_k,
    start,
    count,
    h,
    H,
    scale,
    place,
    V: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of Aqk and A, masked, written out so that their blocks can be read back in either orientation.

    Reading back a block transposed avoids a transposed accumulator as an operand, which some Triton versions miscompile on Hopper.
    """
    dscore_q = tl.zeros([64, 64], tl.float32)
    dscore_k = tl.zeros([64, 64], tl.float32)
    for b in range(0, V, BV):
        x = tl.trans(_load(updates, place, 0, 64, V, 64, b, BV))
        dscore_q = _mma(_rows(do, start, 0, count, h, H, V, 64, b, BV), x, dscore_q, DOT, PRECISION)
        dscore_k = _mma(_rows(dv, start, 0, count, h, H, V, 64, b, BV), x, dscore_k, DOT, PRECISION)
    row = tl.arange(0, 64)
    _store(dscores_q, tl.where(row[:, None] >= row[None, :], dscore_q * scale, 0.0), place, 64, 64, 0, 64)
    _store(dscores_k, tl.where(row[:, None] > row[None, :], -dscore_k, 0.0), place, 64, 64, 0, 64)
    tl.debug_barrier()


@triton.jit
def _store_unit_gradient(out, x, d, norm, along, start, count, h, H, K: tl.constexpr, C0: tl.constexpr, C: tl.constexpr):
    """Gradient of raw vectors x from that of unit vectors, along = <unit, d>."""
    row = tl.arange(0, 64)
    unit = _rows(x, start, 0, count, h, H, K, 64, C0, C).to(tl.float32) * norm
    at = (start + row)[:, None] * (H * K) + h * K + C0 + tl.arange(0, C)[None, :]
    tl.store(out + at, (norm * (d - unit * along)).to(out.dtype.element_ty), mask=(row < count)[:, None])


@triton.jit
def gradient_kernel(
    q, k, g, beta, A_log, dt_bias, starts, counts, entering, leaving, updates, do, dv, dscores_q, dscores_k, dq_out, dk_out, dg_out, dbias, drate, scale, lower_bound, H,
    K: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, ANCHOR: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (chunk, head): gradients of q, k, g, and this chunk's share of those of dt_bias and A_log. C = K, or half of it."""
    place = tl.program_id(0)
    chunk, h = place // H, place % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    _score_gradients(do, dv, updates, dscores_q, dscores_k, start, count, h, H, scale, place, V, BV, DOT, PRECISION)
    norm_q = _norms(q, start, 0, count, h, H, K, 64, C)
    norm_k = _norms(k, start, 0, count, h, H, K, 64, C)
    dq, dk, along_q, along_k = _gradient_channels(
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        entering,
        leaving,
        updates,
        do,
        dv,
        dscores_q,
        dscores_k,
        dg_out,
        dbias,
        drate,
        norm_q,
        norm_k,
        start,
        count,
        h,
        H,
        scale,
        lower_bound,
        place,
        K,
        0,
        C,
        V,
        BV,
        ANCHOR,
        DOT,
        PRECISION,
    )
    if C < K:
        dq1, dk1, more_q, more_k = _gradient_channels(
            q,
            k,
            g,
            beta,
            A_log,
            dt_bias,
            entering,
            leaving,
            updates,
            do,
            dv,
            dscores_q,
            dscores_k,
            dg_out,
            dbias,
            drate,
            norm_q,
            norm_k,
            start,
            count,
            h,
            H,
            scale,
            lower_bound,
            place,
            K,
            C,
            C,
            V,
            BV,
            ANCHOR,
            DOT,
            PRECISION,
        )
        along_q += more_q
        along_k += more_k
        _store_unit_gradient(dq_out, q, dq1, norm_q, along_q, start, count, h, H, K, C, C)
        _store_unit_gradient(dk_out, k, dk1, norm_k, along_k, start, count, h, H, K, C, C)
    _store_unit_gradient(dq_out, q, dq, norm_q, along_q, start, count, h, H, K, 0, C)
    _store_unit_gradient(dk_out, k, dk, norm_k, along_k, start, count, h, H, K, 0, C)
