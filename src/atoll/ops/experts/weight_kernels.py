"""Gradients of the experts' weights: a product over the rows of each expert. Imported only where Triton is; launched by `fused.py`."""

import triton
import triton.language as tl


@triton.jit
def _operand(x, order, row, live, column, width, stride, TOPK: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr):
    """x[row, column] as [columns, rows], zero in rows that are not live; GATHER: x has a row a token, not one a sorted assignment."""
    if GATHER:
        row = tl.load(order + row, mask=live, other=0) // TOPK
    mask = live[None, :]
    if not EVEN:
        mask = mask & (column < width)[:, None]
    return tl.load(x + row.to(tl.int64)[None, :] * stride + column[:, None], mask=mask, other=0.0)


@triton.jit
def weight_kernel(
    left, right, order, first, out, out_more, M, N, BLOCKS_M, BLOCKS_N,
    SIDES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    TOPK: tl.constexpr, LEFT_GATHER: tl.constexpr, RIGHT_GATHER: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of out[expert, m, n] = sum over the expert's rows r of left[r, m] right[r, n]; zero where it has none.

    SIDES = 2: left has 2 M columns, and the second M give `out_more`. Tiles of an expert follow each other in bands of GROUP.
    """
    each = SIDES * BLOCKS_M * BLOCKS_N
    expert = tl.program_id(0) // each
    local = tl.program_id(0) - expert * each
    tall = SIDES * BLOCKS_M
    band = local // (GROUP * BLOCKS_N)
    members = tl.minimum(GROUP, tall - band * GROUP)
    local -= band * GROUP * BLOCKS_N
    down = band * GROUP + local % members
    side = down // BLOCKS_M
    m = (down - side * BLOCKS_M) * BM + tl.arange(0, BM)
    n = local // members * BN + tl.arange(0, BN)
    start = tl.load(first + expert)
    count = tl.load(first + expert + 1) - start
    left += side * M
    total = tl.zeros([BM, BN], tl.float32)
    for i in tl.range(0, tl.cdiv(count, BK), num_stages=STAGES):
        k = i * BK + tl.arange(0, BK)
        a = _operand(left, order, start + k, k < count, m, M, SIDES * M, TOPK, LEFT_GATHER, EVEN)
        b = _operand(right, order, start + k, k < count, n, N, N, TOPK, RIGHT_GATHER, EVEN)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    at = expert.to(tl.int64) * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    if SIDES == 2:
        out = tl.where(side == 1, out_more, out)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
