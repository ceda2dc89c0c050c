"""A row too long to hold: forward and backward a segment at a time, the same loss and gradients as the whole row's.

A first sweep, without gradients, goes through the row and keeps what enters each segment: KDA's states and convolution windows, some
kilobytes a head, and MLA's latents of all tokens. A second sweep goes back from the last segment: each is computed again from what
entered it, with gradients, and its backward pass is given, beside its own loss, the gradient of what it left to the segments after it;
what it finds for its own entering state is handed to the segment before. Latents gather their gradient in float32 from every later
segment of their document. Activations are those of one segment; what grows with the row is its latents, twice.

The experts a token took in the first sweep are forced in the second, and only the first counts for balancing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.data.loader import IGNORED
from atoll.nn.cache import DeltaState
from atoll.nn.carry import DeltaCarry, LatentCarry, SegmentCache, Share, share_of


@dataclass(frozen=True)
class Segments:
    """How the rows of a stage are cut: rows of `length` tokens, into segments of `size`; `offload`: what waits, waits in host memory."""

    length: int
    size: int
    offload: bool = False


@dataclass(frozen=True)
class Weights:
    """What the losses of a step are divided by: its targets, and its tokens for an auxiliary loss."""

    targets: int
    tokens: int


def cut(bounds: list[int], start: int, stop: int, segment: int) -> list[Share]:
    """The segments of the tokens `start` to `stop` of a batch whose documents lie at `bounds`; the last may be shorter."""
    return [share_of(bounds, at, min(at + segment, stop)) for at in range(start, stop, segment)]


def accumulate_row(model: Any, ids: Tensor, targets: Tensor, shares: Sequence[Share], weights: Weights, offload: bool = False) -> Tensor:
    """Add the gradients of one row's loss; returns its sum over targets, divided by `weights.targets`.

    Args:
        ids, targets: int64 [1,N] of the batch the row is in, on the model's device; a target stands where it is predicted.
        shares: the row's segments, in order. offload: keep what waits between the sweeps in host memory.
    """
    row = _Row(model, ids, targets, shares, weights, offload)
    for at in range(len(shares) - 1):
        row.look(at)
    loss = torch.zeros((), dtype=torch.float64, device=ids.device)
    for at in reversed(range(len(shares))):
        loss += row.learn(at)
    return loss


class _Row:
    """A row between its two sweeps."""

    def __init__(self, model: Any, ids: Tensor, targets: Tensor, shares: Sequence[Share], weights: Weights, offload: bool) -> None:
        self.model, self.ids, self.targets, self.shares, self.weights = model, ids, targets, shares, weights
        self.start, self.length = shares[0].start, shares[-1].stop - shares[0].start
        self.store = torch.device("cpu") if offload else ids.device
        c = model.config
        self.is_kda = [c.is_kda(i) for i in range(c.num_hidden_layers)]
        self.states: list[list[DeltaState]] = []  # entering each segment, a KDA layer each
        self.routing: list[list[Tensor] | None] = [None] * len(shares)
        self.latents: list[Tensor] = []  # an MLA layer each, [1, tokens of the row, R]
        self.latent_grads: list[Tensor] = []  # float32
        self.state_grads: list[DeltaState] = []  # of what the segment after entered with

    # ---------------------------------------------------------------- the first sweep

    @torch.no_grad()
    def look(self, at: int) -> None:
        """Go through segment `at` and keep what it leaves."""
        cache = self._entering(at)
        share = self.shares[at]
        out = self._run(share, cache, None, logits=False)
        self.routing[at] = [ids.to(torch.int32).to(self.store) for ids in out.routing]
        after = []
        for layer in cache.layers:
            if isinstance(layer, DeltaCarry):
                assert layer.next is not None
                after.append(DeltaState(self._keep(layer.next.state), self._keep(layer.next.window)))
        if not self.states:
            self.states.append([DeltaState() for _ in after])
        self.states.append(after)
        rows = [layer.rows for layer in cache.layers if isinstance(layer, LatentCarry)]
        if not self.latents:
            self.latents = [self._buffer(r, r.dtype) for r in rows if r is not None]
            self.latent_grads = [self._buffer(r, torch.promote_types(r.dtype, torch.float32)).zero_() for r in rows if r is not None]
        for buffer, r in zip(self.latents, rows, strict=True):
            assert r is not None
            buffer[:, self._place(share)] = r.to(self.store)

    def _buffer(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(1, self.length, rows.shape[2], dtype=dtype, device=self.store)

    def _keep(self, x: Tensor | None) -> Tensor:
        assert x is not None
        return x.to(self.store, copy=True)

    def _place(self, share: Share) -> slice:
        return slice(share.start - self.start, share.stop - self.start)

    # ---------------------------------------------------------------- the second

    def learn(self, at: int) -> Tensor:
        """Forward and backward of segment `at`; its part of the loss. Segments after it have been learnt."""
        share = self.shares[at]
        cache = self._entering(at)
        self._ask(cache)
        forced = None if (kept := self.routing[at]) is None else [ids.to(self.ids.device, torch.int64) for ids in kept]
        targets = self.targets[:, share.start : share.stop]
        count, tokens = int((targets != IGNORED).sum()), int((self._ids(share) != self.model.config.pad_token_id).sum())
        out = self._run(share, cache, forced, labels=targets, shifted=True)
        part = out.loss * (count / max(1, self.weights.targets))
        extra = 0.0 if out.balance_loss is None else out.balance_loss * (tokens / max(1, self.weights.tokens))
        left = [(part + extra, None), *self._left(at, cache)]
        torch.autograd.backward([t for t, _ in left], [g for _, g in left])  # pyright: ignore[reportArgumentType]
        self._hand_back(at, cache)
        return part.detach().double()

    def _left(self, at: int, cache: SegmentCache) -> list[tuple[Tensor, Tensor | None]]:
        """What the segment left to those after it, each with its gradient."""
        if at + 1 == len(self.shares):
            return []
        found: list[tuple[Tensor, Tensor | None]] = []
        grads, rows = iter(self.state_grads), iter(self.latent_grads)
        for layer in cache.layers:
            if isinstance(layer, LatentCarry):
                assert layer.rows is not None
                found.append((layer.rows, next(rows)[:, self._place(self.shares[at])].to(layer.rows)))
            elif self.shares[at + 1].before:
                assert layer.next is not None
                grad = next(grads)
                pairs = ((layer.next.state, grad.state), (layer.next.window, grad.window))
                found += [(t, g.to(t)) for t, g in pairs if t is not None and g is not None]
        return found

    def _hand_back(self, at: int, cache: SegmentCache) -> None:
        """Keep the gradients of what entered."""
        share, rows = self.shares[at], iter(self.latent_grads)
        place = slice(share.start - self.start - share.before, share.start - self.start)
        self.state_grads = []
        for layer in cache.layers:
            if isinstance(layer, DeltaCarry):
                self.state_grads.append(DeltaState(_grad(layer.state), _grad(layer.window)))
            elif self.latent_grads and layer.prefix is not None:
                assert layer.prefix.grad is not None
                next(rows)[:, place] += layer.prefix.grad.to(self.store)

    # ---------------------------------------------------------------- both

    def _entering(self, at: int) -> SegmentCache:
        """What enters segment `at`, on the model's device."""
        share, device = self.shares[at], self.ids.device
        goes_on = at > 0 and share.before > 0
        states = iter(self.states[at] if goes_on else [])
        latents = iter(self.latents)
        place = slice(share.start - self.start - share.before, share.start - self.start)
        layers: list[DeltaCarry | LatentCarry] = []
        for kda in self.is_kda:
            if not goes_on:
                layers.append(DeltaCarry() if kda else LatentCarry())
            elif kda:
                state = next(states)
                layers.append(DeltaCarry(_to(state.state, device), _to(state.window, device)))
            else:
                layers.append(LatentCarry(next(latents)[:, place].to(device)))
        return SegmentCache(layers)

    def _ask(self, cache: SegmentCache) -> None:
        """Make what enters a leaf that gathers a gradient."""
        for layer in cache.layers:
            for name in ("state", "window", "prefix"):
                if isinstance(value := getattr(layer, name, None), Tensor):
                    setattr(layer, name, value.detach().requires_grad_())

    def _ids(self, share: Share) -> Tensor:
        return self.ids[:, share.start : share.stop]

    def _run(self, share: Share, cache: SegmentCache, routing: list[Tensor] | None, **options: Any) -> Any:
        bounds = torch.tensor(share.bounds, device=self.ids.device)
        return self.model(self._ids(share), cu_seqlens=bounds, cache=cache, routing=routing, **options)


def accumulate_rows(model: Any, ids: Tensor, labels: Tensor, bounds: Tensor, how: Segments, weights: Weights) -> Tensor:
    """`accumulate_row` over the rows of a batch; labels int64 [1,N], unshifted, -100 where none is counted; bounds int64 [S+1]."""
    from atoll.model import next_tokens

    targets, edges = next_tokens(labels, bounds), bounds.tolist()
    loss = torch.zeros((), dtype=torch.float64, device=ids.device)
    for start in range(0, edges[-1], how.length):
        loss += accumulate_row(model, ids, targets, cut(edges, start, start + how.length, how.size), weights, how.offload)
    return loss


def _grad(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.grad


def _to(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device)
