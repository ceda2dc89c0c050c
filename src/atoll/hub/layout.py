"""Where each of a model's tensors stands in a hub folder: names, stored shapes, stored types.

Inside, the routed experts of a layer are stacked and `A_log` is a plain vector; in a folder every expert has tensors of its own
and `A_log` may be padded with zeros or shaped [1, 1, H, 1]. `slots` says both sides at once, so that loading and saving agree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from atoll.config import ModelConfig, UserError
from atoll.hub.config_json import is_kimi_linear
from atoll.hub.packed import PACKED, SCALE, Packed
from atoll.ops.microscaling import scale_shape

PREFIX = "language_model."
EXPERTS = re.compile(r"(.*\.block_sparse_moe\.experts)\.(w[123])$")
FLOAT32 = re.compile(r"\.(A_log|dt_bias|[qkv]_conv1d\.weight|o_norm\.weight|gate\.e_score_correction_bias)$")


@dataclass(frozen=True)
class Slot:
    """One stored tensor: its name and shape in the folder, and the part of the model's tensor that it holds."""

    name: str  # name in the folder
    shape: tuple[int, ...]  # shape it is written in
    dtype: torch.dtype  # type it is written in
    tensor: Tensor  # the model's tensor, or the slice of it that this name holds; shares memory
    inner: str  # the model's own name, for messages
    packed: Packed | None = None  # set where the stored tensor is one of the two of a quantised matrix, `tensor` its place there

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def config_of(model: nn.Module) -> ModelConfig:
    """The config that `model` was built from."""
    return cast(ModelConfig, model.config)


def slots(model: nn.Module, dtype: torch.dtype | None = None, packed: bool | None = None) -> list[Slot]:
    """Every stored tensor of `model`, in the model's order.

    `dtype` is the type of most tensors (default: the type of the embedding); the tensors that the release keeps in float32
    (decay, convolutions, gated norm, router bias) never fall below float32. `packed` says whether the routed experts stand in the
    folder in MXFP4; by default they do where the model computes in it.
    """
    config = config_of(model)
    flat = is_kimi_linear(config)
    buffers = dict(model.named_buffers())
    bias = {name: b for name, b in buffers.items() if name.endswith(".e_score_correction_bias")}  # the one buffer stored as itself
    named = {**dict(model.named_parameters()), **bias}
    main = dtype or named[f"{PREFIX}model.embed_tokens.weight"].dtype
    out: list[Slot] = []
    for inner, tensor in named.items():
        name = inner.removeprefix(PREFIX) if flat else inner
        kind = torch.promote_types(main, torch.float32) if FLOAT32.search(inner) else main
        if found := EXPERTS.match(name):
            scales = buffers.get(f"{inner}_scale")
            as_packed = scales is not None if packed is None else packed
            for e, part in enumerate(tensor.detach().unbind(0)):
                place = f"{found[1]}.{e}.{found[2]}"
                if as_packed:
                    out += _packed(place, part, None if scales is None else scales[e], inner)
                else:
                    out.append(Slot(f"{place}.weight", tuple(part.shape), kind, part, inner))
        else:
            out.append(Slot(name, _stored_shape(inner, tensor, config, flat), kind, tensor.detach(), inner))
    return out


def _packed(name: str, weight: Tensor, scale: Tensor | None, inner: str) -> list[Slot]:
    """The two tensors of a quantised matrix, the scale first: it is needed to read the other, also where the model keeps none."""
    both = Packed(weight, weight.new_empty(scale_shape(weight), dtype=torch.uint8) if scale is None else scale)
    return [Slot(name + end, tuple(both.places[end].shape), torch.uint8, both.places[end], inner, both) for end in (SCALE, PACKED)]


def _stored_shape(inner: str, tensor: Tensor, config: ModelConfig, flat: bool) -> tuple[int, ...]:
    if inner.endswith(".A_log"):
        if flat:
            return (1, 1, tensor.numel(), 1)
        return (config.a_log_storage or tensor.numel(),)
    if inner.endswith(".dt_bias"):
        return (tensor.numel(),)
    return tuple(tensor.shape)


def readable_shapes(slot: Slot) -> list[tuple[int, ...]]:
    """Shapes in which `slot` may stand in a folder: `A_log` has several, every other tensor one."""
    if not slot.name.endswith(".A_log"):
        return [slot.shape]
    heads = slot.tensor.numel()
    return [slot.shape, (heads,), (1, 1, heads, 1)]


def _ending(slot: Slot) -> str:
    return slot.name[slot.name.rindex(".") :]


def pack(slot: Slot) -> Tensor:
    """The tensor to write: on the CPU, in its stored type and shape, contiguous, `A_log` padded with zeros."""
    if slot.packed is not None:
        try:
            return slot.packed.take(_ending(slot), slot.tensor)
        except ValueError as error:
            raise UserError(f"tensor {slot.name}: {error}; nothing was written") from None
    value = slot.tensor.to("cpu", slot.dtype)
    padding = torch.Size(slot.shape).numel() - value.numel()
    if padding:
        value = torch.cat([value.flatten(), value.new_zeros(padding)])
    return value.reshape(slot.shape).contiguous().clone()


def unpack(slot: Slot, stored: Tensor) -> str | None:
    """Copy `stored` (a tensor of one of `readable_shapes`) into the model. Returns what is wrong with it, or None."""
    if slot.packed is not None:
        return slot.packed.put(_ending(slot), slot.tensor, stored)
    count = slot.tensor.numel()
    flat = stored.flatten()
    if flat.numel() > count and bool(flat[count:].any()):
        return f"entries past the {count} heads are not zero, so they are not padding"
    if not bool(torch.isfinite(flat.sum(dtype=torch.float64))):
        return "holds NaN or infinity"
    slot.tensor.copy_(flat[:count].reshape(slot.tensor.shape))
    return None
