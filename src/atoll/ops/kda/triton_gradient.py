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
    operands, so that this cancels. `own` are the columns of a row's own block; here, where sums run over tokens, the columns of the
    block before differ from them by a factor a channel, 2^half, applied to the product in two halves: either alone fits float32.
    """
    place = (tl.program_id(0) // (K // C)).to(tl.int64)
    c = tl.program_id(0) % (K // C) * C
    chunk, h = place // H, place % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    row = tl.arange(0, 64)
    early = (row < 32)[:, None]
    below = (row >= 32)[:, None] & (row < 32)[None, :]
    channel = c + tl.arange(0, C)
    back: tl.constexpr = 0.5**SHIFT
    base, step, at = (start * H + h) * K, H * K, place * (64 * K)
    token = start * H + h + row * H
    half = tl.load(sums + place * (2 * K) + channel)[None, :]
    late = tl.load(sums + place * (2 * K) + K + channel)[None, :]
    root = exp2(half * 0.5)
    G = load(decay, at, 0, c, 64, C, K)
    norm = tl.load(norms_k + token, mask=row < count, other=0.0)[:, None]
    unit = rows(k, base, step, 0, count, c, 64, C) * norm
    up = exp2(G + SHIFT)
    fall = exp2(-G - SHIFT)
    own = (unit * fall).to(DOT)
    # keys as rows
    part = load(dinner, place * 4096, 0, 0, 64, 64, 64)
    part_own = tl.where(below, 0.0, part).to(DOT)
    part_low = tl.where(below, part, 0.0).to(DOT)
    edge = (unit * up).to(DOT)
    by = dot(part_own, own, DOT, PRECISION) + dot(part_low, own, DOT, PRECISION) * root * root
    turn_own = dot(tl.trans(part_own), edge, DOT, PRECISION)
    turn_low = dot(tl.trans(part_low), edge, DOT, PRECISION)
    from_start = tl.where(early, back, root * back * root)
    by += load(drow, at, 0, c, 64, C, K).to(tl.float32) * from_start
    dlog = by * edge.to(tl.float32)
    dk = by * up
    # queries
    norm = tl.load(norms_q + token, mask=row < count, other=0.0)[:, None]
    unit = rows(q, base, step, 0, count, c, 64, C) * norm
    part = load(dscores, place * 4096, 0, 0, 64, 64, 64)
    part_own = tl.where(below, 0.0, part).to(DOT)
    part_low = tl.where(below, part, 0.0).to(DOT)
    edge = (unit * up).to(DOT)
    by = dot(part_own, own, DOT, PRECISION) + dot(part_low, own, DOT, PRECISION) * root * root
    turn_own = dot_to(tl.trans(part_own), edge, turn_own, DOT, PRECISION)
    turn_low = dot_to(tl.trans(part_low), edge, turn_low, DOT, PRECISION)
    by += load(dquery, at, 0, c, 64, C, K).to(tl.float32) * (from_start * scale)
    dlog += by * edge.to(tl.float32)
    by = by * up
    if K == C:
        along = tl.sum(unit * by, 1)[:, None]
    else:
        along = tl.load(along_q + token, mask=row < count, other=0.0)[:, None]
    put_rows(dq_out, norm * (by - unit * along), base, step, 0, count, c, 64, C)
    # keys as columns
    turn_own += tl.where(early, turn_low * root * root, 0.0)
    dlog -= turn_own * own.to(tl.float32)
    dk += turn_own * fall
    norm = tl.load(norms_k + token, mask=row < count, other=0.0)[:, None]
    unit = rows(k, base, step, 0, count, c, 64, C) * norm
    G = load(decay, at, 0, c, 64, C, K)
    to_end = load(dcol, at, 0, c, 64, C, K).to(tl.float32) * exp2(tl.where(early, half + late, late) - G)
    dk += to_end
    to_end = unit * to_end
    dlog -= to_end
    last = tl.load(dend + place * K + channel) * tl.sum(exp2(half + late), 0) + tl.sum(to_end, 0)
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
