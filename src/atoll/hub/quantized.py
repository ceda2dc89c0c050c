"""The list of what is quantised: exactly which tensors, and their bytes before and after."""

from __future__ import annotations

from typing import Any

import torch

from atoll.config import ModelConfig
from atoll.hub.config_json import is_kimi_linear
from atoll.hub.layout import PREFIX
from atoll.hub.packed import EXPERT


def report(m: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Exactly which tensors are quantised and what that saves, ready for JSON; `dtype` is the type they would have otherwise.

    `tensors` has a row a layer and matrix: `name` with {} for the expert, `experts`, `shape` of one, and its bytes over all
    experts `before` and `after`. `bytes_before` and `bytes_after` sum them; every tensor not listed keeps its type.
    """
    rows: list[dict[str, Any]] = []
    prefix = "" if is_kimi_linear(m) else PREFIX
    latent, inner = m.routed_expert_hidden_size or m.hidden_size, m.moe_intermediate_size
    for layer in range(m.num_hidden_layers):
        if m.quantization == "none" or m.is_dense(layer):
            continue
        for matrix, shape in (("w1", (inner, latent)), ("w3", (inner, latent)), ("w2", (latent, inner))):
            numbers = m.num_experts * shape[0] * shape[1]
            rows.append(
                {
                    "name": f"{prefix}model.layers.{layer}{EXPERT}{{}}.{matrix}",
                    "experts": m.num_experts,
                    "shape": list(shape),
                    "before": numbers * dtype.itemsize,
                    "after": numbers // 2 + numbers // 32,
                }
            )
    return {
        "quantization": m.quantization,
        "dtype": str(dtype).removeprefix("torch."),
        "tensors": rows,
        "matrices": sum(row["experts"] for row in rows),
        "bytes_before": sum(row["before"] for row in rows),
        "bytes_after": sum(row["after"] for row in rows),
    }
