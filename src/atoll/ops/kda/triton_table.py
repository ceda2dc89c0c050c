"""The table of chunks and segments, made on the device from document boundaries there; see `table.py`."""

import triton
import triton.language as tl


@triton.jit
def table_kernel(
    edges, starts, counts, first, owner, first_segment, T, N, CHUNKS, SEGMENTS, SIZE, BLOCK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """BLOCK slots a program; each program walks over all documents, TILE at once, counting chunks and segments before its slots.

    Both counts never fall from document to document, so of the documents that end before a slot the largest count is where the slot's
    own document begins.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk_document = tl.zeros([BLOCK], tl.int32)
    chunk_first = tl.zeros([BLOCK], tl.int32)
    segment_document = tl.zeros([BLOCK], tl.int32)
    segment_first = tl.zeros([BLOCK], tl.int32)
    segment_chunk = tl.zeros([BLOCK], tl.int32)
    chunks = tl.zeros([1], tl.int32)
    segments = tl.zeros([1], tl.int32)
    lead = tl.program_id(0) == 0
    tl.store(first_segment + tl.arange(0, 1), segments, mask=lead)
    for tile in range(0, N, TILE):
        n = tile + tl.arange(0, TILE)
        real = n < N
        begin = tl.minimum(tl.maximum(tl.load(edges + n, mask=real, other=0), 0), T)
        end = tl.minimum(tl.maximum(tl.load(edges + n + 1, mask=real, other=0), 0), T)
        number = ((tl.maximum(end - begin, 0) + 63) // 64).to(tl.int32)
        long = (SIZE > 0) & (number >= 3 * SIZE)
        pieces = tl.where(long, (number + SIZE - 1) // tl.maximum(SIZE, 1), 1)
        chunk_end = chunks + tl.cumsum(tl.where(real, number, 0), 0)
        segment_end = segments + tl.cumsum(tl.where(real, pieces, 0), 0)
        tl.store(first_segment + n + 1, tl.minimum(segment_end, SEGMENTS), mask=real & lead)
        before = real[None, :] & (chunk_end[None, :] <= slot[:, None])
        chunk_document += tl.sum(before.to(tl.int32), 1)
        chunk_first = tl.maximum(chunk_first, tl.max(tl.where(before, chunk_end[None, :], 0), 1))
        before = real[None, :] & (segment_end[None, :] <= slot[:, None])
        segment_document += tl.sum(before.to(tl.int32), 1)
        segment_first = tl.maximum(segment_first, tl.max(tl.where(before, segment_end[None, :], 0), 1))
        segment_chunk = tl.maximum(segment_chunk, tl.max(tl.where(before, chunk_end[None, :], 0), 1))
        chunks += tl.sum(tl.where(real, number, 0), 0)
        segments += tl.sum(tl.where(real, pieces, 0), 0)
    real = slot < chunks
    document = tl.minimum(chunk_document, N - 1)
    begin = tl.minimum(tl.maximum(tl.load(edges + document), 0), T).to(tl.int64)
    end = tl.minimum(tl.maximum(tl.load(edges + document + 1), 0), T).to(tl.int64)
    start = begin + (slot - chunk_first).to(tl.int64) * 64
    tl.store(starts + slot, tl.where(real, start, 0), mask=slot < CHUNKS)
    tl.store(counts + slot, tl.where(real, tl.minimum(end - start, 64), 0).to(tl.int32), mask=slot < CHUNKS)
    real = slot < segments
    at = tl.where(real, segment_chunk + (slot - segment_first) * SIZE, chunks)
    tl.store(first + slot, tl.minimum(at, CHUNKS), mask=slot <= SEGMENTS)
    tl.store(owner + slot, tl.where(real, segment_document, -1), mask=slot < SEGMENTS)
