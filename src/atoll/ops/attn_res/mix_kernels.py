"""Triton kernels of the mix over depth. Imported only where Triton is; launched by `mix_launch.py`.

A program holds ROWS tokens, each row whole in registers as PIECES tiles of BLOCK columns (7168 is 7 x 1024), and walks over exactly
R sources. Their pointers are a tuple, of which the loop picks one by R - 1 selects: nothing beside a row, and a loop keeps the code
short, where R copies of its body took 9 seconds to compile and every register. With STAGES the next rows are copied to shared memory
meanwhile. Phase two of the block schedule is the same kernel: with CARRY, the finished sources come in as one more row, `mean`, whose
score is `lse`. No key, no score and no weight is kept for the backward pass, which makes them again.
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
def pick(pointers, which, COUNT: tl.constexpr):
    """pointers[which], `which` known at run time only."""
    found = pointers[0]
    for i in tl.static_range(1, COUNT):
        found = tl.where(which == i, pointers[i], found)
    return found


@triton.jit
def _start(mean, lse, row, N, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, CARRY: tl.constexpr):
    """Running value, peak and total of an online softmax, before the first source or after the carried ones."""
    if CARRY:
        carried = _row(mean, row, N, D, BLOCK, PIECES)
        value = ()
        for i in tl.static_range(PIECES):
            value = value + (carried[i].to(tl.float32),)
        peak = tl.load(lse + row, mask=row < N, other=0.0)
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        value = _zeros(ROWS, BLOCK, PIECES)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    return value, peak, total


@triton.jit
def _measure(x, keys, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """1 / rms of a source's rows, and their score."""
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        tile = x[i].to(tl.float32)
        squares += tile * tile
        along += tile * keys[i]
    square, dot = _sums(squares, along)
    scale = tl.rsqrt(square / D + eps)
    return scale, dot * scale


