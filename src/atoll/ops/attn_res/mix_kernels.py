"""Triton kernels of the mix over depth. Imported only where Triton is; launched by `mix_launch.py`.

A program holds ROWS tokens, each row whole in registers as PIECES tiles of BLOCK columns (7168 is 7 x 1024), and walks over exactly
R sources, R a constant of the kernel. Phase two of the block schedule is the same kernel: with CARRY, the finished sources come in
as one more row, `mean`, whose score is `lse`. No key, no score and no weight is kept for the backward pass, which makes them again.
"""

# What Triton compiles is not quite Python: to pyright static_range is no iterator, a constexpr no string.
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: RUF005  (Triton joins tuples by +, and has no unpacking)

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(a, b):
    """Both sums over columns, in one walk through shared memory."""
    if INTERPRETED:  # where a reduction of one's own is a loop in Python
        return tl.sum(a, 1), tl.sum(b, 1)
    else:
        return tl.reduce((a, b), 1, _add)


@triton.jit
def _at(row, N, i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets and mask of piece i of the rows."""
    column = i * BLOCK + tl.arange(0, BLOCK)
    return row[:, None] * D + column[None, :], (row < N)[:, None] & (column < D)[None, :]


@triton.jit
def _row(x, row, N, D: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Rows of x [N, D] as they are, a tuple of [ROWS, BLOCK]; zero outside."""
    tiles = ()
    for i in tl.static_range(PIECES):
        at, mask = _at(row, N, i, D, BLOCK)
        tiles = tiles + (tl.load(x + at, mask=mask, other=0.0),)
    return tiles


@triton.jit
def _put(y, tile, row, N, i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    at, mask = _at(row, N, i, D, BLOCK)
    tl.store(y + at, tile.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _vector(x, i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    column = i * BLOCK + tl.arange(0, BLOCK)
    return tl.load(x + column, mask=column < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _keys(query, norm, i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    return _vector(query, i, D, BLOCK) * _vector(norm, i, D, BLOCK)


@triton.jit
def _zeros(ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(PIECES):
        tiles = tiles + (tl.zeros([ROWS, BLOCK], tl.float32),)
    return tiles


@triton.jit
def _start(mean, lse, row, N, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, CARRY: tl.constexpr):
    """Running value, peak and total of an online softmax, before the first source or after the carried ones."""
    if CARRY:
        value = ()
        for x in _row(mean, row, N, D, BLOCK, PIECES):
            value = value + (x.to(tl.float32),)
        peak = tl.load(lse + row, mask=row < N, other=0.0)
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        value = _zeros(ROWS, BLOCK, PIECES)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    return value, peak, total


@triton.jit
def _join(value, peak, total, x, score, PIECES: tl.constexpr):
    """One more source in the online softmax."""
    top = tl.maximum(peak, score)
    old = tl.exp(peak - top)
    new = tl.exp(score - top)
    fresh = ()
    for i in tl.static_range(PIECES):
        fresh = fresh + (value[i] * old[:, None] + x[i].to(tl.float32) * new[:, None],)
    return fresh, top, total * old + new


@triton.jit
def mix_kernel(
    sources, delta, last, mean, lse, query, norm, out_norm, out, out_lse, N, eps, out_eps, R: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, AHEAD: tl.constexpr, HAS_DELTA: tl.constexpr, CARRY: tl.constexpr,
    OUT_NORM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """ROWS tokens: add delta to the last source (written to `last`), mix, norm. AHEAD rows are asked for before they are needed."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    rows = ()
    for r in tl.static_range(AHEAD):
        if r < R:
            rows = rows + _row(sources[r], row, N, D, BLOCK, PIECES)
    value, peak, total = _start(mean, lse, row, N, D, ROWS, BLOCK, PIECES, CARRY)
    for r in tl.static_range(R):
        if r + AHEAD < R:
            rows = rows + _row(sources[r + AHEAD], row, N, D, BLOCK, PIECES)
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        along = tl.zeros([ROWS, BLOCK], tl.float32)
        x = ()
        for i in tl.static_range(PIECES):
            tile = rows[r * PIECES + i]
            if HAS_DELTA and r == R - 1:
                at, mask = _at(row, N, i, D, BLOCK)
                step = tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)
                tile = (tile.to(tl.float32) + step).to(last.dtype.element_ty)
                tl.store(last + at, tile, mask=mask)
            x = x + (tile,)
            squares += tile.to(tl.float32) * tile.to(tl.float32)
            along += tile.to(tl.float32) * _keys(query, norm, i, D, BLOCK)
        square, dot = _sums(squares, along)
        value, peak, total = _join(value, peak, total, x, dot * tl.rsqrt(square / D + eps), PIECES)
    scale = 1.0 / total
    if KEEP:
        tl.store(out_lse + row, peak + tl.log(total), mask=row < N)
    if OUT_NORM:
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(PIECES):
            squares += value[i] * value[i]
        scale = scale * tl.rsqrt(tl.sum(squares, 1) * scale * scale / D + out_eps)
    for i in tl.static_range(PIECES):
        y = value[i] * scale[:, None]
        if OUT_NORM:  # the release rounds before it multiplies by the weight
            y = y.to(out.dtype.element_ty).to(tl.float32) * _vector(out_norm, i, D, BLOCK)
        _put(out, y, row, N, i, D, BLOCK)


@triton.jit
def mix_back_kernel(
    sources, mean, lse, query, norm, out_norm, d_out, d_last, d_out_lse, d_sources, d_mean, d_lse, partial, N, GROUPS, PROGRAMS,
    eps, out_eps, R: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, RETAIN: tl.constexpr,
    HAS_LAST: tl.constexpr, HAS_LSE: tl.constexpr, CARRY: tl.constexpr, OUT_NORM: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th group of ROWS tokens: gradients of all rows, and this program's share of those of the keys and of out_norm.

    With score = s <x, v>, s = (mean x² + eps)^-1/2, v = query * norm, p the softmax, d the gradient of the mix h:

        d score = p (<d, x> - <d, h>),     d x = p d + s (d score) v - s² score (d score) x / D,     d v = sum of s (d score) x

    The sources are read twice, the second time in reverse: the rows of one token are then in the caches, or, with RETAIN, still
    in registers. `partial` is [PROGRAMS, D] of v, then, with OUT_NORM, as many of out_norm.
    """
    shares = _zeros(ROWS, BLOCK, PIECES)
    outs = _zeros(ROWS, BLOCK, PIECES)
    for group in range(tl.program_id(0), GROUPS, PROGRAMS):
        row = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        down = _row(d_out, row, N, D, BLOCK, PIECES)
        value, peak, total = _start(mean, lse, row, N, D, ROWS, BLOCK, PIECES, CARRY)
        if CARRY and not OUT_NORM:
            across = tl.zeros([ROWS, BLOCK], tl.float32)
            for i in tl.static_range(PIECES):
                across += down[i].to(tl.float32) * value[i]
            reach = tl.sum(across, 1)  # <d, mean>
        else:
            reach = tl.zeros([ROWS], tl.float32)
        kept = ()
        scales = ()
        scores = ()
        reaches = ()
        inner = reach  # sum of exp(score - peak) <d, x>
        for r in tl.static_range(R):
            x = _row(sources[r], row, N, D, BLOCK, PIECES)
            squares = tl.zeros([ROWS, BLOCK], tl.float32)
            along = tl.zeros([ROWS, BLOCK], tl.float32)
            across = tl.zeros([ROWS, BLOCK], tl.float32)
            for i in tl.static_range(PIECES):
                tile = x[i].to(tl.float32)
                squares += tile * tile
                along += tile * _keys(query, norm, i, D, BLOCK)
                if not OUT_NORM:
                    across += tile * down[i].to(tl.float32)
            square, dot = _sums(squares, along)
            scale = tl.rsqrt(square / D + eps)
            scales = scales + (scale,)
            scores = scores + (dot * scale,)
            if OUT_NORM:
                value, peak, total = _join(value, peak, total, x, dot * scale, PIECES)
            else:
                far = tl.sum(across, 1)
                reaches = reaches + (far,)
                top = tl.maximum(peak, dot * scale)
                inner = inner * tl.exp(peak - top) + far * tl.exp(dot * scale - top)
                total = total * tl.exp(peak - top) + tl.exp(dot * scale - top)
                peak = top
            if RETAIN:
                kept = kept + x
        if OUT_NORM:
            shrink = 1.0 / total
            squares = tl.zeros([ROWS, BLOCK], tl.float32)
            across = tl.zeros([ROWS, BLOCK], tl.float32)
            for i in tl.static_range(PIECES):
                squares += value[i] * value[i]
                across += value[i] * down[i].to(tl.float32) * _vector(out_norm, i, D, BLOCK)
            square, cross = _sums(squares, across)
            size = square * shrink * shrink / D  # mean h²
            rstd = tl.rsqrt(size + out_eps)
            back = cross * shrink * rstd * rstd * rstd / D
            inner = cross * shrink * rstd * rstd * rstd * out_eps  # <d, h>, what is left of it after the norm
            fresh = ()
            ups = ()
            for i in tl.static_range(PIECES):
                h = value[i] * shrink[:, None]
                up = down[i].to(tl.float32)
                fresh = fresh + (outs[i] + up * h * rstd[:, None],)
                ups = ups + (up * _vector(out_norm, i, D, BLOCK) * rstd[:, None] - h * back[:, None],)
            outs = fresh
        else:
            inner = inner / total
            ups = down
        norm_of = peak + tl.log(total)
        if HAS_LSE:  # its gradient joins that of every score alike
            inner = inner - tl.load(d_out_lse + row, mask=row < N, other=0.0)
        for reverse in tl.static_range(R):
            r: tl.constexpr = R - 1 - reverse
            x = ()
            if RETAIN:
                for i in tl.static_range(PIECES):
                    x = x + (kept[r * PIECES + i],)
            else:
                x = _row(sources[r], row, N, D, BLOCK, PIECES)
            if OUT_NORM:
                across = tl.zeros([ROWS, BLOCK], tl.float32)
                for i in tl.static_range(PIECES):
                    across += x[i].to(tl.float32) * ups[i].to(tl.float32)
                far = tl.sum(across, 1)
            else:
                far = reaches[r]
            p = tl.exp(scores[r] - norm_of)
            d_score = p * (far - inner)
            a = d_score * scales[r]
            b = -a * scales[r] * scores[r] / D
            fresh = ()
            for i in tl.static_range(PIECES):
                tile = x[i].to(tl.float32)
                fresh = fresh + (shares[i] + tile * a[:, None],)
                d_x = ups[i].to(tl.float32) * p[:, None] + _keys(query, norm, i, D, BLOCK) * a[:, None] + tile * b[:, None]
                if HAS_LAST and r == R - 1:
                    at, mask = _at(row, N, i, D, BLOCK)
                    d_x += tl.load(d_last + at, mask=mask, other=0.0).to(tl.float32)
                _put(d_sources[r], d_x, row, N, i, D, BLOCK)
            shares = fresh
        if CARRY:
            p = tl.exp(tl.load(lse + row, mask=row < N, other=0.0) - norm_of)
            if OUT_NORM:
                across = tl.zeros([ROWS, BLOCK], tl.float32)
                m = _row(mean, row, N, D, BLOCK, PIECES)
                for i in tl.static_range(PIECES):
                    across += m[i].to(tl.float32) * ups[i]
                reach = tl.sum(across, 1)
            tl.store(d_lse + row, p * (reach - inner), mask=row < N)
            for i in tl.static_range(PIECES):
                _put(d_mean, ups[i].to(tl.float32) * p[:, None], row, N, i, D, BLOCK)
    for i in tl.static_range(PIECES):
        column = i * BLOCK + tl.arange(0, BLOCK)
        here = partial + tl.program_id(0).to(tl.int64) * D + column
        tl.store(here, tl.sum(shares[i], 0), mask=column < D)
        if OUT_NORM:
            tl.store(here + PROGRAMS * D, tl.sum(outs[i], 0), mask=column < D)


@triton.jit
def vectors_back_kernel(
    partial, query, norm, d_query, d_norm, d_out_norm, PROGRAMS, D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    OUT_NORM: tl.constexpr,
):  # fmt: skip
    """Sum the programs' shares in their order: d query = d v norm, d norm = d v query, and d out_norm."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    line = tl.arange(0, STEP)
    total = tl.zeros([STEP, BLOCK], tl.float32)
    other = tl.zeros([STEP, BLOCK], tl.float32)
    for first in range(0, PROGRAMS, STEP):
        at = (first + line)[:, None] * D + column[None, :]
        held = ((first + line) < PROGRAMS)[:, None] & mask[None, :]
        total += tl.load(partial + at, mask=held, other=0.0)
        if OUT_NORM:
            other += tl.load(partial + PROGRAMS * D + at, mask=held, other=0.0)
    d_v = tl.sum(total, 0)
    q = tl.load(query + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(norm + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(d_query + column, (d_v * w).to(d_query.dtype.element_ty), mask=mask)
    tl.store(d_norm + column, (d_v * q).to(d_norm.dtype.element_ty), mask=mask)
    if OUT_NORM:
        tl.store(d_out_norm + column, tl.sum(other, 0).to(d_out_norm.dtype.element_ty), mask=mask)
