"""Where documents lie in chunks of 64 tokens, and chunks in the segments that the Triton scans run side by side.

Every document starts a chunk and a segment. A segment is a document, or a piece of a long one where heads are too few to fill a card.
The rule knows T, N and H only, so that it needs nothing from the device:

    chunks = T // 64 + N                                       the most there can be
    size   = chunks * H / 132, up to a multiple of 16          as many segments as programs fill a card
    cut    = N * H < 528 and 3 * size <= chunks                else no document is cut at all

and a document of at least 3 * size chunks is cut every `size` chunks from its start. Bits of outputs, states and gradients depend on
where a document is cut, on nothing else about its neighbours.

The tables are built on the host (and cached) when the boundaries are known there, else by one kernel on the device, with the most
slots there can be: programs of empty slots end at once.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.ops.dispatch import launch

TOKENS = 64  # tokens a chunk
PROGRAMS = 132  # programs that fill a card
SHORTEST = 16  # chunks of the shortest segment
CROWDED = 4 * PROGRAMS  # documents * heads that fill a card uncut, and for which the states of pieces would take too much memory


class Table(NamedTuple):
    """Slots for chunks and segments. Chunks and segments that there are stand in front, in order.

    starts, counts: [chunks] first token and number of tokens, 0 in an empty slot. first: [segments+1] first chunk of each segment.
    owner: [segments] the document of each, -1 in an empty slot. first_segment: [documents+1].
    padded: whether there may be empty slots. cut: whether some document may be cut.
    """

    starts: Tensor
    counts: Tensor
    first: Tensor
    owner: Tensor
    first_segment: Tensor
    chunks: int
    segments: int
    documents: int
    padded: bool
    cut: bool


def segment_size(tokens: int, documents: int, heads: int) -> int:
    """Chunks of a piece of a long document; 0: no document is cut."""
    chunks = tokens // TOKENS + documents
    size = max(SHORTEST, -(-chunks * heads // PROGRAMS // SHORTEST) * SHORTEST)
    return size if documents * heads < CROWDED and 3 * size <= chunks else 0


def _pieces(first: list[int], size: int) -> tuple[list[int], list[int]]:
    """First chunks of all segments, and each document's first segment, from the documents' first chunks."""
    if not size or all(b - a < 3 * size for a, b in itertools.pairwise(first)):
        return first, list(range(len(first)))
    cuts, first_segment = [0], [0]
    for a, b in itertools.pairwise(first):
        cuts += [*(range(a + size, b, size) if b - a >= 3 * size else ()), b]
        first_segment.append(len(cuts) - 1)
    return cuts, first_segment


@functools.lru_cache(maxsize=16)
def host_table(boundaries: tuple[int, ...], device: torch.device, size: int) -> Table:
    """The table of documents [boundaries[n], boundaries[n+1]) cut into `size` chunks (0: uncut), without empty slots.

    Cached, because every layer of a model asks for the same one.
    """
    edges = torch.tensor(boundaries, dtype=torch.int64)
    lengths = edges[1:] - edges[:-1]
    numbers = (lengths + TOKENS - 1) // TOKENS
    first = torch.cat((torch.zeros(1, dtype=torch.int64), numbers.cumsum(0)))
    document = torch.repeat_interleave(torch.arange(numbers.numel()), numbers)
    position = (torch.arange(document.numel()) - first[document]) * TOKENS
    counts = (lengths[document] - position).clamp_max(TOKENS)
    cuts, first_segment = _pieces(first.tolist(), size)
    owner = torch.repeat_interleave(torch.arange(numbers.numel()), torch.tensor(first_segment).diff())
    int32 = functools.partial(torch.as_tensor, dtype=torch.int32, device=device)
    return Table(
        (edges[:-1][document] + position).to(device),
        int32(counts),
        int32(cuts),
        int32(owner),
        int32(first_segment),
        document.numel(),
        len(cuts) - 1,
        numbers.numel(),
        padded=False,
        cut=len(cuts) - 1 > numbers.numel(),
    )


def device_table(edges: Tensor, tokens: int, size: int) -> Table:
    """The same from boundaries `edges` int [N+1] on the device, with no wait for it: one launch, fit for a CUDA graph.

    Boundaries have to rise from 0 to `tokens`. Nothing checks that; others are clamped to it, so that no memory is touched that is not
    the call's, and what no document covers stays unwritten.
    """
    from atoll.ops.kda.triton_table import table_kernel

    documents = edges.numel() - 1
    if documents < 1:
        raise ValueError(f"kda: cu_seqlens has {edges.numel()} entries on {edges.device}; a document needs two")
    chunks = tokens // TOKENS + documents
    segments = documents + (chunks // size if size else 0)
    int32 = functools.partial(edges.new_empty, dtype=torch.int32)
    table = Table(
        edges.new_empty(chunks, dtype=torch.int64),
        int32(chunks),
        int32(segments + 1),
        int32(segments),
        int32(documents + 1),
        chunks,
        segments,
        documents,
        padded=True,
        cut=size > 0,
    )
    block = 64
    launch(
        table_kernel, (-(-max(chunks, segments + 1) // block),), edges,
        edges.contiguous(), *table[:5], tokens, documents, chunks, segments, size, BLOCK=block, TILE=64, num_warps=4,
    )  # fmt: skip
    return table


_captured: dict[tuple[int, ...], Table] = {}


def make_table(edges: Tensor | None, batch: int, length: int, heads: int, device: torch.device, size: int | None = None) -> Table:
    """The table of a call: `batch` rows of `length` tokens, or one row of the documents at `edges`; `size` overrides the rule.

    Raises:
        ValueError: `edges` on the CPU do not rise from 0 to the row's length.
    """
    documents = batch if edges is None else edges.numel() - 1
    size = segment_size(batch * length, documents, heads) if size is None else size
    if edges is not None and not known(edges):
        return device_table(edges, batch * length, size)
    boundaries = tuple(range(0, batch * length + 1, length) if length else [0] * (batch + 1))
    if edges is not None:
        boundaries = tuple(checked(edges, batch, length))
    table = host_table(boundaries, device, size)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[(*boundaries, size, device.index or 0)] = table  # a graph holds addresses: its tables must outlive the cache
    return table


def known(edges: Tensor) -> bool:
    """Whether reading the boundaries costs no wait for a device."""
    return edges.device.type == "cpu"


def checked(edges: Tensor, batch: int, length: int) -> list[int]:
    """Document boundaries as integers.

    Raises:
        ValueError: they do not rise from 0 to the length of the one row.
    """
    if batch != 1:
        raise ValueError(f"kda: cu_seqlens needs a batch of 1, got B = {batch}; flatten the documents into one row")
    found: list[int] = edges.tolist()
    if not found or found[0] != 0 or found[-1] != length or any(a > b for a, b in itertools.pairwise(found)):
        raise ValueError(f"kda: cu_seqlens must rise from 0 to T = {length}, got {found[:4]} … {found[-2:]}")
    return found
