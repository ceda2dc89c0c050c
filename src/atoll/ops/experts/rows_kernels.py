"""Rows of tokens, sorted by expert, times their expert's weights. Imported only where Triton is; launched by `fused.py`.

A program computes a tile of [weight rows, tokens]: the weights stand where a matmul has its left side, so the token side may be as
narrow as 16 and an expert with 146 tokens computes 160 columns, not 192 or 256. The tile's tokens come in two parts, of N0 and N1,
because only powers of two compile. An expert's tokens are cut into tiles of FULL, and what is left into the narrowest class that
holds it; `sort_kernels.py` lists the tiles. A FULL tile takes half of the weight rows of the others, so both hold the same sums.

Programs of an expert run through its token tiles first, then through its weights, which therefore come from memory once.
Tokens past a tile's end are computed from its last token, and not stored.
"""

# What Triton compiles is not quite Python: to pyright its ranges are no iterators, a constexpr no tuple.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from atoll.ops.kda.triton_common import INTERPRETED, exp2, reciprocal

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def one_minus_exp(z):
    """1 - exp(-z) for z >= 0, also where it is small."""
    return tl.where(z < 0.03125, z * (1.0 - z * (0.5 - z * 0.16666667)), 1.0 - exp2(-LOG2E * z))


@triton.jit
def _rough_tanh(x):
    """Within 2^-11 of itself, a quarter of what rounding to bfloat16 may take, in one instruction."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def activation(gate, up, beta, linear, ACT: tl.constexpr, ROUGH: tl.constexpr):
    """silu(gate) up, or SiTU-GLU; ROUGH where the result is rounded to bfloat16, else one division for all three functions."""
    below = 1.0 + exp2(-LOG2E * gate)
    if ACT == "silu":
        return gate * up * reciprocal(below)
    elif ROUGH and not INTERPRETED:
        above = beta * _rough_tanh(gate * (1.0 / beta)) * reciprocal(below)
        return above * (linear * _rough_tanh(up * (1.0 / linear)) if ACT == "situ" else up)
    else:
        a = one_minus_exp(tl.abs(gate) * (2.0 / beta))
        above = tl.where(gate < 0, -beta, beta) * a
        below = below * (2.0 - a)
        if ACT == "situ":
            b = one_minus_exp(tl.abs(up) * (2.0 / linear))
            above = above * tl.where(up < 0, -linear, linear) * b
            below = below * (2.0 - b)
        else:
            above = above * up
        return above * reciprocal(below)


@triton.jit
def _source(order, row, K, TOPK: tl.constexpr, GATHER: tl.constexpr):
    """Where the rows start that a tile's tokens are read from."""
    if GATHER:
        return (tl.load(order + row) // TOPK).to(tl.int64) * K
    else:
        return row.to(tl.int64) * K


@triton.jit
def _part(x, at, shift, k, K, BK: tl.constexpr, EVEN: tl.constexpr):
    """Columns k … of rows that start at `at`, as [BK, tokens]."""
    column = k + tl.arange(0, BK)
    pointers = x + at[None, :] + (shift + column)[:, None]
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(column < K)[:, None], other=0.0)


