"""The model's calls: a chunk of one sequence, or the next tokens of many, on the memory of a pool.

On a CPU a chunk is always 64 rows that begin on the grid of 64 counted from the document's start, the last one padded: whatever was
read before it came from, a token is computed in a call of the same shape, at the same row, beside the same tokens, and so to the same
bits. Matrix products of a CPU give other bits for other numbers of rows, and the experts' tiles for other neighbours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.infer.draw import wide_logits
from atoll.infer.images import embed
from atoll.infer.pool import PAGE, Pool
from atoll.infer.sequence import Sequence
from atoll.nn.cache import Cache, DeltaState, LayerCache
from atoll.nn.pooled_cache import DeltaRows, LatentRows


class Result(NamedTuple):
    """Logits [B, n, V] on the CPU in at least float32, their log-softmax, and the experts of all tokens fed, int [layers, B, T, k]."""

    logits: Tensor
    logprobs: Tensor
    routing: Tensor | None


class Caller:
    """Calls `model` on sequences whose memory is in `pool`.

    Args:
        chunk: tokens of a prompt in one call at most, where calls may differ in length: not on a CPU.
    """

    def __init__(self, model: Any, pool: Pool, chunk: int) -> None:
        self.model, self.pool = model, pool
        self.width = PAGE if pool.device.type == "cpu" else chunk

    def chunk_end(self, s: Sequence) -> int:
        """How far the next chunk of `s` reaches: to the chunk's width, the next place where a prefix is kept, or the last token."""
        stops = [mark for mark in s.marks if mark > s.fed]
        return min(s.fed + self.width, len(s.tokens), *stops)

    def read(self, s: Sequence, end: int, every: bool) -> Result:
        """Read the tokens of `s` up to `end`. Logits after `every` one of them, or else after the sequence's last alone."""
        assert s.slot is not None
        at, pool = s.fed, self.pool
        count = end - at
        ids = torch.full((1, -(-count // PAGE) * PAGE), self.model.config.pad_token_id)
        ids[0, :count] = torch.tensor(s.tokens[at:end])
        wanted = torch.arange(count) if every else torch.arange(count - 1, count) if end == len(s.tokens) else None
        slot, rows = slice(s.slot, s.slot + 1), self._latents([s], [at], torch.tensor([count], device=pool.device))
        memory = zip(pool.states, pool.windows, strict=True)
        states = [DeltaState(state[slot], window[slot], count=count) if at else DeltaState(count=count) for state, window in memory]
        cache = Cache(1, self._in_order(states, rows))
        out = self._call(ids, cache, False if wanted is None else wanted.to(pool.device), at, s)
        for i, state in enumerate(states):
            assert state.state is not None
            assert state.window is not None
            pool.states[i, slot], pool.windows[i, slot] = state.state, state.window
        return out

    def decode(self, rows: list[Sequence], drafts: list[list[int]]) -> tuple[Result, Cache]:
        """Feed the last token of each of `rows`, then its draft. With drafts, `Model.replay` must say which of them count."""
        counts = [1 + len(d) for d in drafts]
        ids = torch.full((len(rows), max(counts)), self.model.config.pad_token_id)
        for i, (s, d) in enumerate(zip(rows, drafts, strict=True)):
            ids[i, : counts[i]] = torch.tensor([s.tokens[-1], *d])
        device, pool = self.pool.device, self.pool
        slots, draft = torch.tensor([s.slot for s in rows], device=device), max(counts) > 1
        latents = self._latents(rows, [s.fed for s in rows], torch.tensor(counts, device=device) if draft else None)
        deltas = [DeltaRows(state, window, slots, draft) for state, window in zip(pool.states, pool.windows, strict=True)]
        cache = Cache(len(rows), self._in_order(deltas, latents))
        return self._call(ids, cache, True), cache

    def _latents(self, rows: list[Sequence], lengths: list[int], counts: Tensor | None) -> list[LatentRows]:
        pool = self.pool
        slots = torch.tensor([s.slot for s in rows], device=pool.device)
        table = pool.table.index_select(0, slots)[:, : max(len(s.pages) for s in rows)]
        before = torch.tensor(lengths, device=pool.device)
        return [LatentRows(pages, table, before, counts) for pages in pool.latents]

    def _in_order(self, deltas: Any, latents: Any) -> list[LayerCache]:
        delta, latent = iter(deltas), iter(latents)
        return [next(delta if kda else latent) for kda in self.pool.is_kda]

    def _call(self, ids: Tensor, cache: Cache, logits: bool | Tensor, at: int = 0, s: Sequence | None = None) -> Result:
        ids, embeds = ids.to(self.pool.device), None
        if s is not None and s.images:
            embeds = embed(self.model, ids, at, s.images)
        elif self.model.config.vision is not None:  # what looks like a placeholder here was sampled: text
            embeds = self.model.language_model.model.embed_tokens(ids)
        out = self.model(ids, cache=cache, logits=logits, embeds=embeds)
        routing = torch.stack(out.routing).view(len(out.routing), *ids.shape, -1).cpu() if out.routing else None
        if out.logits is None:
            return Result(torch.empty(0), torch.empty(0), routing)
        scores = wide_logits(out.logits)
        return Result(scores, scores.log_softmax(-1), routing)
