"""Triton kernel of the decoding step. Imported only where Triton is; launched by `step_launch.py`.

One program owns BV value columns of one head of one sequence: it holds that slab of the state in registers for all T tokens of the
call, so nothing but slab, window rows and a few vectors crosses device memory. Slabs are [BV, K], keys along a row: with the state
kept V-major in memory a row is contiguous, loads are 16 bytes a thread, and sums over K stay within a warp. Other strides work.

Programs of one head all convolve its q and k, and no program may overwrite a window row that another may still read. Two ways:
* a ring of at least W-1+T rows, token i in row i mod ROWS: this launch reads the rows of tokens p-W+1 … p-1 and writes those of
  p … p+T-1, all different, and the position p is moved by the caller after the launch;
* a plain window: the next window goes to a buffer of its own; `commit_kernel`, a later launch, copies it to its slot.
"""

# What Triton compiles is not quite Python: to pyright static_range is no iterator, a constexpr no string.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

_EPS = tl.constexpr(1e-6)


@triton.jit
def _ring_row(place, C, ROWS: tl.constexpr):
    """Offset of token `place`'s row; place may be negative by less than ROWS."""
    return ((place + ROWS) % ROWS).to(tl.int64) * C


@triton.jit
def _fetch(
    x, stride, weight, window, position, C, t, W: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The inputs under token t's taps and the weights, each [channels, TAPS]. For each channel, x points at token 0, weight at tap 0,
    window at row 0. With taps as columns a channel's weights are one load, and the sum over taps leaves a layout of its own, so that
    the loads are not repeated by every thread that later needs the channel."""
    tap = tl.arange(0, TAPS)[None, :]
    index = t - (W - 1) + tap  # token of each tap, counted from the call's first
    now = tl.load(x[:, None] + index * stride, mask=(index >= 0) & (tap < W), other=0.0)
    if RING:  # zero before the sequence's start
        place = position + index
        before = tl.load(window[:, None] + _ring_row(place, C, ROWS), mask=(index < 0) & (place >= 0), other=0.0)
    else:
        before = tl.load(window[:, None] + (W - 1 + index) * C, mask=index < 0, other=0.0)
    taps = tl.load(weight[:, None] + tap, mask=tap < W, other=0.0)
    return now, before, taps, index


@triton.jit
def _convolve(now, before, taps, index, DTYPE: tl.constexpr):
    """Convolution and SiLU of what was fetched, rounded to the inputs' dtype."""
    value = tl.where(index < 0, before.to(DTYPE), now).to(tl.float32)
    total = tl.sum(value * taps.to(tl.float32), 1)
    return (total * tl.sigmoid(total)).to(DTYPE).to(tl.float32)


@triton.jit
def _remember(
    x, stride, window, window_out, position, C, T: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, RING: tl.constexpr
):  # fmt: skip
    """Put the call's inputs where later calls look for them: in the ring, or the last W-1 of all into the next window."""
    if RING:
        for t in tl.static_range(T):
            tl.store(window_out + _ring_row(position + t, C, ROWS), tl.load(x + t * stride).to(window_out.dtype.scalar.element_ty))
    else:
        for j in tl.static_range(W - 1):
            if T + j >= W - 1:
                value = tl.load(x + (T + j - (W - 1)) * stride).to(window_out.dtype.scalar.element_ty)
            else:
                value = tl.load(window + (T + j) * C)
            tl.store(window_out + j * C, value)


@triton.jit
def _decay(logits, rate, bias, lower_bound, BOUNDED: tl.constexpr):
    """exp of the log-decay."""
    x = logits.to(tl.float32) + bias.to(tl.float32)
    rate = tl.exp(rate.to(tl.float32))
    if BOUNDED:
        return tl.exp(lower_bound * tl.sigmoid(rate * x))
    else:
        return tl.exp(-rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))))


