"""The end of the backward pass: two kernels, one program a (chunk, head), from the gradients of updates and states to those of the inputs."""

# ruff: noqa: E501  (calls of Triton functions are long lists of the same names)

import triton
import triton.language as tl

from atoll.ops.kda.triton_common import LOG2E, dot, dot_to, exp2, gate, load, put, put_rows, rows, strength
from atoll.ops.kda.triton_prepare import log_decay, norms, product


@triton.jit
def score_gradient_kernel(
    v, beta, o, starts, counts, turned_inverse, updates, dupdates, do, dv_out, dbeta_out, along_q, along_k, dscores, dinner, scale, H,
    V: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """With D = N^T dX: dv = beta D, the gradient of beta's logit (1 - beta) <D, X>, and those of both scores, do X^T and -dv X^T.

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
    for b in range(0, V, BV):
        x = load(updates, place * (64 * V), 0, b, 64, BV, V)
        delta = product(inverse, load(dupdates, place * (64 * V), 0, b, 64, BV, V), tl.zeros([64, BV], tl.float32), DOT, PRECISION)
        both += tl.sum(delta * x.to(tl.float32), 1)
        dv = delta * factor
        put_rows(dv_out, dv, base, step, 0, count, b, 64, BV)
        up = rows(do, base, step, 0, count, b, 64, BV)
        if ALONG:
            sum_q += tl.sum(up * rows(o, base, step, 0, count, b, 64, BV), 1)
            sum_k -= tl.sum(dv * rows(v, base, step, 0, count, b, 64, BV), 1)
        by_q = dot_to(up, tl.trans(x), by_q, DOT, PRECISION)
        by_k = dot_to(-dv, tl.trans(x), by_k, DOT, PRECISION)
    row = tl.arange(0, 64)
    at = (start * H + h) + row * H
    tl.store(dbeta_out + at, (both * (1 - tl.sum(factor, 1))).to(dbeta_out.dtype.element_ty), mask=row < count)
    if ALONG:
        tl.store(along_q + at, sum_q, mask=row < count)
        tl.store(along_k + at, sum_k + 2 * both, mask=row < count)
    put(dscores, tl.where(row[:, None] >= row[None, :], by_q * scale, 0.0), place * 4096, 0, 0, 64, 64, 64)
    put(dinner, tl.where(row[:, None] > row[None, :], by_k, 0.0), place * 4096, 0, 0, 64, 64, 64)


@triton.jit
def gradient_kernel(
    q, k, g, A_log, dt_bias, starts, counts, entering, leaving, updates, do, dv, dscores, dinner, along_q, along_k,
    dq_out, dk_out, dg_out, dbias, drate, scale, lower_bound, H,
    K: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SHIFT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C channels: gradients of q, k, g, and this chunk's share of those of dt_bias and A_log.

    A pair of tokens adds to the gradient of G at the later token what it takes at the earlier; both come from the same rounded
    operands, so that this cancels. Rows count from the start of either block of columns in turn, as in `score_kernel`.
    """
    place = (tl.program_id(0) // (K // C)).to(tl.int64)
    c = tl.program_id(0) % (K // C) * C
    chunk, h = place // H, place % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    row = tl.arange(0, 64)[:, None]
    channel = c + tl.arange(0, C)
    back: tl.constexpr = 0.5**SHIFT
    dq = tl.zeros([64, C], tl.float32)
    drow = tl.zeros([64, C], tl.float32)
    dcol = tl.zeros([64, C], tl.float32)
    last = tl.zeros([C], tl.float32)
    for b in range(0, V, BV):
        up = rows(do, (start * H + h) * V, H * V, 0, count, b, 64, BV)
        down = -rows(dv, (start * H + h) * V, H * V, 0, count, b, 64, BV)
        state = load(entering, place * (K * V), c, b, C, BV, V)
        dstate = load(leaving, place * (K * V), c, b, C, BV, V)
        last += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        dq = dot_to(up, tl.trans(state), dq, DOT, PRECISION)
        drow = dot_to(down, tl.trans(state), drow, DOT, PRECISION)
        dcol = dot_to(load(updates, place * (64 * V), 0, b, 64, BV, V), tl.trans(dstate), dcol, DOT, PRECISION)
    base, step = (start * H + h) * K, H * K
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + channel).to(tl.float32)[None, :]
    opened = gate(rows(g, base, step, 0, count, c, 64, C), 0, count, rate, bias, 64)
    inside, half, end = log_decay(opened, lower_bound * LOG2E, C)
    whole = inside + tl.where(row < 32, 0.0, half)
    norm_q = norms(q, base, step, count, K, C)
    norm_k = norms(k, base, step, count, K, C)
    unit_q = rows(q, base, step, 0, count, c, 64, C) * norm_q
    unit_k = rows(k, base, step, 0, count, c, 64, C) * norm_k
    up = exp2(whole + SHIFT)
    dq = dq * (up * (scale * back))
    drow = drow * (up * back)
    dcol = dcol * exp2(end - whole)
    taken = unit_k * dcol
    last = last * tl.sum(exp2(end), 0) + tl.sum(taken, 0)
    dlog = unit_q * dq + unit_k * drow - taken
    pairs_q = load(dscores, place * 4096, 0, 0, 64, 64, 64)
    pairs_k = load(dinner, place * 4096, 0, 0, 64, 64, 64)
    fall = exp2(-inside - SHIFT)
    column = (unit_k * fall).to(DOT)
    for block in tl.static_range(2):
        mine = (row < 32) == (block == 0)
        if block == 1:
            up = exp2(inside + SHIFT)
        part = tl.where(mine, column, 0.0).to(DOT)
        row_q = (unit_q * up).to(DOT)
        row_k = (unit_k * up).to(DOT)
        by = dot(pairs_q, part, DOT, PRECISION)
        dq += by * up
        dlog += by * row_q.to(tl.float32)
        by = dot(pairs_k, part, DOT, PRECISION)
        drow += by * up
        dlog += by * row_k.to(tl.float32)
        by = dot_to(tl.trans(pairs_k), row_k, dot(tl.trans(pairs_q), row_q, DOT, PRECISION), DOT, PRECISION)
        by = tl.where(mine, by, 0.0)
        dlog -= by * column.to(tl.float32)
        dcol += by * fall
    if K == C:
        sum_q = tl.sum(unit_q * dq, 1)[:, None]
        sum_k = tl.sum(unit_k * (drow + dcol), 1)[:, None]
    else:
        at = (start * H + h) + row * H
        sum_q = tl.load(along_q + at, mask=row < count, other=0.0)
        sum_k = tl.load(along_k + at, mask=row < count, other=0.0)
    put_rows(dq_out, norm_q * (dq - unit_q * sum_q), base, step, 0, count, c, 64, C)
    put_rows(dk_out, norm_k * (drow + dcol - unit_k * sum_k), base, step, 0, count, c, 64, C)
    draw = (tl.cumsum(dlog, 0, reverse=True) + last[None, :]) * (opened * (1 - opened)) * (lower_bound * rate)
    put_rows(dg_out, draw, base, step, 0, count, c, 64, C)
    tl.store(dbias + place * K + channel, tl.sum(draw, 0))
    tl.store(drate + place * K + channel, tl.sum(draw * (rows(g, base, step, 0, count, c, 64, C) + bias), 0))
