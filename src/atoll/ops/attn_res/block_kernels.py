"""Triton kernels of phase one: all queries of a block on its finished sources, and the gradients of both, a block at a time.

Imported only where Triton is; launched by `block_launch.py`. Phase two, one query with the running sum, is `mix_kernels.mix_kernel`.
Scores are products of [tokens, D] by [D, queries]. float32 accuracy from bfloat16 products: a key, query * norm, is the sum of PARTS
bfloat16 numbers (two hold the product of two bfloat16 numbers exactly, three any float32); a source is one already.
"""

# What Triton compiles is not quite Python: to pyright static_range is no iterator, a constexpr no string.
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: RUF005  (Triton joins tuples by +, and has no unpacking)

import triton
import triton.language as tl

from atoll.ops.attn_res.mix_kernels import pick


@triton.jit
def _pick_each(pointers, which, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """A vector of pointers; the first where `which` is COUNT or more."""
    zero = tl.zeros([SIZE], tl.int64)
    found = pointers[0] + zero
    for i in tl.static_range(1, COUNT):
        found = tl.where(which == i, pointers[i] + zero, found)
    return found


@triton.jit
def keys_kernel(queries, norms, keys, Q: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """query * norm of one query as the sum of PARTS numbers of the keys' dtype, [PARTS, Q, D], the largest first."""
    q = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    query = tl.load(pick(queries, q, Q) + column, mask=mask, other=0.0).to(tl.float32)
    rest = query * tl.load(pick(norms, q, Q) + column, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(PARTS):
        part = rest.to(keys.dtype.element_ty)
        tl.store(keys + (i * Q + q) * D + column, part, mask=mask)
        rest -= part.to(tl.float32)


@triton.jit
def scores_kernel(
    sources, keys, scores, scales, N, eps, R: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, QP: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BM tokens of one source: score [R, N, Q] of every query, and 1 / sqrt(mean x² + eps) [R, N]. keys [PARTS, Q, D]."""
    r = tl.program_id(1)
    source = pick(sources, r, R)
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    q = tl.arange(0, QP)
    column = tl.arange(0, BK)
    total = tl.zeros([BM, QP], tl.float32)
    squares = tl.zeros([BM, BK], tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        inside = (k + column) < D
        x = tl.load(source + row[:, None] * D + k + column[None, :], mask=(row < N)[:, None] & inside[None, :], other=0.0)
        squares += x.to(tl.float32) * x.to(tl.float32)
        for i in tl.static_range(PARTS):
            at = (i * Q + q)[None, :] * D + k + column[:, None]
            key = tl.load(keys + at, mask=(q < Q)[None, :] & inside[:, None], other=0.0)
            total = tl.dot(x, key, total, input_precision=PRECISION)
    scale = tl.rsqrt(tl.sum(squares, 1) / D + eps)
    tl.store(scales + r.to(tl.int64) * N + row, scale, mask=row < N)
    at = (r.to(tl.int64) * N + row)[:, None] * Q + q[None, :]
    tl.store(scores + at, total * scale[:, None], mask=(row < N)[:, None] & (q < Q)[None, :])


@triton.jit
def weights_kernel(scores, weights, lse, N, Q, R: tl.constexpr, BLOCK: tl.constexpr):
    """Softmax over sources of scores [R, N, Q], and the log of its denominator, as [Q, N]."""
    start = tl.program_id(0).to(tl.int64)
    at = start * BLOCK + tl.arange(0, BLOCK)
    count = (start * 0 + N) * Q  # N of one token is a constant and has no dtype to change
    mask = at < count
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    for r in tl.static_range(R):
        peak = tl.maximum(peak, tl.load(scores + r * count + at, mask=mask, other=0.0))
    total = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(R):
        total += tl.exp(tl.load(scores + r * count + at, mask=mask, other=0.0) - peak)
    for r in tl.static_range(R):
        p = tl.exp(tl.load(scores + r * count + at, mask=mask, other=0.0) - peak) / total
        tl.store(weights + r * count + at, p, mask=mask)
    tl.store(lse + (at % Q) * N + at // Q, peak + tl.log(total), mask=mask)


@triton.jit
def values_kernel(sources, weights, mean, N, Q, R: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of ROWS tokens by BLOCK columns of every source, read once, into the same tile of each query's mean [Q, N, D]."""
    across: tl.constexpr = (D + BLOCK - 1) // BLOCK  # a grid's second axis ends at 65,535: the tokens need the first
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    wide = first * 0 + N
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = row[:, None] * D + column[None, :]
    mask = (row < N)[:, None] & (column < D)[None, :]
    tiles = ()
    for r in tl.static_range(R):
        tiles = tiles + (tl.load(sources[r] + here, mask=mask, other=0.0).to(tl.float32),)
    for q in range(Q):
        out = tl.zeros([ROWS, BLOCK], tl.float32)
        for r in tl.static_range(R):
            p = tl.load(weights + (r * wide + row) * Q + q, mask=row < N, other=0.0)
            out += tiles[r] * p[:, None]
        tl.store(mean + q * wide * D + here, out.to(mean.dtype.element_ty), mask=mask)


@triton.jit
def scores_back_kernel(
    d_mean, d_lse, sources, scores, weights, scales, along, own, N, R: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, QP: tl.constexpr,
    RP: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One token: <d mean_q, x_r> of all queries and sources, and from it the two factors of d x_r that the score brings.

    d score_qr = p_qr (<d mean_q, x_r> - sum over r of p_qr <d mean_q, x_r> + d lse_q); s_r is the source's scale.
    along [R, N, Q] = s d score, times the key; own [R, N] = -sum over q of s² score (d score) / D, times the source.
    """
    n = tl.program_id(0).to(tl.int64)
    q = tl.arange(0, QP)
    r = tl.arange(0, RP)
    column = tl.arange(0, BK)
    source = _pick_each(sources, r, R, RP) + n * D
    line = (q.to(tl.int64) * N + n) * D
    dot = tl.zeros([QP, RP], tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        inside = (k + column) < D
        up = tl.load(d_mean + line[:, None] + k + column[None, :], mask=(q < Q)[:, None] & inside[None, :], other=0.0)
        x = tl.load(source[None, :] + k + column[:, None], mask=(r < R)[None, :] & inside[:, None], other=0.0)
        dot = tl.dot(up, x.to(up.dtype), dot, input_precision=PRECISION)
    each = (r.to(tl.int64) * N + n)[None, :] * Q + q[:, None]
    mask = (q < Q)[:, None] & (r < R)[None, :]
    p = tl.load(weights + each, mask=mask, other=0.0)
    score = tl.load(scores + each, mask=mask, other=0.0)
    scale = tl.load(scales + r.to(tl.int64) * N + n, mask=r < R, other=0.0)[None, :]
    reach = tl.load(d_lse + q.to(tl.int64) * N + n, mask=q < Q, other=0.0) - tl.sum(p * dot, 1)
    a = p * (dot + reach[:, None]) * scale
    tl.store(along + each, a, mask=mask)
    tl.store(own + r.to(tl.int64) * N + n, tl.sum(a * scale * score, 0) / -D, mask=r < R)


@triton.jit
def sources_back_kernel(
    d_mean, sources, keys, weights, along, own, d_sources, N, TOKENS, R: tl.constexpr, Q: tl.constexpr, D: tl.constexpr,
    QP: tl.constexpr, RP: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BK columns of TOKENS tokens: d x_r = sum over queries of p_qr d mean_q + along_qr key_q, plus own_r x_r; [R, N, D].

    The keys stay while tokens pass: fetched for each token anew they would be as many bytes as everything else together.
    """
    q = tl.arange(0, QP)
    r = tl.arange(0, RP)
    across: tl.constexpr = (D + BK - 1) // BK
    column = tl.program_id(0) % across * BK + tl.arange(0, BK)
    kind = d_sources.dtype.element_ty
    source = _pick_each(sources, r, R, RP)
    held = (q < Q)[:, None] & (column < D)[None, :]
    some = (r < R)[:, None] & (column < D)[None, :]
    pairs = (r < R)[:, None] & (q < Q)[None, :]
    key = tl.load(keys + q[:, None] * D + column[None, :], mask=held, other=0.0)
    first = tl.program_id(0) // across * TOKENS
    zero = first.to(tl.int64) * 0
    for start in tl.range(first, min(first + TOKENS, N), num_stages=STAGES):
        n = zero + start
        up = tl.load(d_mean + ((q.to(tl.int64) * N + n) * D)[:, None] + column[None, :], mask=held, other=0.0)
        x = tl.load(source[:, None] + n * D + column[None, :], mask=some, other=0.0)
        at = r.to(tl.int64) * N + n
        p = tl.load(weights + at[:, None] * Q + q[None, :], mask=pairs, other=0.0)
        a = tl.load(along + at[:, None] * Q + q[None, :], mask=pairs, other=0.0)
        b = tl.load(own + at, mask=r < R, other=0.0)
        total = tl.dot(p.to(kind), up.to(kind), input_precision=PRECISION)
        total = tl.dot(a.to(kind), key, total, input_precision=PRECISION)
        total += b[:, None] * x.to(tl.float32)
        tl.store(d_sources + at[:, None] * D + column[None, :], total.to(kind), mask=some)


@triton.jit
def keys_back_kernel(
    sources, along, partial, N, TOKENS, R: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, QP: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BK columns, TOKENS tokens, all sources: a share of d key_q = sum of along_qr x_r, [., Q, D] float32."""
    q = tl.arange(0, QP)
    line = tl.arange(0, BM)
    column = tl.program_id(0) * BK + tl.arange(0, BK)
    first = tl.program_id(1) * TOKENS
    last = min(first + TOKENS, N)
    wide = first.to(tl.int64) * 0 + N
    total = tl.zeros([QP, BK], tl.float32)
    for r in range(R):
        source = pick(sources, r, R)
        for start in tl.range(first, last, BM, num_stages=STAGES):
            n = start + line
            row = n.to(tl.int64)
            x = tl.load(source + row[:, None] * D + column[None, :], mask=(n < last)[:, None] & (column < D)[None, :], other=0.0)
            each = (r * wide + row)[None, :] * Q + q[:, None]
            rest = tl.load(along + each, mask=(q < Q)[:, None] & (n < last)[None, :], other=0.0)
            for _ in tl.static_range(PARTS):
                part = rest.to(x.dtype)
                total = tl.dot(part, x, total, input_precision=PRECISION)
                rest -= part.to(tl.float32)
    at = (tl.program_id(1).to(tl.int64) * Q + q)[:, None] * D + column[None, :]
    tl.store(partial + at, total, mask=(q < Q)[:, None] & (column < D)[None, :])
