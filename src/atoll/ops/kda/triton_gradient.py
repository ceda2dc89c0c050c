"""The end of the backward pass: two kernels, one program a (chunk, head), from the gradients of updates and states to those of the inputs."""

# ruff: noqa: E501  (calls of Triton functions are long lists of the same names)

import triton
import triton.language as tl

from atoll.ops.kda.triton_common import dot, dot_to, exp2, gate, load, put, put_rows, rows, strength


@triton.jit
def pair_gradient_kernel(
    v, beta, o, starts, counts, turned_inverse, updates, dupdates, entering, leaving, do,
    dv_out, dbeta_out, along_q, along_k, dscores, dinner, dquery, drow, dcol, dend, scale, H,
    K: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """All products over value channels. With D = N^T dX: dv = beta D, the gradient of beta's logit (1 - beta) <D, X>, those of both
    scores, do X^T and -dv X^T, and of the decayed queries, keys and tails, do S^T, -dv S^T and X dS'^T; dend = <S, dS'> over values.

    `ALONG`: also <q, dq> and <k, dk> of the unit vectors, for programs that hold a part of the channels. o is linear in q, so
    <q, dq> = <o, do>; <k, dk> = (<D, X> - <dv, v>) as row + <D, X> as column.
    """
    place = tl.program_id(0).to(tl.int64)
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    if count == 0:
        return
    factor = strength(beta, start, h, H, 0, count, 64)
    base, step = (start * H + h) * V, H * V
    inverse = load(turned_inverse, place * 4096, 0, 0, 64, 64, 64)
    by_q = tl.zeros([64, 64], tl.float32)
    by_k = tl.zeros([64, 64], tl.float32)
    both = tl.zeros([64], tl.float32)
    sum_q = tl.zeros([64], tl.float32)
    sum_k = tl.zeros([64], tl.float32)
    for b in tl.static_range(0, V, BV):
        x = load(updates, place * (64 * V), 0, b, 64, BV, V)
        delta = tl.dot(inverse, load(dupdates, place * (64 * V), 0, b, 64, BV, V), input_precision=PRECISION)
        both += tl.sum(delta * x.to(tl.float32), 1)
        delta = delta * factor
        put_rows(dv_out, delta, base, step, 0, count, b, 64, BV)
        up = rows(do, base, step, 0, count, b, 64, BV)
        if ALONG:
            sum_q += tl.sum(up * rows(o, base, step, 0, count, b, 64, BV), 1)
            sum_k -= tl.sum(delta * rows(v, base, step, 0, count, b, 64, BV), 1)
        up = up.to(DOT)
        down = (-delta).to(DOT)
        by_q = dot_to(up, tl.trans(x), by_q, DOT, PRECISION)
        by_k = dot_to(down, tl.trans(x), by_k, DOT, PRECISION)
    row = tl.arange(0, 64)
    at = (start * H + h) + row * H
    tl.store(dbeta_out + at, (both * (1 - tl.sum(factor, 1))).to(dbeta_out.dtype.element_ty), mask=row < count)
    if ALONG:
        tl.store(along_q + at, sum_q, mask=row < count)
        tl.store(along_k + at, sum_k + 2 * both, mask=row < count)
    put(dscores, tl.where(row[:, None] >= row[None, :], by_q * scale, 0.0), place * 4096, 0, 0, 64, 64, 64)
    put(dinner, tl.where(row[:, None] > row[None, :], by_k, 0.0), place * 4096, 0, 0, 64, 64, 64)
    if V != BV:
        tl.debug_barrier()
    for c in range(0, K, C):
        a_q = tl.zeros([64, C], tl.float32)
        a_row = tl.zeros([64, C], tl.float32)
        a_col = tl.zeros([64, C], tl.float32)
        last = tl.zeros([C], tl.float32)
        for b in tl.static_range(0, V, BV):
            if V != BV:
                x = load(updates, place * (64 * V), 0, b, 64, BV, V)
                up = rows(do, base, step, 0, count, b, 64, BV).to(DOT)
                down = (-rows(dv_out, base, step, 0, count, b, 64, BV)).to(DOT)
            state = load(entering, place * (K * V), c, b, C, BV, V)
            dstate = load(leaving, place * (K * V), c, b, C, BV, V)
            last += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
            a_q = dot_to(up, tl.trans(state), a_q, DOT, PRECISION)
            a_row = dot_to(down, tl.trans(state), a_row, DOT, PRECISION)
            a_col = dot_to(x, tl.trans(dstate), a_col, DOT, PRECISION)
        put(dquery, a_q, place * (64 * K), 0, c, 64, C, K)
        put(drow, a_row, place * (64 * K), 0, c, 64, C, K)
        put(dcol, a_col, place * (64 * K), 0, c, 64, C, K)
        tl.store(dend + place * K + c + tl.arange(0, C), last)


@triton.jit
def gradient_kernel(
    q, k, g, A_log, dt_bias, starts, counts, decay, sums, norms_q, norms_k, dscores, dinner, dquery, drow, dcol, dend, along_q, along_k,
    dq_out, dk_out, dg_out, dbias, drate, scale, lower_bound, H,
    K: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C channels: gradients of q, k, g, and this chunk's share of those of dt_bias and A_log.

    A pair of tokens adds to the gradient of G at the later token what it takes at the earlier; both come from the same rounded
    operands, so that this cancels. Anchors as in `prepare_kernel`: `own` are columns of a row's block, `low` of the block before.
    """
    place = (tl.program_id(0) // (K // C)).to(tl.int64)
    c = tl.program_id(0) % (K // C) * C
    chunk, h = place // H, place % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    if count == 0:
        return
    early = (tl.arange(0, 64) < 32)[:, None]
    below = (tl.arange(0, 64) >= 32)[:, None] & (tl.arange(0, 64) < 32)[None, :]
    channel = c + tl.arange(0, C)
    back: tl.constexpr = 0.5**SHIFT
    base, step, at = (start * H + h) * K, H * K, place * (64 * K)
    row = tl.arange(0, 64)
    token = start * H + h + row * H
    half = tl.load(sums + place * (2 * K) + channel)[None, :]
    late = tl.load(sums + place * (2 * K) + K + channel)[None, :]
    norm = tl.load(norms_k + token, mask=row < count, other=0.0)[:, None]
    unit = rows(k, base, step, 0, count, c, 64, C) * norm
    G = load(decay, at, 0, c, 64, C, K)
    own = (unit * exp2(-G - SHIFT)).to(DOT)
    rest = exp2(tl.where(early, half, late) - G)
    low = (unit * rest).to(DOT)
    up = exp2(G + SHIFT)
    # keys as rows
    part = load(dinner, place * 4096, 0, 0, 64, 64, 64)
    edge = unit * up
    row_own = edge.to(DOT)
    edge = edge * back
    row_low = edge.to(DOT)
    by_own = dot(tl.where(below, 0.0, part), own, DOT, PRECISION)
    by_low = dot(tl.where(below, part, 0.0), low, DOT, PRECISION)
    turn_own = dot(tl.trans(tl.where(below, 0.0, part).to(DOT)), row_own, DOT, PRECISION)
    turn_low = dot(tl.trans(tl.where(below, part, 0.0).to(DOT)), row_low, DOT, PRECISION)
    d = load(drow, at, 0, c, 64, C, K).to(tl.float32) * tl.where(early, 1.0, exp2(half))
    dlog = edge * d + by_own * row_own.to(tl.float32) + by_low * row_low.to(tl.float32)
    dk = by_own * up + (d + by_low) * (up * back)
    d = load(dcol, at, 0, c, 64, C, K).to(tl.float32) * (tl.where(early, exp2(late), 1.0) * rest)
    dk += d
    d = unit * d
    dlog -= d
    last = tl.load(dend + place * K + channel) * tl.sum(exp2(half + late), 0) + tl.sum(d, 0)
    # queries
    norm_q = tl.load(norms_q + token, mask=row < count, other=0.0)[:, None]
    unit = rows(q, base, step, 0, count, c, 64, C) * norm_q
    part = load(dscores, place * 4096, 0, 0, 64, 64, 64)
    edge = unit * up
    row_own = edge.to(DOT)
    edge = edge * back
    row_low = edge.to(DOT)
    by_own = dot(tl.where(below, 0.0, part), own, DOT, PRECISION)
    by_low = dot(tl.where(below, part, 0.0), low, DOT, PRECISION)
    turn_own = dot_to(tl.trans(tl.where(below, 0.0, part).to(DOT)), row_own, turn_own, DOT, PRECISION)
    turn_low = dot_to(tl.trans(tl.where(below, part, 0.0).to(DOT)), row_low, turn_low, DOT, PRECISION)
    d = load(dquery, at, 0, c, 64, C, K).to(tl.float32) * (tl.where(early, scale, exp2(half) * scale))
    dlog += edge * d + by_own * row_own.to(tl.float32) + by_low * row_low.to(tl.float32)
    d = by_own * up + (d + by_low) * (up * back)
    if K == C:
        along = tl.sum(unit * d, 1)[:, None]
    else:
        along = tl.load(along_q + token, mask=row < count, other=0.0)[:, None]
    put_rows(dq_out, norm_q * (d - unit * along), base, step, 0, count, c, 64, C)
    # keys as columns
    dlog -= turn_own * own.to(tl.float32) + turn_low * low.to(tl.float32)
    G = load(decay, at, 0, c, 64, C, K)
    rest = exp2(tl.where(early, half, 0.0) - G)
    dk += turn_own * exp2(-G - SHIFT) + tl.where(early, turn_low * rest, 0.0)
    unit = rows(k, base, step, 0, count, c, 64, C) * norm
    if K == C:
        along = tl.sum(unit * dk, 1)[:, None]
    else:
        along = tl.load(along_k + token, mask=row < count, other=0.0)[:, None]
    put_rows(dk_out, norm * (dk - unit * along), base, step, 0, count, c, 64, C)
    # gates
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + channel).to(tl.float32)[None, :]
    raw = rows(g, base, step, 0, count, c, 64, C)
    opened = gate(raw, 0, count, rate, bias, 64)
    draw = (tl.cumsum(dlog, 0, reverse=True) + last[None, :]) * (opened * (1 - opened) * (lower_bound * rate))
    put_rows(dg_out, draw, base, step, 0, count, c, 64, C)
    tl.store(dbias + place * K + channel, tl.sum(draw, 0))
    tl.store(drate + place * K + channel, tl.sum(draw * (raw + bias), 0))
