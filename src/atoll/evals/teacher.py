"""Teacher forcing at any length: rows are read once, in segments carried by the cache, and logits exist only where they are wanted."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

READ = 8192  # tokens of all rows read at once where no logits are wanted
LOGITS = 1 << 26  # most logits at once, all rows together

Measure = Callable[[Tensor, Tensor], Tensor]  # logits [N,V] before each wanted token, those tokens int64 [N] → a number each, [N]


def hits(logits: Tensor, targets: Tensor) -> Tensor:
    """Whether the likeliest token is the one that follows."""
    return logits.argmax(-1) == targets


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """-ln p of the token that follows."""
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


@torch.inference_mode()
def forced(
    model: Any,
    rows: Sequence[np.ndarray],
    wanted: Sequence[np.ndarray],
    measure: Measure = hits,
    *,
    pad: int = 0,
    batch_tokens: int = 16384,
    read: int = READ,
    progress: Callable[[float], None] | None = None,
) -> list[np.ndarray]:
    """`measure` of every wanted token of every row, given all before it: a list of arrays [wanted of the row], in the rows' order.

    rows: ids int64 [T]; wanted: bool [T], false at 0, which nothing precedes. Rows of near lengths go together, `batch_tokens` at
    once with their padding at the end; a longer row goes alone. Memory: the cache of one batch, `read` tokens' activations, and at
    most `LOGITS` logits. `progress` is called with the share of tokens done. The model is left in the mode it was in.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    found: list[np.ndarray] = [np.zeros(0)] * len(rows)
    total, done = max(1, sum(map(len, rows))), 0
    was_training = model.training
    model.eval()
    try:
        for batch in _batches([len(r) for r in rows], batch_tokens):
            width = max(len(rows[i]) for i in batch)
            ids, mask = torch.full((len(batch), width), pad), torch.zeros(len(batch), width, dtype=torch.bool)
            for row, i in enumerate(batch):
                ids[row, : len(rows[i])] = torch.from_numpy(np.asarray(rows[i], dtype=np.int64))
                mask[row, : len(rows[i])] = torch.from_numpy(wanted[i])
            for i, values in zip(batch, _read(model, ids.to(device), mask.to(device), measure, read), strict=True):
                found[i] = values.numpy(force=True)
                done += len(rows[i])
            if progress is not None:
                progress(done / total)
    finally:
        model.train(was_training)
    return found


def _batches(sizes: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices in groups of near sizes, longest first, at most `batch_tokens` of the longest times their number."""
    group: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if group and sizes[group[0]] * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _read(model: Any, ids: Tensor, wanted: Tensor, measure: Measure, read: int) -> list[Tensor]:
    """`measure` at the wanted tokens of each row of `ids` [B,T]."""
    rows, length = ids.shape
    before = torch.cat([wanted[:, 1:], torch.zeros_like(wanted[:, :1])], 1)  # at t: whether the token t+1 is wanted
    targets = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    asked = before.any(0).nonzero().flatten().tolist()
    cache, values = model.new_cache(rows), torch.zeros(rows, length, dtype=torch.float64, device=ids.device)
    long = max(1, read // rows)
    # How many ids there are is known from the first logits; until then few tokens are asked for.
    short, at = 16, 0
    while asked and at <= asked[-1]:
        quiet = asked[bisect.bisect_left(asked, at)] - at
        size = min(quiet, long) if quiet else min(short, asked[-1] + 1 - at)
        out = model(ids[:, at : at + size], cache=cache, logits=not quiet)
        if not quiet:
            here = before[:, at : at + size]
            values[:, at : at + size][here] = measure(out.logits[here], targets[:, at : at + size][here]).double()
            short = max(1, min(long, LOGITS // (rows * out.logits.shape[-1])))
        at += size
    return [v[m] for v, m in zip(values, before, strict=True)]
