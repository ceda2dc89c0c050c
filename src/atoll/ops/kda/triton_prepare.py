"""What a chunk is, apart from the state that enters it: two kernels, one program a (chunk, head), heads fastest.

With A_kk the strict lower scores of keys against keys, N = (I + beta A_kk)^-1 and S the entering state (Kimi Linear, arXiv
2510.26692, §3):

    query = scale q 2^G        tail = k 2^(G_end - G)        erase W = N beta k 2^G        write U = N beta v
    X = U - W S                o = query S + A_qk X          S' = 2^G_end S + tail^T X
"""

import triton
import triton.language as tl

from atoll.ops.kda.triton_common import EPS, LOG2E, dot_to, exp2, gate, load, put, rows, strength


@triton.jit
def gate_kernel(
    g, A_log, dt_bias, starts, counts, decay, sums, decay_end, lower_bound, H, K: tl.constexpr
):  # fmt: skip
    """G from the start of each row's block [64, K], its sum over each block [2, K], and the decay of the whole chunk [K].

    One warp, all channels: sums over tokens are short inside a thread, where other kernels would need shared memory for them.
    """
    place = tl.program_id(0).to(tl.int64)
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    if count == 0:
        return
    base, step = (start * H + h) * K, H * K
    channel = tl.arange(0, K)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * K + channel).to(tl.float32)[None, :]
    whole = tl.zeros([K], tl.float32)
    for block in tl.static_range(2):
        total = tl.zeros([K], tl.float32)
        for tile in tl.static_range(2):
            first = block * 32 + tile * 16
            opened = gate(rows(g, base, step, first, count, 0, 16, K), first, count, rate, bias, 16) * (lower_bound * LOG2E)
            put(decay, tl.cumsum(opened, 0) + total[None, :], place * (64 * K), first, 0, 16, K, K)
            total += tl.sum(opened, 0)
        tl.store(sums + (place * 2 + block) * K + channel, total)
        whole += total
    tl.store(decay_end + place * K + channel, exp2(whole))


@triton.jit
def _norms(pointer, base, step, first, count, K: tl.constexpr, C: tl.constexpr):
    """Reciprocal L2 norms of 32 rows."""
    total = tl.zeros([32], tl.float32)
    for c in tl.static_range(0, K, C):
        x = rows(pointer, base, step, first, count, c, 32, C)
        total += tl.sum(x * x, 1)
    return tl.rsqrt(total + EPS)


