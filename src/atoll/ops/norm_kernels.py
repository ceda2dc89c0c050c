"""Triton kernels of the norms, forward and backward. Imported only where Triton is; launched by `norm_launch.py`.

A program holds ROWS rows whole in registers, as PIECES tiles of BLOCK columns (7168 is 7 x 1024), so every element is read once.
The three norms are one kernel: without WEIGHT it is the L2 norm's factor alone, with GATED a sigmoid multiplies, and CAST rounds
the normalised row to the input's dtype before the weight.
"""

# What Triton compiles is not quite Python: to pyright static_range is no iterator, a constexpr no string.
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: RUF005  (Triton joins tuples by +, and has no unpacking)

import triton
import triton.language as tl


@triton.jit
def _tiles(x, row, R, D: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Rows of x [R, D] in float32, as a tuple of [ROWS, BLOCK]; zero outside."""
    tiles = ()
    for i in tl.static_range(PIECES):
        column = i * BLOCK + tl.arange(0, BLOCK)
        mask = (row < R)[:, None] & (column < D)[None, :]
        tiles = tiles + (tl.load(x + row[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def _put(y, tile, row, R, i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    column = i * BLOCK + tl.arange(0, BLOCK)
    mask = (row < R)[:, None] & (column < D)[None, :]
    tl.store(y + row[:, None] * D + column[None, :], tile.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _vector(weight, i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    column = i * BLOCK + tl.arange(0, BLOCK)
    return tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def norm_kernel(
    x, weight, gate, y, rstd, R, eps, D: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    WEIGHT: tl.constexpr, GATED: tl.constexpr, CAST: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """ROWS rows: x * (sum x² / COUNT + eps)^-1/2, times weight, times sigmoid(gate)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    tiles = _tiles(x, row, R, D, BLOCK, PIECES)
    if GATED:
        gates = _tiles(gate, row, R, D, BLOCK, PIECES)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        total += tiles[i] * tiles[i]
    scale = tl.rsqrt(tl.sum(total, 1) / COUNT + eps)
    if KEEP:
        tl.store(rstd + row, scale, mask=row < R)
    for i in tl.static_range(PIECES):
        out = tiles[i] * scale[:, None]
        if CAST:
            out = out.to(x.dtype.element_ty).to(tl.float32)
        if WEIGHT:
            out = out * _vector(weight, i, D, BLOCK)
        if GATED:
            out = out * tl.sigmoid(gates[i])
        _put(y, out, row, R, i, D, BLOCK)


@triton.jit
def norm_back_kernel(
    x, weight, gate, rstd, dy, dx, dgate, partial, R, GROUPS, PROGRAMS, D: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, WEIGHT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th group of ROWS rows: dx, dgate, and this program's share of the weight's gradient, [PROGRAMS, D].

    With d the gradient of the normalised row and c = rstd: dx = c d - x c³ <d, x> / COUNT.
    """
    shares = ()
    for _ in tl.static_range(PIECES):
        shares = shares + (tl.zeros([ROWS, BLOCK], tl.float32),)
    for group in range(tl.program_id(0), GROUPS, PROGRAMS):
        row = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        tiles = _tiles(x, row, R, D, BLOCK, PIECES)
        ups = _tiles(dy, row, R, D, BLOCK, PIECES)
        if GATED:
            gates = _tiles(gate, row, R, D, BLOCK, PIECES)
        scale = tl.load(rstd + row, mask=row < R, other=0.0)[:, None]
        inner = tl.zeros([ROWS, BLOCK], tl.float32)
        fresh = ()
        downs = ()
        for i in tl.static_range(PIECES):
            down = ups[i]
            if GATED:
                opening = tl.sigmoid(gates[i])
                down = down * opening
            if WEIGHT:
                part = down * tiles[i] * scale
                fresh = fresh + (shares[i] + part,)
                factor = _vector(weight, i, D, BLOCK)
                down = down * factor
                if GATED:
                    _put(dgate, part * factor * (1.0 - opening), row, R, i, D, BLOCK)
            else:
                fresh = fresh + (shares[i],)
            downs = downs + (down,)
            inner += down * tiles[i]
        shares = fresh
        along = tl.sum(inner, 1)[:, None] * scale * scale * scale / COUNT
        for i in tl.static_range(PIECES):
            _put(dx, downs[i] * scale - tiles[i] * along, row, R, i, D, BLOCK)
    if WEIGHT:
        for i in tl.static_range(PIECES):
            column = i * BLOCK + tl.arange(0, BLOCK)
            tl.store(partial + tl.program_id(0) * D + column, tl.sum(shares[i], 0), mask=column < D)
