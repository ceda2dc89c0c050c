"""What runs between and after the experts' products: the activation's gradient, and the weighted sum of a token's rows."""

# What Triton compiles is not quite Python: to pyright its ranges are no iterators, a constexpr no tuple.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from atoll.ops.experts.rows_kernels import LOG2E, one_minus_exp
from atoll.ops.kda.triton_common import exp2, reciprocal


@triton.jit
def _tanh(x):
    a = one_minus_exp(2.0 * tl.abs(x))
    return tl.where(x < 0, -a, a) * reciprocal(2.0 - a)


@triton.jit
def _slopes(gate, up, beta, linear, ACT: tl.constexpr):
    """The activation and its derivatives to gate and up (formulas of `ops.situ.glu_backward`)."""
    s = reciprocal(1.0 + exp2(-LOG2E * gate))
    if ACT == "silu":
        return gate * s * up, up * (s + gate * s * (1.0 - s)), gate * s
    else:
        t = _tanh(gate / beta)
        if ACT == "situ":
            v = _tanh(up / linear)
            u, rise = linear * v, 1.0 - v * v
        else:
            u, rise = up, 1.0
        value = beta * t * s
        return value * u, u * s * (1.0 + t * (beta - beta * s - t)), value * rise


@triton.jit
def slope_kernel(
    inner, back, weights, order, total, d_inner, hidden, d_weights, I, beta, linear, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PIECES: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """ROWS sorted rows of the `total` there are: from gate and up (`inner` [R, 2 I]) and the gradient of the hidden row before the token's
    weight (`back`), the gradients of gate and up, the weighted hidden row, and the weight's gradient, at the assignment."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < tl.load(total)
    assignment = tl.load(order + row, mask=live, other=0)
    weight = tl.load(weights + assignment, mask=live, other=0.0).to(tl.float32)[:, None]
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    base = row.to(tl.int64)[:, None] * I
    for i in tl.static_range(PIECES):
        column = i * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = live[:, None] & (column < I)
        gate = tl.load(inner + 2 * base + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(inner + 2 * base + I + column, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(back + base + column, mask=mask, other=0.0).to(tl.float32)
        value, to_gate, to_up = _slopes(gate, up, beta, linear, ACT)
        along += value * gradient
        tl.store(hidden + base + column, (value * weight).to(hidden.dtype.element_ty), mask=mask)
        gradient *= weight
        tl.store(d_inner + 2 * base + column, (to_gate * gradient).to(d_inner.dtype.element_ty), mask=mask)
        tl.store(d_inner + 2 * base + I + column, (to_up * gradient).to(d_inner.dtype.element_ty), mask=mask)
    tl.store(d_weights + assignment, tl.sum(along, 1).to(d_weights.dtype.element_ty), mask=live)


@triton.jit
def sum_kernel(rows, ids, weights, out, T, EXPERTS, L, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, WEIGHTED: tl.constexpr):
    """out[t] = sum over j < TOPK, in order, of weights[t, j] rows[t, j], float32; an id that is no expert's adds nothing."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = t < T
    inside = (column < L)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.static_range(TOPK):
        expert = tl.load(ids + t * TOPK + j, mask=live, other=-1)
        used = (expert >= 0) & (expert < EXPERTS)
        part = tl.load(rows + (t * TOPK + j)[:, None] * L + column[None, :], mask=used[:, None] & inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights + t * TOPK + j, mask=used, other=0.0).to(tl.float32)[:, None]
        total += part
    tl.store(out + t[:, None] * L + column[None, :], total.to(out.dtype.element_ty), mask=live[:, None] & inside)
