"""Routing in one kernel: one warp a token holds all experts' scores in registers. Imported only where Triton is; see `route_launch.py`.

Scores become integers of the same order (NaN above all, as torch sorts it), so that equal means equal, the reductions over a warp are
single instructions, and the lowest index among the largest is well defined. The bin of (cutoff - score) is computed by the arithmetic
of `QuantileHistogram.observe`, operation by operation; counts are integers, so their atomic sums do not depend on any order.
"""

import triton
import triton.language as tl

from atoll.ops.kda.triton_common import INTERPRETED

LEAST = tl.constexpr(-(2**31))
MOST = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(x):
    """int32 that compare as the floats x do; -0 is 0, NaN the largest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ MOST, bits)
    return tl.where(x != x, MOST, bits)


@triton.jit
def _divide(x, y):
    """Rounded to nearest, as torch divides."""
    if INTERPRETED:
        return x / y
    else:
        return tl.math.div_rn(x, y)


@triton.jit
def route_kernel(
    scores, bias, mask, low, width, ids, weights, cutoff, counts, load, E: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr,
    PLACES: tl.constexpr, BINS: tl.constexpr, MASKED: tl.constexpr, COUNTED: tl.constexpr, LOADED: tl.constexpr,
):  # fmt: skip
    """One token: ids [T, K] by falling scores + bias, weights [T, K], cutoff [T]; what is not masked into counts [E, BINS], load [E]."""
    t = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, LANES)
    inside = expert < E
    score = tl.load(scores + t * E + expert, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, _ordered(score + tl.load(bias + expert, mask=inside, other=0.0)), LEAST)
    place = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    for j in tl.range(0, K):
        best = tl.min(tl.where(key == tl.max(key, 0), expert, LANES), 0)
        key = tl.where(expert == best, LEAST, key)
        chosen = tl.where(place == j, best, chosen)
    last = tl.min(tl.where(key == tl.max(key, 0), expert, LANES), 0)
    edge = tl.load(scores + t * E + last).to(tl.float32) + tl.load(bias + last)
    kept = place < K
    value = tl.load(scores + t * E + chosen, mask=kept, other=0.0).to(tl.float32)
    tl.store(ids + t * K + place, chosen.to(tl.int64), mask=kept)
    tl.store(weights + t * K + place, value / (tl.sum(value, 0) + 1e-20), mask=kept)
    tl.store(cutoff + t, edge)
    if COUNTED or LOADED:
        real = True
        if MASKED:
            real = tl.load(mask + t) != 0
        if LOADED:
            tl.atomic_add(load + chosen, tl.full([PLACES], 1, tl.int64), mask=kept & real, sem="relaxed")
        if COUNTED:
            bin_ = _divide((edge - score) - tl.load(low).to(tl.float32), tl.load(width).to(tl.float32) + tl.zeros([LANES], tl.float32))
            bin_ = tl.minimum(tl.maximum(bin_, 0.0), BINS - 1.0).to(tl.int32)
            tl.atomic_add(counts + expert * BINS + bin_, tl.full([LANES], 1, tl.int64), mask=inside & real, sem="relaxed")
