"""Triton kernels of the short convolution with SiLU. Imported only where Triton is; launched by `conv_launch.py`.

Tokens are rows of x [T, C]; document n holds rows edge(n) … edge(n+1)-1, found by a search in the kernel, so that packed documents
cost no launch and no wait. Rows before a document come from its state, or are zero; masks select and never multiply, so that
nothing of another document, a NaN for one, comes in. Sums are float32; no kernel adds atomically.
"""

# What Triton compiles is not quite Python: to pyright static_range is no iterator, a constexpr no string.
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: RUF005  (Triton joins tuples by +, and has no unpacking)

import triton
import triton.language as tl


@triton.jit
def _edge(edges, n, LENGTH, PACKED: tl.constexpr):
    """First row of document n."""
    if PACKED:
        return tl.load(edges + n).to(tl.int32)
    else:
        return n * LENGTH


@triton.jit
def _document(edges, t, LENGTH, DOCUMENTS, STEPS, PACKED: tl.constexpr):
    """The document of row t, a number or a vector: the last that starts at or before t, which is never an empty one."""
    if PACKED:
        low = t * 0
        high = low + (DOCUMENTS - 1)
        for _ in range(STEPS):
            middle = (low + high + 1) // 2
            here = tl.load(edges + middle).to(tl.int32) <= t
            low = tl.where(here, middle, low)
            high = tl.where(here, high, middle - 1)
        return low
    else:
        return t // LENGTH


@triton.jit
def _silu_slope(u):
    s = tl.sigmoid(u)
    return s * (1.0 + u * (1.0 - s))


@triton.jit(do_not_specialize=["T", "LENGTH", "DOCUMENTS", "STEPS"])
def conv_kernel(
    x, weight, state, edges, y, T, C, LENGTH, DOCUMENTS, STEPS, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """BT rows of BC channels. Neighbouring rows overlap in cache, not in device memory."""
    blocks = tl.cdiv(C, BC)
    t = tl.program_id(0) // blocks * BT + tl.arange(0, BT)
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    mask = (t < T)[:, None] & (c < C)[None, :]
    n = _document(edges, t, LENGTH, DOCUMENTS, STEPS, PACKED)
    place = t - _edge(edges, n, LENGTH, PACKED)
    at = t.to(tl.int64)[:, None] * C + c[None, :]
    total = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(W):
        known = (place >= W - 1 - j)[:, None]
        value = tl.load(x + at - (W - 1 - j) * C, mask=mask & known, other=0.0)
        if HAS_STATE:
            row = (n * (W - 1) + place + j).to(tl.int64)[:, None] * C + c[None, :]
            value = tl.where(known, value, tl.load(state + row, mask=mask & ~known, other=0.0).to(x.dtype.element_ty))
        total += value.to(tl.float32) * tl.load(weight + c * W + j, mask=c < C, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, (total * tl.sigmoid(total)).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "LENGTH"])
