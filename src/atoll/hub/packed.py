"""Routed experts in MXFP4, in and out: what `config.json` says of them, and their tensors.

In a folder an expert's matrix is two tensors, `weight_packed` uint8 [out, in/2] and `weight_scale` uint8 [out, in/32], in place of
`weight`. Which form a folder has is read off its tensors: the release's own `ignore` list leaves out matrices that are stored plain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from atoll.config import ModelConfig, UserError
from atoll.ops import mxfp4_dequantize, mxfp4_quantize
from atoll.ops.microscaling import NAN_SCALE

KEY = "quantization_config"
ACTIVATIONS = "expert_activations"  # ours, "mxfp8": what the released weight-only content has no word for; engines pass over it
FORMAT = "mxfp4-pack-quantized"
PACKED, SCALE = ".weight_packed", ".weight_scale"
EXPERT = ".block_sparse_moe.experts."


# ---------------------------------------------------------------- config.json


def to_json(m: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json` that say how the experts are quantised, with the released content; none when they are not."""
    if m.quantization == "none":
        return {}
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "zp_dtype": None,
        "actorder": None,
        "block_structure": None,
    }
    group = {"targets": ["Linear"], "format": FORMAT, "weights": weights, "input_activations": None, "output_activations": None}
    parts = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head", "vision_tower", "mm_projector")
    config = {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{part}.*" for part in parts],
    }
    return {KEY: config, **({ACTIVATIONS: "mxfp8"} if m.quantization == "mxfp4+mxfp8" else {})}


def from_json(text: dict[str, Any], name: str) -> str:
    """`ModelConfig.quantization` as `text`, the object that holds the model's settings, says it. Raises `UserError` on other formats."""
    config, activations = text.get(KEY), text.get(ACTIVATIONS)
    if activations not in (None, "mxfp8"):
        raise UserError(f"{name}: {ACTIVATIONS} = {activations!r}: 'mxfp8' or no such key is expected")
    if not config:
        return "none"
    given = config.get("format", config.get("quant_method")) if isinstance(config, dict) else config
    if given != FORMAT:
        raise UserError(f"{name}: {KEY} = {given!r}: only {FORMAT!r} is supported; give a folder in that form or an unquantised one")
    return "mxfp4" if activations is None else "mxfp4+mxfp8"


# ---------------------------------------------------------------- tensors


def is_packed(names: Iterable[str], where: str) -> bool:
    """Whether a folder with these tensors has its experts in MXFP4. Raises `UserError` naming the first tensor out of place."""
    names = set(names)
    packed = sorted(name for name in names if name.endswith(PACKED))
    for name in packed:
        if EXPERT not in name:
            raise UserError(f"{where}: tensor {name} is quantised; only routed experts can be, give the others as weight")
        if (plain := name.removesuffix("_packed")) in names:
            raise UserError(f"{where}: tensor {name} and tensor {plain} are both there; one of the two is expected")
    return bool(packed)


def forget_scales(model: nn.Module) -> None:
    """Let a quantised model hold no scale of an earlier folder."""
    for name, buffer in model.named_buffers():
        if EXPERT in name and buffer.dtype == torch.uint8:
            buffer.fill_(NAN_SCALE)


class Packed:
    """One expert's matrix, the slice `weight` [out, in] of the model's tensor, with the slice `scale` [out, in/32] of its kept scales.

    `places` are its two stored tensors in shape and type: the scales themselves, and a stand-in without memory for the packed
    numbers. A slot that has other memory in a place is on its way from folder to folder, past the model: its bytes go as they are.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight, self.scale = weight, scale
        rows, columns = weight.shape
        self.places = {SCALE: scale, PACKED: torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")}
        self._ready: dict[str, Tensor] = {}

    def take(self, suffix: str, place: Tensor) -> Tensor:
        """The tensor to write, on the CPU: quantised once for both, the first asked for leaves the other here until it is taken.

        Raises ValueError with the place of a NaN or infinity.
        """
        if place is not self.places[suffix]:
            return place
        if suffix not in self._ready:
            packed, scale = mxfp4_quantize(self.weight, keep=self.scale)
            self._ready = {PACKED: packed.cpu(), SCALE: scale.cpu()}
        return self._ready.pop(suffix)

    def put(self, suffix: str, place: Tensor, stored: Tensor) -> str | None:
        """Read one of the two tensors, into the model the scale first. Returns what is wrong with it, or None."""
        if suffix == SCALE and bool((stored == NAN_SCALE).any()):
            return f"holds the scale {NAN_SCALE}, which is NaN"
        if suffix == SCALE or place is not self.places[suffix]:
            place.copy_(stored)
            return None
        self.weight.copy_(mxfp4_dequantize(stored, self.scale.cpu(), self.weight.dtype))
        return None if bool(torch.isfinite(self.weight).all()) else f"holds values beyond {self.weight.dtype}"
