"""Assignments sorted by expert on the device: a stable counting sort, and the list of token tiles. Nothing waits for the host.

Integers only, and no sum depends on scheduling. Ids that are no expert's are left out: their rows belong to no tile.
Launched by `plan.py`; imported only where Triton is.
"""

import triton
import triton.language as tl


@triton.jit
def _ids(ids, at, R, E):
    """Experts of assignments `at`, -1 where there is none."""
    expert = tl.load(ids + at, mask=at < R, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, -1).to(tl.int32)


@triton.jit
def count_kernel(ids, counts, R, E, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """counts[block, e]: assignments to e among BLOCK. BINS is a power of two above E; the last bin takes what is no expert's."""
    expert = _ids(ids, tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), R, E)
    found = tl.histogram(tl.where(expert < 0, BINS - 1, expert), BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts + tl.program_id(0).to(tl.int64) * E + bins, found, mask=bins < E)


@triton.jit
def scan_kernel(counts, totals, BLOCKS, E, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Turns counts [BLOCKS, E] into the sums of the blocks before; totals [E]."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, BLOCKS, ROWS):
        block = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (block < BLOCKS)[:, None] & (expert < E)[None, :]
        at = counts + block[:, None] * E + expert[None, :]
        found = tl.load(at, mask=mask, other=0)
        tl.store(at, tl.cumsum(found, 0) - found + before[None, :], mask=mask)
        before += tl.sum(found, 0)
    tl.store(totals + expert, before, mask=expert < E)


@triton.jit
def layout_kernel(totals, first, tiles, E, FULL: tl.constexpr, HALVES: tl.constexpr, WIDEST: tl.constexpr, BINS: tl.constexpr):
    """first [E+1]: the expert's first sorted row; tiles [E+1]: its first tile. A rest above WIDEST is a FULL tile too."""
    expert = tl.arange(0, BINS)
    count = tl.load(totals + expert, mask=expert < E, other=0)
    rest = count % FULL
    need = count // FULL * HALVES + tl.where(rest > WIDEST, HALVES, tl.where(rest > 0, 1, 0))
    tl.store(first + 1 + expert, tl.cumsum(count, 0), mask=expert < E)
    tl.store(tiles + 1 + expert, tl.cumsum(need, 0), mask=expert < E)
    tl.store(first, 0)
    tl.store(tiles, 0)


@triton.jit
def place_kernel(ids, counts, first, order, R, E, BLOCK: tl.constexpr, PART: tl.constexpr):
    """order[row] = assignment. A row is its expert's first, plus those of earlier blocks, plus those before it in its own."""
    lane = tl.arange(0, BLOCK)
    base = tl.program_id(0).to(tl.int64) * BLOCK
    expert = _ids(ids, base + lane, R, E)
    rank = tl.zeros([BLOCK], tl.int32)
    for part in range(0, BLOCK, PART):
        other = part + tl.arange(0, PART)
        same = expert[:, None] == _ids(ids, base + other, R, E)[None, :]
        rank += tl.sum((same & (other[None, :] < lane[:, None])).to(tl.int32), 1)
    there = expert >= 0
    row = tl.load(first + expert, mask=there, other=0) + rank
    row += tl.load(counts + tl.program_id(0).to(tl.int64) * E + expert, mask=there, other=0)
    tl.store(order + row, (base + lane).to(tl.int32), mask=there)


@triton.jit
def table_kernel(
    first, tiles, table, TILES, E, STEPS, FULL: tl.constexpr, WIDEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """table[j] = (expert, first sorted row, rows, first tile, tiles, FULL tiles of it), by bisection; expert -1 past the last."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + E
    for _ in range(STEPS):  # the last expert whose first tile is not after j and that has one
        middle = (low + high) // 2
        reached = tl.load(tiles + 1 + tl.minimum(middle, E - 1)) <= j
        low = tl.where(reached & (low < high), middle + 1, low)
        high = tl.where(reached, high, middle)
    there = j < tl.load(tiles + E)
    expert = tl.minimum(low, E - 1)
    start, before = tl.load(first + expert), tl.load(tiles + expert)
    count = tl.load(first + expert + 1) - start
    row, mask = table + j.to(tl.int64) * 8, j < TILES
    tl.store(row, tl.where(there, expert, -1), mask=mask)
    tl.store(row + 1, start, mask=mask)
    tl.store(row + 2, count, mask=mask)
    tl.store(row + 3, before, mask=mask)
    tl.store(row + 4, tl.load(tiles + expert + 1) - before, mask=mask)
    tl.store(row + 5, count // FULL + (count % FULL > WIDEST).to(tl.int32), mask=mask)
