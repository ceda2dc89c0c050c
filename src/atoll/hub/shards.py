"""Write tensors as safetensors files one at a time, so that no more than one of them need be in memory.

The bytes are those of the `safetensors` package (the format: an 8-byte length, a JSON header, the tensors), which takes all of a
file's tensors at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from atoll.hub.layout import Slot

Fetch = Callable[[Slot], Tensor]  # the tensor to write for a slot: in its stored type and shape, contiguous, on the CPU

# Names of the types in a header, in the order in which the package lays out a file: so every tensor is aligned to its own size.
KINDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8"}


def split(parts: Iterable[Slot], shard_bytes: float) -> Iterator[list[Slot]]:
    """Slots in order, in groups of at most `shard_bytes` (a larger tensor goes alone)."""
    shard: list[Slot] = []
    size = 0
    for slot in parts:
        if shard and size + slot.num_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(slot)
        size += slot.num_bytes
    yield shard


def write_shard(shard: list[Slot], path: Path, fetch: Fetch) -> None:
    """Write one file; `fetch` is called for one slot after another. Raises `OSError`."""
    order = list(KINDS)
    ordered = sorted(shard, key=lambda slot: (order.index(slot.dtype), slot.name))
    with path.open("wb") as file:
        file.write(_header(ordered))
        for slot in ordered:
            tensor = fetch(slot)
            if tensor.dtype != slot.dtype or tuple(tensor.shape) != slot.shape:
                raise ValueError(f"{slot.name}: {tensor.dtype} {tuple(tensor.shape)} for a slot of {slot.dtype} {slot.shape}")
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _header(ordered: list[Slot]) -> bytes:
    tree: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    at = 0
    for slot in ordered:
        tree[slot.name] = {"dtype": KINDS[slot.dtype], "shape": list(slot.shape), "data_offsets": [at, at + slot.num_bytes]}
        at += slot.num_bytes
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
