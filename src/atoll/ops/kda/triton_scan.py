"""The scans over chunks, one program a (segment, head, block of value columns), and what joins segments of one document.

A segment is a document, or a piece of a long one when there are too few heads to fill the card (`table.py`). The state is affine in
what entered: S_end = M S + L. `local_kernel` finds L (from zero) and M (from the identity, without writes) of each piece,
`join_kernel` carries the states along, and the scan proper then starts each segment from its own state; the last piece ends in the
document's final state. The reverse scan is joined the same way, with M transposed.
"""

# ruff: noqa: E501
# To pyright a function of Triton returns nothing that can be taken apart.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from atoll.ops.kda.triton_common import dot, dot_to, load, put, put_rows, rows


@triton.jit
def _task(H, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Segment, head and first column of this program; programs of one head lie side by side, and there may be 2^31."""
    at = tl.program_id(0)
    return at // BLOCKS // H, at // BLOCKS % H, at % BLOCKS * COLUMNS


@triton.jit
def _place_in_document(owner, first_segment, n):
    """Of segment n: its document (-1: an empty slot), whether it is its document's first, and its last."""
    document = tl.load(owner + n)
    first = tl.load(first_segment + tl.maximum(document, 0))
    return document, (n == first) & (document >= 0), n + 1 == tl.load(first_segment + document + 1)


@triton.jit
def scan_kernel(
    query, erase, tail, write, scores, decay_end, starts, counts, first_chunk, owner, first_segment, initial, final, o, entering, updates, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    HAS_INITIAL: tl.constexpr, STORE_FINAL: tl.constexpr, STORE_O: tl.constexpr, STORE_STATES: tl.constexpr,
):  # fmt: skip
    """States in order, outputs; for the backward pass the entering states and the updates X. `initial` one a segment, `final` a document."""
    n, h, b = _task(H, V // BV, BV)
    at_state = (n * H + h).to(tl.int64) * (K * V)
    if HAS_INITIAL:
        state = load(initial, at_state, 0, b, K, BV, V).to(tl.float32)
    else:
        state = tl.zeros([K, BV], tl.float32)
    for chunk in range(tl.load(first_chunk + n), tl.load(first_chunk + n + 1)):
        place = (chunk * H + h).to(tl.int64)
        held = state.to(DOT)
        if STORE_STATES:
            put(entering, held, place * (K * V), 0, b, K, BV, V)
        x = load(write, place * (64 * V), 0, b, 64, BV, V).to(tl.float32)
        x = (x - dot(load(erase, place * (64 * K), 0, 0, 64, K, K), held, DOT, PRECISION)).to(DOT)
        if STORE_STATES:
            put(updates, x, place * (64 * V), 0, b, 64, BV, V)
        if STORE_O:
            out = dot(load(query, place * (64 * K), 0, 0, 64, K, K), held, DOT, PRECISION)
            out = dot_to(load(scores, place * 4096, 0, 0, 64, 64, 64), x, out, DOT, PRECISION)
            start = (tl.load(starts + chunk).to(tl.int64) * H + h) * V
            put_rows(o, out, start, H * V, 0, tl.load(counts + chunk), b, 64, BV)
        fade = tl.load(decay_end + place * K + tl.arange(0, K))[:, None]
        state = dot_to(tl.trans(load(tail, place * (64 * K), 0, 0, 64, K, K)), x, state * fade, DOT, PRECISION)
    if STORE_FINAL:
        document, _, last = _place_in_document(owner, first_segment, n)
        if last:
            put(final, state, (document * H + h).to(tl.int64) * (K * V), 0, b, K, BV, V)


@triton.jit
def local_kernel(
    erase, tail, write, decay_end, first_chunk, owner, first_segment, local, carry, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """L [K, V] and M [K, K] of each piece of a document, as further blocks of columns; whole documents are passed over."""
    n, h, b = _task(H, (V + K) // BV, BV)
    _, head, end = _place_in_document(owner, first_segment, n)
    whole = head & end
    first = tl.load(first_chunk + n)
    last = tl.where(whole, first, tl.load(first_chunk + n + 1))
    values = b < V
    c = tl.where(values, 0, b - V)
    eye = tl.arange(0, K)[:, None] == (c + tl.arange(0, BV))[None, :]
    state = tl.where(eye & (b >= V), 1.0, 0.0)
    for chunk in range(first, last):
        place = (chunk * H + h).to(tl.int64)
        at = tl.arange(0, 64)[:, None] * V + b + tl.arange(0, BV)[None, :]
        x = tl.load(write + place * (64 * V) + at, mask=values & (at >= 0), other=0.0).to(tl.float32)
        x = (x - dot(load(erase, place * (64 * K), 0, 0, 64, K, K), state, DOT, PRECISION)).to(DOT)
        fade = tl.load(decay_end + place * K + tl.arange(0, K))[:, None]
        state = dot_to(tl.trans(load(tail, place * (64 * K), 0, 0, 64, K, K)), x, state * fade, DOT, PRECISION)
    at = (n * H + h).to(tl.int64)
    if not whole:
        if values:
            put(local, state, at * (K * V), 0, b, K, BV, V)
        else:
            put(carry, state, at * (K * K), 0, c, K, BV, K)


@triton.jit
def join_kernel(
    local, carry, first_segment, edge, out, H,
    K: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BACK: tl.constexpr, HAS_EDGE: tl.constexpr,
):  # fmt: skip
    """The state at which each segment of a document starts (`BACK`: the gradient at which it ends), from `edge`, that of the document.

    M of wide keys does not fit a program's memory: then C channels of it at once, and of the state as just stored.
    """
    n, h, b = _task(H, V // BV, BV)
    if HAS_EDGE:
        state = load(edge, (n * H + h).to(tl.int64) * (K * V), 0, b, K, BV, V).to(tl.float32)
    else:
        state = tl.zeros([K, BV], tl.float32)
    first = tl.load(first_segment + n)
    last = tl.load(first_segment + n + 1)
    for step in range(first, last - 1):
        segment = first + last - 1 - step if BACK else step
        at = (segment * H + h).to(tl.int64)
        put(out, state, at * (K * V), 0, b, K, BV, V)
        if K == C:
            matrix = load(carry, at * (K * K), 0, 0, K, K, K)
            matrix = tl.trans(matrix) if BACK else matrix
            state = tl.dot(matrix, state, load(local, at * (K * V), 0, b, K, BV, V), input_precision="tf32x3")
        else:
            tl.debug_barrier()  # what this program stored into `out` is read again
            state = load(local, at * (K * V), 0, b, K, BV, V)
            for c in range(0, K, C):
                if BACK:
                    matrix = tl.trans(load(carry, at * (K * K), c, 0, C, K, K))
                else:
                    matrix = load(carry, at * (K * K), 0, c, K, C, K)
                state = tl.dot(matrix, load(out, at * (K * V), c, b, C, BV, V), state, input_precision="tf32x3")
    segment = first if BACK else last - 1
    put(out, state, (segment * H + h).to(tl.int64) * (K * V), 0, b, K, BV, V)


@triton.jit
def scan_back_kernel(
    query, erase, tail, scores, decay_end, starts, counts, first_chunk, owner, first_segment, do, dfinal, dinitial, dupdates, leaving, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    HAS_DFINAL: tl.constexpr, STORE_DINITIAL: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """The reverse scan: gradients of the leaving states and of the updates, dX = A_qk^T do + tail dS', dS = fade dS' + query^T do - W^T dX.

    `dfinal` one a segment, `dinitial` a document. Without `STORE` it is L of the reverse scan, one a piece, and documents in one piece
    are passed over.
    """
    n, h, b = _task(H, V // BV, BV)
    at_state = (n * H + h).to(tl.int64) * (K * V)
    if HAS_DFINAL:
        dstate = load(dfinal, at_state, 0, b, K, BV, V).to(tl.float32)
    else:
        dstate = tl.zeros([K, BV], tl.float32)
    first = tl.load(first_chunk + n)
    last = tl.load(first_chunk + n + 1)
    document, head, end = _place_in_document(owner, first_segment, n)
    if not STORE:
        last = tl.where(head & end, first, last)
    for step in range(first, last):
        chunk = first + last - 1 - step
        place = (chunk * H + h).to(tl.int64)
        start = (tl.load(starts + chunk).to(tl.int64) * H + h) * V
        up = rows(do, start, H * V, 0, tl.load(counts + chunk), b, 64, BV).to(DOT)
        held = dstate.to(DOT)
        if STORE:
            put(leaving, held, place * (K * V), 0, b, K, BV, V)
        dx = dot(tl.trans(load(scores, place * 4096, 0, 0, 64, 64, 64)), up, DOT, PRECISION)
        dx = dot_to(load(tail, place * (64 * K), 0, 0, 64, K, K), held, dx, DOT, PRECISION)
        if STORE:
            put(dupdates, dx, place * (64 * V), 0, b, 64, BV, V)
        fade = tl.load(decay_end + place * K + tl.arange(0, K))[:, None]
        dstate = dot_to(tl.trans(load(query, place * (64 * K), 0, 0, 64, K, K)), up, dstate * fade, DOT, PRECISION)
        dstate = dot_to(tl.trans(load(erase, place * (64 * K), 0, 0, 64, K, K)), -dx, dstate, DOT, PRECISION)
    if not STORE:
        if not (head & end):
            put(dinitial, dstate, at_state, 0, b, K, BV, V)
    elif STORE_DINITIAL:  # noqa: SIM102  (known when compiling, unlike the next)
        if head:
            put(dinitial, dstate, (document * H + h).to(tl.int64) * (K * V), 0, b, K, BV, V)