@triton.jit
def step_kernel(
    q, k, v, wq, wk, wv, g, beta, A_log, dt_bias, state, window, window_out, slots, position, accepted, gate, norm, out,
    stride_q, stride_k, stride_v, state_slot, state_draft, state_head, state_key, state_value, H, scale, lower_bound, eps,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, T: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    MAJOR: tl.constexpr, RING: tl.constexpr, DRAFTS: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_ACCEPTED: tl.constexpr,
    BOUNDED: tl.constexpr, FUSED: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """T tokens of one (sequence, head, BV value columns). With FUSED, BV is V and the gated norm of the output is inside."""
    block, h = tl.program_id(0), tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    key_channel = tl.arange(0, K)
    col = block * BV + tl.arange(0, BV)
    DTYPE: tl.constexpr = q.dtype.element_ty
    STATE: tl.constexpr = state.dtype.element_ty
    at_out = out + (n * T * H + h) * V + col  # token t: t * H * V further
    slot = n
    if HAS_SLOTS:
        slot = tl.load(slots + n).to(tl.int64)
    if slot < 0:
        for t in tl.static_range(T):
            tl.store(at_out + t * H * V, tl.zeros([BV], tl.float32).to(out.dtype.element_ty))
        return
    at_state = state + slot * state_slot + h.to(tl.int64) * state_head
    if MAJOR:  # V-major: constant strides need no registers
        at_state = at_state + col[:, None] * K + key_channel[None, :]
    else:
        at_state = at_state + col.to(tl.int64)[:, None] * state_value + key_channel.to(tl.int64)[None, :] * state_key
    start = at_state
    if HAS_ACCEPTED:
        start = at_state + (tl.load(accepted + n).to(tl.int64) - 1) * state_draft
    raw = tl.load(start, eviction_policy=EVICT)  # in flight while everything small is fetched
    place = 0
    if RING:
        place = tl.load(position + slot).to(tl.int32)

    C = H * (2 * K + V)
    at_q = h * K + key_channel
    at_v = h * V + col
    q = q + n * T * stride_q + at_q
    k = k + n * T * stride_k + at_q
    v = v + n * T * stride_v + at_v
    wq, wk, wv = wq + at_q * W, wk + at_q * W, wv + at_v * W
    rows = window + slot * ROWS * C
    next_rows = rows
    if not RING:
        next_rows = window_out + n * (W - 1) * C
    at_k, at_v = H * K + at_q, 2 * H * K + at_v
    held = raw.to(tl.float32)
    for t in range(T):
        # every load before the first use, so that they wait for memory together
        in_q, old_q, tap_q, index = _fetch(q, stride_q, wq, rows + at_q, place, C, t, W, TAPS, ROWS, RING)
        in_k, old_k, tap_k, index = _fetch(k, stride_k, wk, rows + at_k, place, C, t, W, TAPS, ROWS, RING)
        in_v, old_v, tap_v, index = _fetch(v, stride_v, wv, rows + at_v, place, C, t, W, TAPS, ROWS, RING)
        token = n * T + t
        logits = tl.load(g + (token * H + h) * K + key_channel)
        bias = tl.load(dt_bias + h * K + key_channel)
        rate = tl.load(A_log + h)
        logit = tl.load(beta + token * H + h)
        if FUSED:
            opening = tl.load(gate + (token * H + h) * V + col)
            weight = tl.load(norm + col)
        query = _convolve(in_q, old_q, tap_q, index, DTYPE)
        key = _convolve(in_k, old_k, tap_k, index, DTYPE)
        # moves nothing, but a gather is where the compiler stops looking: else it moves the whole state into the layout of `value`
        value = tl.gather(_convolve(in_v, old_v, tap_v, index, DTYPE), tl.arange(0, BV), 0)
        decay = _decay(logits, rate, bias, lower_bound, BOUNDED)
        strength = tl.sigmoid(logit.to(tl.float32))
        query = query * (tl.rsqrt(tl.sum(query * query, 0) + _EPS) * scale)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + _EPS)
        held = held * decay[None, :]
        # both sums over K from the decayed state at once: o = S'^T q = (exp(g) S)^T q + <k, q> beta (v - (exp(g) S)^T k)
        delta = strength * (value - tl.sum(held * key[None, :], 1))
        o = tl.sum(held * query[None, :], 1) + delta * tl.sum(query * key, 0)
        held = held + delta[:, None] * key[None, :]
        kept = held.to(STATE)
        if DRAFTS:
            tl.store(at_state + t * state_draft, kept, eviction_policy=EVICT)
        held = kept.to(tl.float32)  # the next token starts from what is kept: T tokens in one call equal T calls
        if FUSED:
            o = o.to(DTYPE).to(tl.float32)
            o = o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * weight.to(tl.float32) * tl.sigmoid(opening.to(tl.float32))
        tl.store(at_out + t * H * V, o.to(out.dtype.element_ty))
    if not DRAFTS:
        tl.store(at_state, held.to(STATE), eviction_policy=EVICT)
    if block == 0:
        _remember(q, stride_q, rows + at_q, next_rows + at_q, place, C, T, W, ROWS, RING)
        _remember(k, stride_k, rows + at_k, next_rows + at_k, place, C, T, W, ROWS, RING)
    _remember(v, stride_v, rows + at_v, next_rows + at_v, place, C, T, W, ROWS, RING)


@triton.jit
def commit_kernel(fresh, window, slots, SIZE, BLOCK: tl.constexpr):
    """Windows [N, SIZE] to their slots; -1 is skipped."""
    n = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (at < SIZE) & (slot >= 0)
    tl.store(window + slot * SIZE + at, tl.load(fresh + n * SIZE + at, mask=mask), mask=mask)
