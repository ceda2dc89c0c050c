"""What the Triton kernels of chunked KDA share. Imported only where Triton is; launched by `triton_launches.py`.

Chunks of 64 tokens, two blocks of 32. Log-decay G is kept in powers of two, counted from the start of each row's block. Scores of
rows and columns of one block share an anchor 2^SHIFT above the block's start, those of the second block's rows and the first
block's columns have theirs where the blocks meet, at `half`:

    score[i, j] = <row_i 2^(G_i + SHIFT), key_j 2^(-G_j - SHIFT)>        or        <row_i 2^G_i, key_j 2^(half - G_j)>

SHIFT is half of the most that 31 tokens can decay (112 at the bound -5), so both factors stay in the range of bfloat16 and
float32; of the second kind both are at most one. No anchor lies after a row that uses it, so no later token can move an earlier
score. Entries that are not kept may overflow: they are selected away after the product, never multiplied by a mask.

Intermediates are chunk-major, [chunks * heads, 64, D], filled with zeros past a document's end, so the scans load without masks.
A slot without a chunk (`table.py`) has no tokens: its programs end at once, and no segment holds it.
No kernel reads what another program of the same launch wrote, and no sum is atomic: results do not depend on scheduling.
"""

import os

import triton
import triton.language as tl

# The interpreter has no machine instructions; elsewhere subnormal results are flushed, which spares three instructions each.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

LOG2E = tl.constexpr(1.4426950408889634)
EPS = tl.constexpr(1e-6)


@triton.jit
def dot(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(DOT), b.to(DOT), input_precision=PRECISION)


@triton.jit
def dot_to(a, b, total, DOT: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(DOT), b.to(DOT), total, input_precision=PRECISION)


@triton.jit
def exp2(x):
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rows(pointer, base, step, first, count, c, N: tl.constexpr, C: tl.constexpr):
    """Rows first … first+N-1, channels c … c+C-1 of the tokens from `base` on, zero from row `count` on; float32."""
    row = first + tl.arange(0, N)
    at = row[:, None] * step + c + tl.arange(0, C)[None, :]
    return tl.load(pointer + base + at, mask=(row < count)[:, None], other=0.0).to(tl.float32)


@triton.jit
def put_rows(pointer, x, base, step, first, count, c, N: tl.constexpr, C: tl.constexpr):
    """The reverse of `rows`; rows from `count` on are not written."""
    row = first + tl.arange(0, N)
    at = row[:, None] * step + c + tl.arange(0, C)[None, :]
    tl.store(pointer + base + at, x.to(pointer.dtype.element_ty), mask=(row < count)[:, None])


@triton.jit
def load(pointer, base, first, c, N: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    """Rows first … first+N-1, columns c … c+C-1 of the matrix [., WIDTH] that starts at `base`."""
    at = (first + tl.arange(0, N))[:, None] * WIDTH + c + tl.arange(0, C)[None, :]
    return tl.load(pointer + base + at)


@triton.jit
def put(pointer, x, base, first, c, N: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    """The reverse of `load`."""
    at = (first + tl.arange(0, N))[:, None] * WIDTH + c + tl.arange(0, C)[None, :]
    tl.store(pointer + base + at, x.to(pointer.dtype.element_ty))


@triton.jit
def strength(beta, start, h, H, first, count, N: tl.constexpr):
    """sigmoid(beta) as a column [N, 1], zero from `count` on."""
    row = first + tl.arange(0, N)
    x = tl.load(beta + start * H + h + row * H, mask=row < count, other=0.0).to(tl.float32)
    return tl.where(row < count, tl.sigmoid(x), 0.0)[:, None]


@triton.jit
def gate(raw, first, count, rate, bias, N: tl.constexpr):
    """sigmoid(rate * (raw + bias)) of N rows, zero from `count` on; `bias` is a row."""
    open = reciprocal(1.0 + exp2((raw + bias) * (rate * -1.4426950408889634)))
    return tl.where((first + tl.arange(0, N) < count)[:, None], open, 0.0)