@triton.jit
def _weights(w, k, K, M, row, step, column, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr):
    """[MW, BK] of the weights; `w` may differ by row. Rows past the last repeat it, or are zero where they lie side by side."""
    if TRANSPOSED:
        pointers = w + k.to(tl.int64) * M + step
        mask = (row < M)[:, None] & (k + column < K)[None, :]
    else:
        pointers = w + k + step
        mask = (k + column < K)[None, :]
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _sums(
    x, w, w_more, at0, at1, row, K, M, MW: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, BK: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr, TWICE: tl.constexpr, INTERLEAVED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile's two parts [MW, N0] and [MW, N1], float32. TWICE: over the K of `w`, then over that of `w_more`."""
    first = tl.zeros([MW, N0], tl.float32)
    second = tl.zeros([MW, N1 if N1 else 16], tl.float32)
    column = tl.arange(0, BK)
    if TRANSPOSED:
        step = row.to(tl.int64)[:, None] + (column.to(tl.int64) * M)[None, :]
    else:
        step = (tl.minimum(row, M - 1).to(tl.int64) * K)[:, None] + column[None, :]
    if INTERLEAVED:
        source = tl.where((tl.arange(0, MW) // 8 % 2 == 1)[:, None], w_more, w)
    steps = tl.cdiv(K, BK)
    for i in tl.range(0, 2 * steps if TWICE else steps, num_stages=STAGES):
        if TWICE:
            part = i // steps
            k = (i - part * steps) * BK
            source = tl.where(part == 1, w_more, w)
        else:
            part = 0
            k = i * BK
            if not INTERLEAVED:
                source = w
        a = _weights(source, k, K, M, row, step, column, TRANSPOSED, EVEN)
        first = tl.dot(a, _part(x, at0, part * K, k, K, BK, EVEN), first, input_precision=PRECISION)
        if N1:
            second = tl.dot(a, _part(x, at1, part * K, k, K, BK, EVEN), second, input_precision=PRECISION)
    return first, second


@triton.jit
def _put(out, tile, row, column, live, M):
    """The tile [columns, tokens] into rows `row` of out [., M]."""
    tl.store(out + row[None, :] + column[:, None], tile.to(out.dtype.element_ty), mask=live[None, :] & (column < M)[:, None])


@triton.jit
def _finish(sums, out, inner, row, live, block, M, beta, linear, MW: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr, KEEP: tl.constexpr):
    """Stores one part of a tile: as it is, or through the activation, whose two sides lie in alternate groups of 8 of its rows."""
    if ACT == "none":
        _put(out, sums, row * M, block * MW + tl.arange(0, MW), live, M)
    else:
        column = block * (MW // 2) + tl.arange(0, MW // 2)
        gate, up = sums.reshape(MW // 16, 2, 8, N).trans(0, 2, 3, 1).split()
        if KEEP != "nothing":
            at = row * (2 * M)
            _put(inner, gate.reshape(MW // 2, N), at, column, live, M)
            _put(inner + M, up.reshape(MW // 2, N), at, column, live, M)
        if KEEP != "only":
            hidden = activation(gate, up, beta, linear, ACT, out.dtype.element_ty == tl.bfloat16)
            _put(out, hidden.reshape(MW // 2, N), row * M, column, live, M)


@triton.jit
def _place(order, row, SCATTER: tl.constexpr):
    if SCATTER:
        return tl.load(order + row).to(tl.int64)
    else:
        return row.to(tl.int64)


@triton.jit
def _tile(
    x, order, w, w_more, out, inner, expert, start, count, block, K, M, beta, linear,
    MW: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, TOPK: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, TRANSPOSED: tl.constexpr, TWICE: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr,
    KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`count` tokens, at most N0 + N1, from sorted row `start` on; the block's MW weight rows."""
    m = tl.arange(0, MW)
    if ACT == "none":
        row = block * MW + m
    else:
        row = block * (MW // 2) + m // 16 * 8 + m % 8
    lane0, lane1 = tl.arange(0, N0), N0 + tl.arange(0, N1 if N1 else 16)
    row0, row1 = start + tl.minimum(lane0, count - 1), start + tl.minimum(lane1, count - 1)
    width = 2 * K if TWICE else K
    at0, at1 = _source(order, row0, width, TOPK, GATHER), _source(order, row1, width, TOPK, GATHER)
    first, second = _sums(
        x, w + expert.to(tl.int64) * M * K, w_more + expert.to(tl.int64) * M * K, at0, at1, row, K, M, MW, N0, N1, BK, TRANSPOSED, EVEN,
        TWICE, ACT != "none", STAGES, PRECISION,
    )  # fmt: skip
    _finish(first, out, inner, _place(order, row0, SCATTER), lane0 < count, block, M, beta, linear, MW, N0, ACT, KEEP)
    if N1:
        _finish(second, out, inner, _place(order, row1, SCATTER), lane1 < count, block, M, beta, linear, MW, N1, ACT, KEEP)


@triton.jit
def rows_kernel(
    x, order, table, total, w, w_more, out, inner, K, M, BLOCKS, beta, linear,
    FULL: tl.constexpr, HALVES: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr,
    MW: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, TOPK: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    TRANSPOSED: tl.constexpr, TWICE: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles of out[row] = sum over K of w[expert, m, k] x[row, k], m < M, in the order expert, group, weight block, token tile.

    Programs take every so many of the `total` tiles times BLOCKS: only the device knows how many there are.
    GATHER: x has a row a token, else a row an assignment, sorted. SCATTER: out has a row an assignment as routed, else sorted.
    TRANSPOSED: w is [E, K, M]. TWICE: x has 2 K columns, the second K meet `w_more`. ACT: out is the activation of w x and w_more x;
    KEEP: "nothing" but that, "also" both sides in `inner` [R, 2 M], or "only" those.
    """
    for number in tl.range(tl.program_id(0), tl.load(total) * BLOCKS, tl.num_programs(0), num_stages=1, disable_licm=True):
        entry = table + (number // BLOCKS) * 8
        expert, start, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        before, tiles, whole = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
        local = number - before * BLOCKS
        group = local // (GROUP * BLOCKS)
        members = tl.minimum(GROUP, tiles - group * GROUP)
        local -= group * GROUP * BLOCKS
        block = local // members
        tile = group * GROUP + local % members
        at = tl.minimum(tile // HALVES, whole) * FULL
        rest = tl.minimum(count - at, FULL)
        if HALVES > 1 and tile < whole * HALVES:
            _tile(
                x, order, w, w_more, out, inner, expert, start + at, rest, block * HALVES + tile % HALVES, K, M, beta, linear,
                MW // HALVES, FULL, 0, BK, STAGES, TOPK, GATHER, SCATTER, TRANSPOSED, TWICE, EVEN, ACT, KEEP, PRECISION,
            )  # fmt: skip
        else:
            for i in tl.static_range(len(FIRST)):
                narrower = FIRST[i - 1] + SECOND[i - 1] if i else 0
                if (rest > narrower) & (rest <= FIRST[i] + SECOND[i]):
                    _tile(
                        x, order, w, w_more, out, inner, expert, start + at, rest, block, K, M, beta, linear, MW, FIRST[i], SECOND[i], BK,
                        STAGES, TOPK, GATHER, SCATTER, TRANSPOSED, TWICE, EVEN, ACT, KEEP, PRECISION,
                    )  # fmt: skip