@triton.jit
def _inner(a, b, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    across = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        across += a[i].to(tl.float32) * b[i].to(tl.float32)
    return tl.sum(across, 1)


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
def _all_keys(query, norm, D: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    keys = ()
    for i in tl.static_range(PIECES):
        keys = keys + (_keys(query, norm, i, D, BLOCK),)
    return keys


@triton.jit
def mix_kernel(
    sources, delta, last, mean, lse, query, norm, out_norm, out, out_lse, N, eps, out_eps, R: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr, HAS_DELTA: tl.constexpr, CARRY: tl.constexpr,
    OUT_NORM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """ROWS tokens: add delta to the last source (written to `last`), mix, norm."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    keys = _all_keys(query, norm, D, BLOCK, PIECES)
    value, peak, total = _start(mean, lse, row, N, D, ROWS, BLOCK, PIECES, CARRY)
    if HAS_DELTA:
        summed = ()
        for i in tl.static_range(PIECES):
            at, mask = _at(row, N, i, D, BLOCK)
            tile = tl.load(sources[R - 1] + at, mask=mask, other=0.0).to(tl.float32)
            tile = (tile + tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)).to(last.dtype.element_ty)
            tl.store(last + at, tile, mask=mask)
            summed = summed + (tile,)
        _, score = _measure(summed, keys, eps, D, ROWS, BLOCK, PIECES)
        value, peak, total = _join(value, peak, total, summed, score, PIECES)
    for r in tl.range(0, R - 1 if HAS_DELTA else R, num_stages=STAGES):
        x = _row(pick(sources, r, R), row, N, D, BLOCK, PIECES)
        _, score = _measure(x, keys, eps, D, ROWS, BLOCK, PIECES)
        value, peak, total = _join(value, peak, total, x, score, PIECES)
    scale = 1.0 / total
    if KEEP:
        tl.store(out_lse + row, peak + tl.log(total), mask=row < N)
    if OUT_NORM:
        scale = scale * tl.rsqrt(_inner(value, value, ROWS, BLOCK, PIECES) * scale * scale / D + out_eps)
    for i in tl.static_range(PIECES):
        y = value[i] * scale[:, None]
        if OUT_NORM:  # the release rounds before it multiplies by the weight
            y = y.to(out.dtype.element_ty).to(tl.float32) * _vector(out_norm, i, D, BLOCK)
        _put(out, y, row, N, i, D, BLOCK)


@triton.jit
def _set(held, index, r, x):
    """held [ROWS, RP] with column r set to x [ROWS]."""
    return tl.where(index[None, :] == r, x[:, None], held)


@triton.jit
def _get(held, index, r):
    """Column r of held [ROWS, RP]."""
    return tl.sum(tl.where(index[None, :] == r, held, 0.0), 1)


@triton.jit
def mix_back_kernel(
    sources, mean, lse, query, norm, out_norm, d_out, d_last, d_out_lse, d_sources, d_mean, d_lse, partial, N, GROUPS, PROGRAMS,
    eps, out_eps, R: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    STAGES: tl.constexpr, HAS_LAST: tl.constexpr, HAS_LSE: tl.constexpr, CARRY: tl.constexpr, OUT_NORM: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th group of ROWS tokens: gradients of all rows, and this program's share of those of the keys and of out_norm.

    With score = s <x, v>, s = (mean x² + eps)^-1/2, v = query * norm, p the softmax, d the gradient of the mix h:

        d score = p (<d, x> - <d, h>),     d x = p d + s (d score) v - s² score (d score) x / D,     d v = sum of s (d score) x

    The sources are walked over twice, the second time in reverse, when the rows of the program's tokens are still in the caches.
    `partial` is [PROGRAMS, D] of v, then, with OUT_NORM, as many of out_norm.
    """
    index = tl.arange(0, RP)
    shares = _zeros(ROWS, BLOCK, PIECES)
    outs = _zeros(ROWS, BLOCK, PIECES)
    for group in range(tl.program_id(0), GROUPS, PROGRAMS):
        row = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        down = _row(d_out, row, N, D, BLOCK, PIECES)
        keys = _all_keys(query, norm, D, BLOCK, PIECES)
        scales = tl.zeros([ROWS, RP], tl.float32)
        scores = tl.full([ROWS, RP], float("-inf"), tl.float32)
        reaches = tl.zeros([ROWS, RP], tl.float32)  # <d, x>
        if OUT_NORM:
            value, peak, total = _start(mean, lse, row, N, D, ROWS, BLOCK, PIECES, CARRY)
            for r in tl.range(0, R, num_stages=STAGES):
                x = _row(pick(sources, r, R), row, N, D, BLOCK, PIECES)
                scale, score = _measure(x, keys, eps, D, ROWS, BLOCK, PIECES)
                value, peak, total = _join(value, peak, total, x, score, PIECES)
                scales = _set(scales, index, r, scale)
                scores = _set(scores, index, r, score)
            shrink = 1.0 / total
            norm_of = peak + tl.log(total)
            ups = ()
            for i in tl.static_range(PIECES):
                ups = ups + (down[i].to(tl.float32) * _vector(out_norm, i, D, BLOCK),)
            square = _inner(value, value, ROWS, BLOCK, PIECES) * shrink * shrink / D
            cross = _inner(value, ups, ROWS, BLOCK, PIECES) * shrink
            rstd = tl.rsqrt(square + out_eps)
            back = cross * rstd * rstd * rstd / D * shrink
            inner = cross * rstd * rstd * rstd * out_eps  # <d, h>, what is left of it after the norm
            fresh = ()
            turned = ()
            for i in tl.static_range(PIECES):
                fresh = fresh + (outs[i] + down[i].to(tl.float32) * value[i] * (rstd * shrink)[:, None],)
                turn = ups[i] * rstd[:, None] - value[i] * back[:, None]
                turned = turned + (turn.to(d_out.dtype.element_ty),)  # as a norm of its own would hand it on
            outs = fresh
            ups = turned
        else:
            ups = down
            for r in tl.range(0, R, num_stages=STAGES):
                x = _row(pick(sources, r, R), row, N, D, BLOCK, PIECES)
                scale, score = _measure(x, keys, eps, D, ROWS, BLOCK, PIECES)
                scales = _set(scales, index, r, scale)
                scores = _set(scores, index, r, score)
                reaches = _set(reaches, index, r, _inner(x, down, ROWS, BLOCK, PIECES))
            peak = tl.max(scores, 1)
            if CARRY:
                before = tl.load(lse + row, mask=row < N, other=0.0)
                reach = _inner(_row(mean, row, N, D, BLOCK, PIECES), down, ROWS, BLOCK, PIECES)
                peak = tl.maximum(peak, before)
            e = tl.exp(scores - peak[:, None])
            total = tl.sum(e, 1)
            inner = tl.sum(e * reaches, 1)
            if CARRY:
                total += tl.exp(before - peak)
                inner += tl.exp(before - peak) * reach
            inner = inner / total
            norm_of = peak + tl.log(total)
        if HAS_LSE:  # its gradient joins that of every score alike
            inner = inner - tl.load(d_out_lse + row, mask=row < N, other=0.0)
        for back_from in tl.range(0, R, num_stages=STAGES):
            r = R - 1 - back_from
            x = _row(pick(sources, r, R), row, N, D, BLOCK, PIECES)
            if OUT_NORM:
                far = _inner(x, ups, ROWS, BLOCK, PIECES)
            else:
                far = _get(reaches, index, r)
            score = tl.max(tl.where(index[None, :] == r, scores, float("-inf")), 1)
            scale = _get(scales, index, r)
            p = tl.exp(score - norm_of)
            a = p * (far - inner) * scale
            b = -a * scale * score / D
            d_source = pick(d_sources, r, R)
            fresh = ()
            for i in tl.static_range(PIECES):
                tile = x[i].to(tl.float32)
                fresh = fresh + (shares[i] + tile * a[:, None],)
                d_x = ups[i].to(tl.float32) * p[:, None] + keys[i] * a[:, None] + tile * b[:, None]
                if HAS_LAST:  # noqa: SIM102  (a constant outside, the loop's number inside)
                    if r == R - 1:
                        at, mask = _at(row, N, i, D, BLOCK)
                        d_x += tl.load(d_last + at, mask=mask, other=0.0).to(tl.float32)
                _put(d_source, d_x, row, N, i, D, BLOCK)
            shares = fresh
        if CARRY:
            p = tl.exp(tl.load(lse + row, mask=row < N, other=0.0) - norm_of)
            if OUT_NORM:
                reach = _inner(_row(mean, row, N, D, BLOCK, PIECES), ups, ROWS, BLOCK, PIECES)
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