@triton.jit
def _inverse(A, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower A [32, 32]: exactly on 4 x 4 blocks, then by doubling; a longer series would amplify rounding."""
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    eye = tl.where(i == j, 1.0, 0.0)
    block = tl.where(i // 4 == j // 4, A, 0.0)
    inverse = tl.dot(eye - block, tl.dot(block, block, eye, input_precision=PRECISION), input_precision=PRECISION)
    for level in tl.static_range(2, 5):  # pyright: ignore[reportGeneralTypeIssues]
        low = tl.where((i // (2 << level) == j // (2 << level)) & (i // (1 << level) != j // (1 << level)), A, 0.0)
        low = tl.dot(inverse, low, input_precision=PRECISION)
        inverse = inverse - tl.dot(low, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _product(n, x, total, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """total + n x; in bfloat16 with n as the sum of two numbers, so that x alone is rounded."""
    if tl.float32 == DOT:
        return tl.dot(n, x.to(tl.float32), total, input_precision=PRECISION)
    else:
        high = n.to(DOT)
        x = x.to(DOT)
        return tl.dot((n - high.to(tl.float32)).to(DOT), x, tl.dot(high, x, total))


@triton.jit
def _solve(out, n00, n10, n11, x_0, x_1, at, c, C: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Stores N x."""
    zero = tl.zeros([32, C], tl.float32)
    put(out, _product(n00, x_0, zero, DOT, PRECISION), at, 0, c, 32, C, WIDTH)
    put(out, _product(n11, x_1, _product(n10, x_0, zero, DOT, PRECISION), DOT, PRECISION), at, 32, c, 32, C, WIDTH)


@triton.jit
def prepare_kernel(
    q, k, v, beta, starts, counts, decay, sums, query, erase, tail, write, scores, turned_inverse, norms_q, norms_k, scale, H,
    K: tl.constexpr, C: tl.constexpr, V: tl.constexpr, SOLVE: tl.constexpr, SHIFT: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """query, erase, tail, write and A_qk; with `KEEP` also N^T and the reciprocal norms. C channels (in products with N, SOLVE) at once.

    By blocks of 32 rows, 0 and 1, which two warps cover without doing anything twice; score blocks are named by row and column.
    """
    place = tl.program_id(0).to(tl.int64)
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    if count == 0:
        return
    base, step, at = (start * H + h) * K, H * K, place * (64 * K)
    norm_q0 = _norms(q, base, step, 0, count, K, C)
    norm_q1 = _norms(q, base, step, 32, count, K, C)
    norm_k0 = _norms(k, base, step, 0, count, K, C)
    norm_k1 = _norms(k, base, step, 32, count, K, C)
    if KEEP:
        token = tl.arange(0, 32)
        to = start * H + h + token * H
        tl.store(norms_q + to, norm_q0, mask=token < count)
        tl.store(norms_q + to + 32 * H, norm_q1, mask=token + 32 < count)
        tl.store(norms_k + to, norm_k0, mask=token < count)
        tl.store(norms_k + to + 32 * H, norm_k1, mask=token + 32 < count)
    factor_0 = strength(beta, start, h, H, 0, count, 32)
    factor_1 = strength(beta, start, h, H, 32, count, 32)
    back: tl.constexpr = 0.5**SHIFT
    q00 = tl.zeros([32, 32], tl.float32)
    q10 = tl.zeros([32, 32], tl.float32)
    q11 = tl.zeros([32, 32], tl.float32)
    k00 = tl.zeros([32, 32], tl.float32)
    k10 = tl.zeros([32, 32], tl.float32)
    k11 = tl.zeros([32, 32], tl.float32)
    for c in range(0, K, C):
        half = tl.load(sums + place * (2 * K) + c + tl.arange(0, C))[None, :]
        late = tl.load(sums + place * (2 * K) + K + c + tl.arange(0, C))[None, :]
        G = load(decay, at, 0, c, 32, C, K)
        up = exp2(G + SHIFT)
        unit = rows(k, base, step, 0, count, c, 32, C) * norm_k0[:, None]
        own = tl.trans(unit * exp2(-G - SHIFT))
        low = unit * exp2(half - G)
        put(tail, low * exp2(late), at, 0, c, 32, C, K)
        low = tl.trans(low)
        row = unit * up
        k00 = dot_to(row, own, k00, tl.float32, PRECISION)
        put(erase, row * (back * factor_0), at, 0, c, 32, C, K)
        row = rows(q, base, step, 0, count, c, 32, C) * norm_q0[:, None] * up
        q00 = dot_to(row, own, q00, DOT, PRECISION)
        put(query, row * (back * scale), at, 0, c, 32, C, K)
        G = load(decay, at, 32, c, 32, C, K)
        up = exp2(G + SHIFT)
        first = exp2(half)
        unit = rows(k, base, step, 32, count, c, 32, C) * norm_k1[:, None]
        own = tl.trans(unit * exp2(-G - SHIFT))
        put(tail, unit * exp2(late - G), at, 32, c, 32, C, K)
        row = unit * up
        k11 = dot_to(row, own, k11, tl.float32, PRECISION)
        row = row * back
        k10 = dot_to(row, low, k10, tl.float32, PRECISION)
        put(erase, row * first * factor_1, at, 32, c, 32, C, K)
        row = rows(q, base, step, 32, count, c, 32, C) * norm_q1[:, None] * up
        q11 = dot_to(row, own, q11, DOT, PRECISION)
        row = row * back
        q10 = dot_to(row, low, q10, DOT, PRECISION)
        put(query, row * first * scale, at, 32, c, 32, C, K)
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    put(scores, tl.where(i >= j, q00 * scale, 0.0), place * 4096, 0, 0, 32, 32, 64)
    put(scores, tl.zeros([32, 32], tl.float32), place * 4096, 0, 32, 32, 32, 64)
    put(scores, q10 * scale, place * 4096, 32, 0, 32, 32, 64)
    put(scores, tl.where(i >= j, q11 * scale, 0.0), place * 4096, 32, 32, 32, 32, 64)
    n00 = _inverse(tl.where(i > j, k00 * factor_0, 0.0), PRECISION)
    n11 = _inverse(tl.where(i > j, k11 * factor_1, 0.0), PRECISION)
    n10 = -tl.dot(tl.dot(n11, k10 * factor_1, input_precision=PRECISION), n00, input_precision=PRECISION)
    if KEEP:
        put(turned_inverse, tl.trans(n00), place * 4096, 0, 0, 32, 32, 64)
        put(turned_inverse, tl.trans(n10), place * 4096, 0, 32, 32, 32, 64)
        put(turned_inverse, tl.zeros([32, 32], tl.float32), place * 4096, 32, 0, 32, 32, 64)
        put(turned_inverse, tl.trans(n11), place * 4096, 32, 32, 32, 32, 64)
    tl.debug_barrier()  # what this program stored into `erase` is read again
    for c in range(0, K, SOLVE):
        x_0 = load(erase, at, 0, c, 32, SOLVE, K)
        x_1 = load(erase, at, 32, c, 32, SOLVE, K)
        _solve(erase, n00, n10, n11, x_0, x_1, at, c, SOLVE, K, DOT, PRECISION)
    base = (start * H + h) * V
    for c in range(0, V, SOLVE):
        x_0 = rows(v, base, H * V, 0, count, c, 32, SOLVE) * factor_0
        x_1 = rows(v, base, H * V, 32, count, c, 32, SOLVE) * factor_1
        _solve(write, n00, n10, n11, x_0, x_1, place * (64 * V), c, SOLVE, V, DOT, PRECISION)
