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
def _decay(g, A_log, dt_bias, offsets, place, start, count, h, H, lower_bound, K: tl.constexpr, c, C: tl.constexpr):
    """Raw logits, gate, and in powers of two: the decay from the start of each row's tile, the tile's offset in the chunk, the chunk's total."""
    raw = _rows(g, start, 0, count, h, H, K, 64, c, C)
    gate = _gate(raw, 0, count, h, A_log, dt_bias, K, 64, c, C)
    inside = tl.reshape(tl.cumsum(tl.reshape(gate * (lower_bound * _LOG2E), [4, 16, C]), 1), [64, C])
    at = offsets + place.to(tl.int64) * (5 * K) + c + tl.arange(0, C)[None, :]
    return raw, gate, inside, tl.load(at + (tl.arange(0, 64) // 16)[:, None] * K), tl.load(at + 4 * K)


@triton.jit
def _from_tile(offsets, offset, place, J, K: tl.constexpr, c, C: tl.constexpr):
    """exp of the decay from tile J's start to each row's tile; one for rows before J, whose entries are masked later."""
    start = tl.load(offsets + place.to(tl.int64) * (5 * K) + J * K + c + tl.arange(0, C)[None, :])
    return tl.exp2(tl.minimum(offset - start, 0.0))


@triton.jit
def gate_kernel(g, A_log, dt_bias, starts, counts, offsets, decay_end, lower_bound, H, K: tl.constexpr, C: tl.constexpr):
    """One (chunk, head): the cumulative log-decay at the start of each tile and at the end, [5, K], and the chunk's decay.

    Apart from `prepare_kernel`, because sums over a tile inside it would each cost a barrier.
    """
    place = tl.program_id(0)
    chunk, h = place // H, place % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    for c in range(0, K, C):
        total = tl.zeros([C], tl.float32)
        channel = c + tl.arange(0, C)
        at = offsets + place.to(tl.int64) * (5 * K) + channel
        for tile in range(4):
            tl.store(at + tile * K, total)
            gate = _gate(_rows(g, start, tile * 16, count, h, H, K, 16, c, C), tile * 16, count, h, A_log, dt_bias, K, 16, c, C)
            total += tl.sum(gate, 0) * (lower_bound * _LOG2E)
        tl.store(at + 4 * K, total)
        tl.store(decay_end + place.to(tl.int64) * K + channel, tl.exp2(total))


@triton.jit
def _tile_only(x, J, C: tl.constexpr):
    """x [64, C] with every tile but J zeroed."""
    return tl.where((tl.arange(0, 64) // 16 == J)[:, None], x, 0.0)


@triton.jit
def _inverse(A, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower A: exactly on 4 x 4 blocks, then by doubling."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    eye = tl.where(i == j, 1.0, 0.0)
    block = tl.where(i // 4 == j // 4, A, 0.0)
    inverse = tl.dot(eye - block, tl.dot(block, block, eye, input_precision=PRECISION), input_precision=PRECISION)
    for level in tl.static_range(2, 6):  # pyright: ignore[reportGeneralTypeIssues]
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
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, starts, counts, offsets, query, key, tail, inner, scores, scale, lower_bound, H,
    K: tl.constexpr, C: tl.constexpr, ANCHOR: tl.constexpr, DOT: tl.constexpr, KEYDOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (chunk, head): decayed queries, keys and tails, A and Aqk; C channels at once. Heads fastest, so neighbours share lines."""
    place = tl.program_id(0)
    chunk, h = place // H, place % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    norm_q = _norms(q, start, 0, count, h, H, K, 64, C)
    norm_k = _norms(k, start, 0, count, h, H, K, 64, C)
    aqk = tl.zeros([64, 64], tl.float32)
    akk = tl.zeros([64, 64], tl.float32)
    for c in range(0, K, C):
        _, _, inside, offset, total = _decay(g, A_log, dt_bias, offsets, place, start, count, h, H, lower_bound, K, c, C)
        up = tl.exp2(inside)
        unit_q = _rows(q, start, 0, count, h, H, K, 64, c, C).to(tl.float32) * norm_q * up
        unit_k = _rows(k, start, 0, count, h, H, K, 64, c, C).to(tl.float32) * norm_k
        _store(tail, unit_k * tl.exp2(total - offset - inside), place, 64, K, c, C)
        column = unit_k / up * (1.0 / ANCHOR)
        unit_k = unit_k * up
        factor = tl.exp2(offset)
        _store(query, unit_q * factor * scale, place, 64, K, c, C)
        _store(key, unit_k * factor, place, 64, K, c, C)
        for J in range(4):
            factor = _from_tile(offsets, offset, place, J, K, c, C) * ANCHOR
            one = tl.trans(_tile_only(column, J, C))
            aqk = _mma(unit_q * factor, one, aqk, DOT, PRECISION)
            akk = _mma(unit_k * factor, one, akk, KEYDOT, PRECISION)
    row = tl.arange(0, 64)
    strength = tl.sigmoid(tl.load(beta + (start + row) * H + h, mask=row < count, other=0.0).to(tl.float32))
    strength = tl.where(row < count, strength, 0.0)
    _store(scores, tl.where(row[:, None] >= row[None, :], aqk * scale, 0.0), place, 64, 64, 0, 64)
    _store(inner, tl.where(row[:, None] > row[None, :], akk * strength[:, None], 0.0), place, 64, 64, 0, 64)


@triton.jit
def inverse_kernel(inner, inverse, PRECISION: tl.constexpr):
    """(I + A)^-1 of one (chunk, head)."""
    place = tl.program_id(0)
    _store(inverse, _inverse(_load(inner, place, 0, 64, 64, 64, 0, 64), 64, PRECISION), place, 64, 64, 0, 64)


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
    query, key, tail, decay_end, inverse, scores, beta, starts, counts, first_chunk, updates, v, o, do, dfinal, dinitial, dv, leaving, dlogit, along_q, along_k, H, BLOCKS,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    HAS_DFINAL: tl.constexpr, STORE_DINITIAL: tl.constexpr,
):  # fmt: skip
    """The reverse scan of one (document, head, BV columns): dv, gradients of the leaving states, and this block's share of three sums a
    token: the gradient of beta's logit, <q, dq> and <k, dk> of the unit vectors."""
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
        both = tl.sum(delta * x, 1)
        dvalue = delta * strength[:, None]
        value = tl.load(v + at_v, mask=here, other=0.0).to(tl.float32)
        out = tl.load(o + at_v, mask=here, other=0.0).to(tl.float32)
        at_share = ((start + row) * H + h) * BLOCKS + block
        tl.store(dlogit + at_share, both * (1 - strength), mask=row < count)
        # <q, dq> = <o, do>, since o is linear in q; <k, dk> = <k, dk as row> + <k, dk as column> = (<D, X> - <dv, v>) + <D, X>
        tl.store(along_q + at_share, tl.sum(out * up.to(tl.float32), 1), mask=row < count)
        tl.store(along_k + at_share, 2 * both - tl.sum(dvalue * value, 1), mask=row < count)
        tl.store(dv + at_v, dvalue.to(dv.dtype.element_ty), mask=here)
        fade = tl.load(decay_end + place * K + channel)[:, None]
        dstate = _mma(tl.trans(_load(query, place, 0, 64, K, 64, 0, K)), up, dstate * fade, DOT, PRECISION)
        dstate = _mma(tl.trans(_load(key, place, 0, 64, K, 64, 0, K)), -dvalue, dstate, DOT, PRECISION)
    if STORE_DINITIAL:
        tl.store(dinitial + at_state, dstate)


@triton.jit
def _unit_gradient(out, x, d, norm, along, start, count, h, H, K: tl.constexpr, c, C: tl.constexpr):
    """Stores the gradient of raw vectors from that of unit vectors: norm * (d - unit <unit, d>)."""
    row = tl.arange(0, 64)
    unit = _rows(x, start, 0, count, h, H, K, 64, c, C).to(tl.float32) * norm
    at = (start + row)[:, None] * (H * K) + h * K + c + tl.arange(0, C)[None, :]
    tl.store(out + at, (norm * (d - unit * along)).to(out.dtype.element_ty), mask=(row < count)[:, None])


@triton.jit
def gradient_kernel(
    q, k, g, A_log, dt_bias, starts, counts, offsets, entering, leaving, updates, do, dv, along_q, along_k, dq_out, dk_out, dg_out, dbias, drate,
    scale, lower_bound, H, K: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, ANCHOR: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One (chunk, head, C channels): gradients of q, k, g, and this chunk's share of those of dt_bias and A_log."""
    place = tl.program_id(0) // (K // C)
    c = tl.program_id(0) % (K // C) * C
    chunk, h = place // H, place % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    row = tl.arange(0, 64)
    dq = tl.zeros([64, C], tl.float32)
    dkr = tl.zeros([64, C], tl.float32)
    dkc = tl.zeros([64, C], tl.float32)
    last = tl.zeros([C], tl.float32)
    # gradients of Aqk and A, and both again transposed: a transposed accumulator as an operand is miscompiled by some Tritons on Hopper
    sq = tl.zeros([64, 64], tl.float32)
    sk = tl.zeros([64, 64], tl.float32)
    tq = tl.zeros([64, 64], tl.float32)
    tk = tl.zeros([64, 64], tl.float32)
    for b in range(0, V, BV):
        dout = _rows(do, start, 0, count, h, H, V, 64, b, BV)
        dvalue = -_rows(dv, start, 0, count, h, H, V, 64, b, BV)
        x = _load(updates, place, 0, 64, V, 64, b, BV)
        sq = _mma(dout, tl.trans(x), sq, DOT, PRECISION)
        sk = _mma(dvalue, tl.trans(x), sk, DOT, PRECISION)
        tq = _mma(x, tl.trans(dout), tq, DOT, PRECISION)
        tk = _mma(x, tl.trans(dvalue), tk, DOT, PRECISION)
        state = _load(entering, place, c, K, V, C, b, BV)
        dstate = _load(leaving, place, c, K, V, C, b, BV)
        dq = _mma(dout, tl.trans(state), dq, DOT, PRECISION)
        dkr = _mma(dvalue, tl.trans(state), dkr, DOT, PRECISION)
        dkc = _mma(x, tl.trans(dstate), dkc, DOT, PRECISION)
        last += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    score_q = tl.where(row[:, None] >= row[None, :], sq * scale, 0.0).to(DOT)
    score_k = tl.where(row[:, None] > row[None, :], sk, 0.0).to(DOT)
    turned_q = tl.where(row[:, None] <= row[None, :], tq * scale, 0.0).to(DOT)
    turned_k = tl.where(row[:, None] < row[None, :], tk, 0.0).to(DOT)
    raw_g, gate, inside, offset, total = _decay(g, A_log, dt_bias, offsets, place, start, count, h, H, lower_bound, K, c, C)
    norm_q = _norms(q, start, 0, count, h, H, K, 64, C)
    norm_k = _norms(k, start, 0, count, h, H, K, 64, C)
    up = tl.exp2(inside)
    unit_q = _rows(q, start, 0, count, h, H, K, 64, c, C).to(tl.float32) * norm_q * up
    unit_k = _rows(k, start, 0, count, h, H, K, 64, c, C).to(tl.float32) * norm_k
    dkc = dkc * tl.exp2(total - offset - inside)
    end = tl.load(offsets + place.to(tl.int64) * (5 * K) + 4 * K + c + tl.arange(0, C))
    last = last * tl.exp2(end) + tl.sum(unit_k * dkc, 0)
    column = unit_k / up * (1.0 / ANCHOR)
    unit_k = unit_k * up
    dq = dq * (tl.exp2(offset) * scale)
    dkr = dkr * tl.exp2(offset)
    down = (1.0 / ANCHOR) / up
    # unit_q and unit_k carry `up`, as dq and dkr lack it
    dlog = unit_q * dq + unit_k * dkr - unit_k * (down * ANCHOR) * dkc + tl.where((row == 63)[:, None], last[None, :], 0.0)
    for J in range(4):
        factor = _from_tile(offsets, offset, place, J, K, c, C) * ANCHOR
        one = _tile_only(column, J, C).to(DOT)
        row_q = (unit_q * factor).to(DOT)
        row_k = (unit_k * factor).to(DOT)
        by_row = _mm(score_q, one, DOT, PRECISION)
        dq += by_row * factor
        # a pair of tokens adds to dG at the later one what it takes at the earlier: from the same rounded operands, so that this cancels
        dlog += by_row * row_q.to(tl.float32)
        by_row = _mm(score_k, one, DOT, PRECISION)
        dkr += by_row * factor
        dlog += by_row * row_k.to(tl.float32)
        by_column = _mma(turned_k, row_k, _mm(turned_q, row_q, DOT, PRECISION), DOT, PRECISION)
        dlog -= by_column * one.to(tl.float32)
        dkc += _tile_only(by_column * down, J, C)
    dlog = tl.cumsum(dlog, 0, reverse=True)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    draw = dlog * gate * (1 - gate) * (lower_bound * rate)
    channel = c + tl.arange(0, C)
    bias = tl.load(dt_bias + h * K + channel).to(tl.float32)
    tl.store(dbias + place.to(tl.int64) * K + channel, tl.sum(draw, 0))
    tl.store(drate + place.to(tl.int64) * K + channel, tl.sum(draw * (raw_g.to(tl.float32) + bias[None, :]), 0))
    at = (start + row)[:, None] * (H * K) + h * K + channel[None, :]
    tl.store(dg_out + at, draw.to(dg_out.dtype.element_ty), mask=(row < count)[:, None])
    sum_q = tl.load(along_q + (start + row) * H + h, mask=row < count, other=0.0)[:, None]
    _unit_gradient(dq_out, q, dq * up, norm_q, sum_q, start, count, h, H, K, c, C)
    sum_k = tl.load(along_k + (start + row) * H + h, mask=row < count, other=0.0)[:, None]
    _unit_gradient(dk_out, k, dkr * up + dkc, norm_k, sum_k, start, count, h, H, K, c, C)
