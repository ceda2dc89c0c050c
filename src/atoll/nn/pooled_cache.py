"""Layers' memory of sequences that do not advance together: slots and pages of a common pool, seen by the rows of one call.

A `Cache` may hold these in place of `DeltaState` and `LatentState`. Who owns the pool decides which row has which slot and pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DeltaRows:
    """One KDA layer: `state` [S,H,K,V] and `window` [S,W-1,3·H·K] of all slots, updated in place; `slots` int64 [B], whose turn it is.

    With `draft` a call may be taken back: it changes no slot and leaves in `inputs` what `DeltaAttention.replay` needs to go on from there
    with as many of its tokens as were right.
    """

    state: Tensor
    window: Tensor
    slots: Tensor
    draft: bool = False
    inputs: tuple[Tensor, Tensor, Tensor] | None = None  # of the call's tokens: q, k, v before the convolution, decay logits, beta logits


@dataclass
class LatentRows:
    """One MLA layer: `pages` [N,page,kv_lora+rope], page 0 nobody's; `table` int64 [B,P], each row's pages in order.

    lengths: int64 [B], tokens each row had before the call. counts: int64 [B], how many of the call's tokens are real, all by default;
    padding is written to page 0.
    """

    pages: Tensor
    table: Tensor
    lengths: Tensor
    counts: Tensor | None = None

    def append(self, rows: Tensor) -> Tensor:
        """Write `rows` [B,T,R] where they belong; the lengths with them, int64 [B], padding included."""
        size, steps = self.pages.shape[1], torch.arange(rows.shape[1], device=rows.device)
        position = self.lengths[:, None] + steps
        page = self.table.gather(1, (position // size).clamp(max=self.table.shape[1] - 1))
        place = page * size + position % size
        if self.counts is not None:
            place = place.masked_fill(steps >= self.counts[:, None], 0)
        self.pages.view(-1, self.pages.shape[2]).index_copy_(0, place.flatten(), rows.flatten(0, 1).to(self.pages.dtype))
        return self.lengths + rows.shape[1]
