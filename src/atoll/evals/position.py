"""Bits per byte by position: whether what stands far back is used shows as a loss that still falls with the context before a token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from atoll.data.documents import TokenSet
from atoll.evals.bpb import some, windows
from atoll.evals.teacher import forced, nats

FIRST = 64  # tokens of the first bucket; each next one ends at twice as many


def by_position(
    model: Any, token_set: TokenSet, length: int, *, overlap: int | None = None, limit_tokens: int | None = None, batch_tokens: int = 16384
) -> list[dict[str, float]]:
    """The sum that `bits_per_byte` makes, over the same windows, split by how many tokens stand before each in its window.

    [{"first", "last", "tokens", "bytes", "nats", "bits_per_byte"}], last not included; buckets 0 to 64, to 128, … `length`; those
    without a token are left out. With `limit_tokens`, the windows that `bits_per_byte` would choose.
    """
    chosen = windows(token_set, length, length // 4 if overlap is None else overlap)
    if limit_tokens is not None:
        chosen = some(chosen, limit_tokens)
    rows, wanted = [], []
    for first, last, counted in chosen.tolist():
        mask = np.arange(first, last) >= counted
        rows.append(token_set.tokens[first:last].astype(np.int64))
        wanted.append(mask if token_set.trained is None else mask & token_set.trained[first:last])
    losses = forced(model, rows, wanted, nats, pad=token_set.pad, batch_tokens=batch_tokens)
    edges = [0, FIRST]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    sums = np.zeros((len(edges) - 1, 3))
    for ids, mask, loss in zip(rows, wanted, losses, strict=True):
        at = np.flatnonzero(mask)
        bucket = np.searchsorted(edges, at, side="right") - 1
        for column, what in enumerate((np.ones(len(at)), token_set.token_bytes[ids[at]], loss)):
            np.add.at(sums[:, column], bucket, what)
    return [
        {"first": a, "last": min(b, length), "tokens": int(n), "bytes": int(size), "nats": total}
        | {"bits_per_byte": total / math.log(2) / max(1, size)}
        for a, b, (n, size, total) in zip(edges, edges[1:], sums.tolist(), strict=False)
        if n
    ]


def render(rows: list[dict[str, float]]) -> str:
    """The buckets as an aligned table."""
    head = f"{'tokens before':>17}  {'tokens':>10}  {'bits per byte':>13}"
    body = [f"{r['first']:>8,} –{r['last']:>7,}  {r['tokens']:>10,}  {r['bits_per_byte']:>13.4f}" for r in rows]
    return "\n".join([head, *body])
