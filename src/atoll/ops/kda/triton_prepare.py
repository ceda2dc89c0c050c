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
def norms(pointer, base, step, count, K: tl.constexpr, C: tl.constexpr):
    """Reciprocal L2 norms of 64 rows, as a column."""
    total = tl.zeros([64], tl.float32)
    for c in range(0, K, C):
        x = rows(pointer, base, step, 0, count, c, 64, C)
        total += tl.sum(x * x, 1)
    return tl.rsqrt(total + EPS)[:, None]


@triton.jit
def log_decay(opened, slope, C: tl.constexpr):
    """From the gate [64, C]: G from the start of each row's block, and each block's sum; in powers of two."""
    step = opened * slope
    early = (tl.arange(0, 64) < 32)[:, None]
    inside = tl.reshape(tl.cumsum(tl.reshape(step, [2, 32, C]), 1), [64, C])
    return inside, tl.sum(tl.where(early, step, 0.0), 0)[None, :], tl.sum(tl.where(early, 0.0, step), 0)[None, :]


@triton.jit
def score_kernel(
    q, k, g, beta, A_log, dt_bias, starts, counts, query, erase, tail, scores, inner, decay_end, scale, lower_bound, H,
    K: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """query, tail, A_qk, beta A_kk, decay_end = 2^G_end, and into `erase` k 2^G; C channels at once.

    One product serves both diagonal blocks of scores, another the block below them.
    """
    place = tl.program_id(0).to(tl.int64)
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    base = (start * H + h) * K
    step = H * K
    early = (tl.arange(0, 64) < 32)[:, None]
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    norm_q = norms(q, base, step, count, K, C)
    norm_k = norms(k, base, step, count, K, C)
    back: tl.constexpr = 0.5**SHIFT
    own_q = tl.zeros([64, 64], tl.float32)
    own_k = tl.zeros([64, 64], tl.float32)
    low_q = tl.zeros([64, 64], tl.float32)
    low_k = tl.zeros([64, 64], tl.float32)
    for c in range(0, K, C):
        bias = tl.load(dt_bias + h * K + c + tl.arange(0, C)).to(tl.float32)[None, :]
        opened = gate(rows(g, base, step, 0, count, c, 64, C), 0, count, rate, bias, 64)
        inside, half, late = log_decay(opened, lower_bound * LOG2E, C)
        tl.store(decay_end + place * K + c + tl.arange(0, C)[None, :], exp2(half + late))
        up = exp2(inside + SHIFT)
        rest = exp2(tl.where(early, half, late) - inside)  # to the end of the row's own block
        unit = rows(k, base, step, 0, count, c, 64, C) * norm_k
        own = tl.trans(unit * exp2(-inside - SHIFT))
        low = unit * rest
        put(tail, low * tl.where(early, exp2(late), 1.0), place * (64 * K), 0, c, 64, C, K)
        low = tl.trans(low)
        from_start = tl.where(early, back, exp2(half) * back)
        row = unit * up
        put(erase, row * from_start, place * (64 * K), 0, c, 64, C, K)
        own_k = dot_to(row, own, own_k, tl.float32, PRECISION)
        low_k = dot_to(row * back, low, low_k, tl.float32, PRECISION)
        row = rows(q, base, step, 0, count, c, 64, C) * norm_q * up
        put(query, row * (from_start * scale), place * (64 * K), 0, c, 64, C, K)
        own_q = dot_to(row, own, own_q, DOT, PRECISION)
        low_q = dot_to(row * back, low, low_q, DOT, PRECISION)
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    below = (i >= 32) & (j < 32)
    put(scores, tl.where(below, low_q, tl.where(i >= j, own_q, 0.0)) * scale, place * 4096, 0, 0, 64, 64, 64)
    factor = strength(beta, start, h, H, 0, count, 64)
    put(inner, tl.where(below, low_k, tl.where(i > j, own_k, 0.0)) * factor, place * 4096, 0, 0, 64, 64, 64)


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
def product(n, x, total, DOT: tl.constexpr, PRECISION: tl.constexpr):
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
    put(out, product(n00, x_0, zero, DOT, PRECISION), at, 0, c, 32, C, WIDTH)
    put(out, product(n11, x_1, product(n10, x_0, zero, DOT, PRECISION), DOT, PRECISION), at, 32, c, 32, C, WIDTH)


@triton.jit
def solve_kernel(
    v, beta, starts, counts, inner, erase, write, turned_inverse, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STORE_INVERSE: tl.constexpr,
):  # fmt: skip
    """N by blocks of 32 rows, W in place of k 2^G, and U; C columns at once. Two warps cover 32 rows without doing anything twice."""
    place = tl.program_id(0).to(tl.int64)
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(counts + chunk)
    at = place * 4096
    n00 = _inverse(load(inner, at, 0, 0, 32, 32, 64), PRECISION)
    n11 = _inverse(load(inner, at, 32, 32, 32, 32, 64), PRECISION)
    low = tl.dot(n11, load(inner, at, 32, 0, 32, 32, 64), input_precision=PRECISION)
    n10 = -tl.dot(low, n00, input_precision=PRECISION)
    if STORE_INVERSE:
        put(turned_inverse, tl.trans(n00), at, 0, 0, 32, 32, 64)
        put(turned_inverse, tl.trans(n10), at, 0, 32, 32, 32, 64)
        put(turned_inverse, tl.zeros([32, 32], tl.float32), at, 32, 0, 32, 32, 64)
        put(turned_inverse, tl.trans(n11), at, 32, 32, 32, 32, 64)
    factor_0 = strength(beta, start, h, H, 0, count, 32)
    factor_1 = strength(beta, start, h, H, 32, count, 32)
    for c in range(0, K, C):
        x_0 = load(erase, place * (64 * K), 0, c, 32, C, K).to(tl.float32) * factor_0
        x_1 = load(erase, place * (64 * K), 32, c, 32, C, K).to(tl.float32) * factor_1
        _solve(erase, n00, n10, n11, x_0, x_1, place * (64 * K), c, C, K, DOT, PRECISION)
    base = (start * H + h) * V
    for c in range(0, V, C):
        x_0 = rows(v, base, H * V, 0, count, c, 32, C) * factor_0
        x_1 = rows(v, base, H * V, 32, count, c, 32, C) * factor_1
        _solve(write, n00, n10, n11, x_0, x_1, place * (64 * V), c, C, V, DOT, PRECISION)