def final_kernel(
    x, state, edges, final, T, C, LENGTH, W: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr, PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """The last W-1 inputs of one document, those of its state included."""
    n = tl.program_id(0)
    row = tl.arange(0, ROWS)[:, None]
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    start = _edge(edges, n, LENGTH, PACKED)
    length = _edge(edges, n + 1, LENGTH, PACKED) - start
    place = length - (W - 1) + row
    mask = (row < W - 1) & (c < C)
    value = tl.load(x + (start + place).to(tl.int64) * C + c, mask=mask & (place >= 0), other=0.0)
    if HAS_STATE:
        at = (n * (W - 1) + length + row).to(tl.int64) * C + c
        value = tl.where(place >= 0, value, tl.load(state + at, mask=mask & (place < 0), other=0.0).to(x.dtype.element_ty))
    tl.store(final + (n * (W - 1) + row).to(tl.int64) * C + c, value, mask=mask)


@triton.jit(do_not_specialize=["T", "LENGTH", "DOCUMENTS", "STEPS", "SEGMENT"])
def conv_back_kernel(
    x, weight, state, edges, dy, dfinal, dx, partial, T, C, LENGTH, DOCUMENTS, STEPS, SEGMENT, W: tl.constexpr, BC: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr, HAS_DFINAL: tl.constexpr,
):  # fmt: skip
    """Gradients of SEGMENT rows of BC channels, row by row, each read once; the weight's share of this segment, [W, C].

    Carried: the W-1 rows before, and what the W-1 rows before still wait for, since row t's du reaches rows t … t-W+1. W-1 rows
    beyond the segment are walked too, for what they send back. GROUP rows are fetched together.
    """
    blocks = tl.cdiv(C, BC)
    segment = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    inside = c < C
    first = segment * SEGMENT
    stop = tl.minimum(first + SEGMENT, T)
    n = _document(edges, first, LENGTH, DOCUMENTS, STEPS, PACKED)
    start = _edge(edges, n, LENGTH, PACKED)
    end = _edge(edges, n + 1, LENGTH, PACKED)
    taps = ()
    shares = ()
    past = ()
    waiting = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + c * W + j, mask=inside, other=0.0).to(tl.float32),)
        shares = shares + (tl.zeros([BC], tl.float32),)
    for lag in tl.static_range(1, W):
        at = (first - lag).to(tl.int64) * C + c
        past = past + (tl.load(x + at, mask=inside & (first >= lag), other=0.0).to(tl.float32),)
        waiting = waiting + (tl.zeros([BC], tl.float32),)
    for group in range(tl.cdiv(stop - first + W - 1, GROUP)):
        rows = ()
        ups = ()
        for i in tl.static_range(GROUP):
            t = first + group * GROUP + i
            at = t.to(tl.int64) * C + c
            rows = rows + (tl.load(x + at, mask=inside & (t < T), other=0.0),)
            ups = ups + (tl.load(dy + at, mask=inside & (t < T), other=0.0),)
        for i in tl.static_range(GROUP):
            t = first + group * GROUP + i
            while tl.minimum(t, T - 1) >= end:
                n += 1
                start = end
                end = _edge(edges, n + 1, LENGTH, PACKED)
            place = t - start
            now = rows[i].to(tl.float32)
            inputs = (now,)  # by lag
            total = now * taps[W - 1]
            for lag in tl.static_range(1, W):
                value = past[lag - 1]
                if HAS_STATE:
                    row = (n * (W - 1) + W - 1 + place - lag).to(tl.int64) * C + c
                    held = tl.load(state + row, mask=inside & (place < lag), other=0.0).to(x.dtype.element_ty).to(tl.float32)
                    value = tl.where(place >= lag, value, held)
                else:
                    value = tl.where(place >= lag, value, 0.0)
                inputs = inputs + (value,)
                total += value * taps[W - 1 - lag]
            du = tl.where(t < T, _silu_slope(total) * ups[i].to(tl.float32), 0.0)
            own = tl.where(t < stop, du, 0.0)
            new_shares = ()
            for j in tl.static_range(W):
                new_shares = new_shares + (shares[j] + own * inputs[W - 1 - j],)
            shares = new_shares
            gradient = du * taps[W - 1]
            if HAS_DFINAL:
                last = place - (end - start) + (W - 1)  # row of the final state, where this row is in it
                at_final = (n * (W - 1) + last).to(tl.int64) * C + c
                gradient += tl.load(dfinal + at_final, mask=inside & (last >= 0) & (t < T), other=0.0).to(tl.float32)
            new_waiting = (gradient,)
            new_past = (now,)
            for lag in tl.static_range(1, W):
                gradient = waiting[lag - 1] + tl.where(place >= lag, du * taps[W - 1 - lag], 0.0)
                if lag < W - 1:
                    new_waiting = new_waiting + (gradient,)
                    new_past = new_past + (past[lag - 1],)
            done = t - (W - 1)
            at = done.to(tl.int64) * C + c
            tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside & (done >= first) & (done < stop))
            waiting = new_waiting
            past = new_past
    for j in tl.static_range(W):
        tl.store(partial + (segment * W + j).to(tl.int64) * C + c, shares[j], mask=inside)


@triton.jit(do_not_specialize=["T", "LENGTH"])
def initial_back_kernel(
    x, weight, state, edges, dy, dfinal, dstate, T, C, LENGTH, W: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
    PACKED: tl.constexpr, HAS_DFINAL: tl.constexpr,
):  # fmt: skip
    """The gradient of one document's state: its first W-1 rows reach into it, and a short document's final state holds some of it."""
    n = tl.program_id(0)
    row = tl.arange(0, ROWS)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    start = _edge(edges, n, LENGTH, PACKED)
    length = _edge(edges, n + 1, LENGTH, PACKED) - start
    total = tl.zeros([ROWS, BC], tl.float32)
    if HAS_DFINAL:
        at_final = (n * (W - 1) + row - length).to(tl.int64) * C + c[None, :]
        total += tl.load(dfinal + at_final, mask=(row >= length) & (row < W - 1) & inside[None, :], other=0.0).to(tl.float32)
    for p in range(tl.minimum(length, W - 1)):
        u = tl.zeros([BC], tl.float32)
        for j in tl.static_range(W):
            place = p + j - (W - 1)
            value = tl.load(x + (start + place).to(tl.int64) * C + c, mask=inside & (place >= 0), other=0.0)
            held = (n * (W - 1) + p + j).to(tl.int64) * C + c
            value = tl.where(place >= 0, value, tl.load(state + held, mask=inside & (place < 0), other=0.0).to(x.dtype.element_ty))
            u += value.to(tl.float32) * tl.load(weight + c * W + j, mask=inside, other=0.0).to(tl.float32)
        du = _silu_slope(u) * tl.load(dy + (start + p).to(tl.int64) * C + c, mask=inside, other=0.0).to(tl.float32)
        tap = tl.load(weight + c[None, :] * W + (row - p), mask=(row >= p) & (row < W - 1) & inside[None, :], other=0.0)
        total += tl.where(row >= p, tap.to(tl.float32) * du[None, :], 0.0)
    at = (n * (W - 1) + row).to(tl.int64) * C + c[None, :]
    tl.store(dstate + at, total.to(dstate.dtype.element_ty), mask=(row < W - 1) & inside[None, :])
