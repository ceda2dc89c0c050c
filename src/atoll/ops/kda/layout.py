"""Where the tokens of packed documents lie in chunks.

Chunks start at each document, and each document is filled up to whole chunks. Chunks are ordered by their position in the
document, then by document, longest first: so step s of the scan over chunks is one contiguous slice that holds the s-th chunk
of every document long enough to have one, and all documents are scanned at once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Index tables for `chunks` chunks of `size` tokens and `heads` heads; matrices are ordered [chunk, head]."""

    size: int
    heads: int
    chunks: int
    steps: list[tuple[int, int]]  # slice of chunks in each step of the scan
    rows: Tensor  # [chunks*heads*size] row of the [tokens*heads] inputs shown at each place
    places: Tensor  # [tokens*heads] place of each input row: the inverse
    padding: Tensor | None  # places that show no token of their own
    order: Tensor  # [N] documents, longest first
    rank: Tensor  # [N] inverse of order


def _place(starts: Tensor, lengths: Tensor, size: int, heads: int, total: int) -> Layout:
    device = starts.device
    counts = (lengths + size - 1) // size
    order = torch.sort(counts, descending=True, stable=True).indices
    sizes = counts[order]
    steps, first = [], 0
    for s in range(int(sizes[0]) if sizes.numel() else 0):
        width = int((sizes > s).sum())
        steps.append((first, first + width))
        first += width
    step = torch.cat([torch.full((b - a,), s, dtype=torch.int64) for s, (a, b) in enumerate(steps)] or [torch.zeros(0, dtype=torch.int64)])
    rank = torch.cat([torch.arange(b - a) for a, b in steps] or [torch.zeros(0, dtype=torch.int64)])
    document = order[rank]
    position = step[:, None] * size + torch.arange(size)
    # a place beyond the document shows its last token, so that nothing of another document, a NaN for one, comes in
    token = starts[document][:, None] + torch.minimum(position, lengths[document][:, None] - 1)
    rows = (token[:, None, :] * heads + torch.arange(heads)[:, None]).reshape(-1)
    real = (position < lengths[document][:, None])[:, None, :].expand(-1, heads, -1).reshape(-1)
    index = torch.arange(rows.numel(), device=device)
    places = torch.empty(total * heads, dtype=torch.int64)
    places[rows[real]] = index[real]
    padding = None if bool(real.all()) else index[~real]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return Layout(size, heads, first, steps, rows, places, padding, order, inverse)


@functools.lru_cache(maxsize=16)
def chunk_layout(boundaries: tuple[int, ...], size: int, heads: int, device: torch.device) -> Layout:
    """The layout of documents [boundaries[n], boundaries[n+1]); cached, because every layer of a model asks for the same one."""
    edges = torch.tensor(boundaries, dtype=torch.int64)
    layout = _place(edges[:-1], edges[1:] - edges[:-1], size, heads, boundaries[-1])
    return layout._replace(
        rows=layout.rows.to(device),
        places=layout.places.to(device),
        padding=None if layout.padding is None else layout.padding.to(device),
        order=layout.order.to(device),
        rank=layout.rank.to(device),
    )
