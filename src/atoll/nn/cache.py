"""What a decoder remembers between calls: KDA's state and convolution window, MLA's latents. Residuals need nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from atoll.nn.pooled_cache import DeltaRows, LatentRows


@dataclass
class DeltaState:
    """One KDA layer: `state` [B,H,K,V] float32; `window` [B,W-1,3·H·K], the last inputs of the convolutions, oldest first.

    Decoding on a GPU keeps the state V-major in memory (`value_major`) and updates it in place; the shape says nothing of it.
    `count`: of a call's tokens only the first so many are real, all by default; padding after them leaves no trace here.
    """

    state: Tensor | None = None
    window: Tensor | None = None
    count: int | None = field(default=None, kw_only=True)


def value_major(state: Tensor) -> Tensor:
    """The same [...,K,V] with K contiguous in memory; `state` itself when it is so already.

    A token's update needs sums over K for each value column. With K contiguous a column is one coalesced run, its sum stays within
    a warp, and a block of columns, one program's work, is one contiguous slab: measured by others at 1.1 to 1.6 times the speed.
    """
    turned = state.transpose(-1, -2)
    return state if turned.is_contiguous() else turned.contiguous().transpose(-1, -2)


class LatentState:
    """One MLA layer: normed latent and shared key of every token so far, [B,S,kv_lora+rope], in a buffer that doubles."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.length = 0

    def append(self, rows: Tensor) -> Tensor:
        """Add `rows` [B,T,R]; return all rows so far [B,length,R] as a view."""
        end = self.length + rows.shape[1]
        if self.buffer is None or end > self.buffer.shape[1]:
            size = max(64, 2 * end) if self.buffer is not None else max(64, end)
            grown = rows.new_empty(rows.shape[0], size, rows.shape[2])
            if self.buffer is not None:
                grown[:, : self.length] = self.buffer[:, : self.length]
            self.buffer = grown
        self.buffer[:, self.length : end] = rows
        self.length = end
        return self.buffer[:, :end]


LayerCache = DeltaState | LatentState | DeltaRows | LatentRows


@dataclass
class Cache:
    """States of all layers for `batch` sequences, one entry a layer. Pass it to `model(ids, cache=cache)`; it is updated in place.

    The sequences advance together, `length` tokens so far; or the layers hold `DeltaRows` and `LatentRows`, where each has its own length.
    """

    batch: int
    layers: list[LayerCache] = field(default_factory=list)
    length: int = 0

    def fork(self, copies: int) -> Cache:
        """A cache for `copies` continuations of each sequence, sharing nothing with this one. Raises ValueError for rows of a pool."""
        fresh = Cache(self.batch * copies, [], self.length)
        for layer in self.layers:
            fresh.layers.append(_fork_layer(layer, copies))
        return fresh

    def num_bytes(self) -> int:
        """Memory of all states, in bytes."""
        tensors = [t for layer in self.layers for t in vars(layer).values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)


def _fork_layer(layer: LayerCache, copies: int) -> LayerCache:
    def repeat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat_interleave(copies, 0)

    if isinstance(layer, DeltaState):
        return DeltaState(repeat(layer.state), repeat(layer.window))
    if not isinstance(layer, LatentState):
        raise ValueError("a cache of rows in a pool cannot be forked: its owner shares their pages")
    fresh = LatentState()
    fresh.buffer, fresh.length = repeat(layer.buffer), layer.length
    return fresh


def empty_cache(batch: int, is_kda: list[bool]) -> Cache:
    """A cache before the first token; one entry a layer."""
    if batch < 1:
        raise ValueError(f"batch = {batch}: at least one sequence is expected")
    return Cache(batch, [DeltaState() if kda else LatentState() for kda in is_kda])
