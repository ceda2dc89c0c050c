"""The memory of all sequences: pages of MLA latents, slots of KDA states, snapshots of both; counted in bytes against one limit.

A page is 64 neighbouring tokens of one sequence in every MLA layer. Full pages are never written again, so sequences and cached
prefixes share them, counted by references. A slot is one sequence's KDA state and convolution window in every KDA layer: its size
does not depend on the sequence's length. What a running sequence may still need is promised to it when it starts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.config import ModelConfig

PAGE = 64


class Snapshot(NamedTuple):
    """KDA layers' states [layers, H, K, V] and windows [layers, W-1, C] after some token."""

    states: Tensor
    windows: Tensor

    def to(self, device: torch.device | str) -> Snapshot:
        return Snapshot(self.states.to(device), self.windows.to(device))

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self)


class Pool:
    """Memory for sequences of a model with config `c`.

    Args:
        slots: sequences at once. limit: bytes of pages in use, pages promised, and snapshots together; the slots come on top.
    """

    def __init__(self, c: ModelConfig, slots: int, limit: int, *, dtype: torch.dtype, device: torch.device) -> None:
        kda = [c.is_kda(i) for i in range(c.num_hidden_layers)]
        self.is_kda, self.limit, self.device = kda, limit, device
        heads, width, rank = c.kda_num_heads, c.kda_head_dim, c.kv_lora_rank + c.qk_rope_head_dim
        exact = torch.promote_types(dtype, torch.float32)
        history = c.short_conv_kernel_size - 1
        self.states = torch.zeros(sum(kda), slots, heads, width, width, dtype=exact, device=device)
        self.windows = torch.zeros(sum(kda), slots, history, 3 * heads * width, dtype=dtype, device=device)
        self.latents = torch.zeros(len(kda) - sum(kda), 1, PAGE, rank, dtype=dtype, device=device)  # page 0 is nobody's
        self.table = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.page_bytes = self.latents.numel() * self.latents.element_size()
        self.snapshot_bytes = sum(t.numel() * t.element_size() for t in (self.states, self.windows)) // slots
        self.free_slots = list(range(slots - 1, -1, -1))
        self.snapshots = self.promised = 0
        self._free: list[int] = []
        self._references = [1]

    # -------------------------------------------------- how much

    @property
    def pages_used(self) -> int:
        return len(self._references) - 1 - len(self._free)

    def bytes_used(self) -> int:
        return (self.pages_used + self.promised) * self.page_bytes + self.snapshots * self.snapshot_bytes

    def room(self) -> int:
        """Bytes that are neither used nor promised."""
        return self.limit - self.bytes_used()

    # -------------------------------------------------- pages

    def take(self, count: int, promised: bool) -> list[int]:
        """`count` pages of one reference each, out of what was promised or out of the room there is."""
        if promised:
            self.promised -= count
        while len(self._free) < count:
            self._grow()
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def _grow(self) -> None:
        """Twice the pages: memory follows what is used, up to the limit."""
        have = self.latents.shape[1]
        self.latents = torch.cat([self.latents, torch.zeros_like(self.latents)], 1)
        self._references += [0] * have
        self._free = [*range(2 * have - 1, have - 1, -1), *self._free]

    def share(self, pages: list[int]) -> None:
        for page in pages:
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            assert self._references[page] >= 0
            if not self._references[page]:
                self._free.append(page)

    def alone(self, pages: list[int]) -> bool:
        """Whether nobody else refers to any of `pages`."""
        return all(self._references[page] == 1 for page in pages)

    def read(self, pages: list[int]) -> Tensor:
        """What `pages` hold, in host memory: [layers, n, PAGE, R]."""
        return self.latents.index_select(1, torch.tensor(pages, device=self.device)).cpu()

    def write(self, pages: list[int], latents: Tensor) -> None:
        self.latents.index_copy_(1, torch.tensor(pages, device=self.device), latents.to(self.device))

    def enter(self, slot: int, first: int, pages: list[int]) -> None:
        """Say in the slot's table that its pages from number `first` on are `pages`."""
        while self.table.shape[1] < first + len(pages):
            self.table = torch.cat([self.table, torch.zeros_like(self.table)], 1)
        if pages:
            self.table[slot, first : first + len(pages)] = torch.tensor(pages, device=self.device)

    # -------------------------------------------------- slots and snapshots

    def snapshot(self, slot: int) -> Snapshot:
        """A copy of the slot's state; counted until `forget`."""
        self.snapshots += 1
        return Snapshot(self.states[:, slot].clone(), self.windows[:, slot].clone())

    def adopt(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot brought back to the device; counted until `forget`."""
        self.snapshots += 1
        return snapshot.to(self.device)

    def forget(self) -> None:
        """One snapshot fewer."""
        self.snapshots -= 1

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Copy a snapshot into a slot; the snapshot stays as it is."""
        self.states[:, slot] = snapshot.states.to(self.device)
        self.windows[:, slot] = snapshot.windows.to(self.device)
