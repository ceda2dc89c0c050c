"""What a row hands from one segment to the next when it is computed a segment at a time, with gradients.

A `Cache` is moved on in place and has no gradients. Here what enters a segment is never changed, so that a layer may be computed again
from it, and what leaves it stands beside: tensors of the segment's own graph, through which the next segment's gradients come back.

The carries are no dataclasses: FSDP gives its modules copies of those that hold tensors with gradients, and what leaves would stay there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.nn.cache import Cache, DeltaState


@dataclass(frozen=True)
class Share:
    """Tokens `start` … `stop` - 1 of a row of documents: their segment bounds, from 0 on, and the first document's tokens `before`."""

    start: int
    stop: int
    bounds: list[int]
    before: int

    @property
    def first(self) -> int:
        """Tokens of the first document here."""
        return self.bounds[1]


def share_of(bounds: list[int], start: int, stop: int) -> Share:
    """Tokens `start` to `stop` of a row whose documents lie at `bounds`."""
    inside = {b - start for b in bounds if start < b < stop}
    return Share(start, stop, [0, *sorted(inside), stop - start], start - max(b for b in bounds if b <= start))


class DeltaCarry:
    """One KDA layer. Entering: `state` [1,H,K,V] and `window` [1,W-1,3·H·K], None at the start of a document; leaving: `next`."""

    def __init__(self, state: Tensor | None = None, window: Tensor | None = None) -> None:
        self.state, self.window = state, window
        self.next: DeltaState | None = None

    def enter(self, documents: int) -> DeltaState:
        """A state for each of the segment's documents: the first goes on, the others begin."""
        return DeltaState(_others_zero(self.state, documents), _others_zero(self.window, documents))

    def leave(self, left: DeltaState) -> None:
        """Keep what the last document left."""
        assert left.state is not None
        assert left.window is not None
        self.next = DeltaState(left.state[-1:], left.window[-1:])


def _others_zero(first: Tensor | None, documents: int) -> Tensor | None:
    if first is None or documents == 1:
        return first
    return torch.cat([first, first.new_zeros(documents - 1, *first.shape[1:])])


class LatentCarry:
    """One MLA layer. Entering: `prefix` [1,S,kv_lora+rope], latents of the first document so far; leaving: `rows`, the segment's."""

    def __init__(self, prefix: Tensor | None = None) -> None:
        self.prefix = prefix
        self.rows: Tensor | None = None


class SegmentCache(Cache):
    """What enters a segment, an entry a layer; after `model(ids, cu_seqlens=..., cache=...)` also what leaves it. One row."""

    layers: list[DeltaCarry | LatentCarry]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, layers: list[DeltaCarry | LatentCarry]) -> None:
        super().__init__(1, layers)  # pyright: ignore[reportArgumentType]
