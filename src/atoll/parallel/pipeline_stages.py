"""Leaving a model with the stages of one process: the other modules go, the names of those that stay do not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from atoll.config import ParallelConfig
from atoll.parallel.pipeline_order import Stage, layer_ranges, stages


class Absent(nn.Module):
    """Stands where another process holds the module."""


def keep_stages(model: Any, mine: Sequence[Stage]) -> None:
    """Leave `model` with the layers of its own stages, embedding and vision on the first, final norm and head on the last."""
    decoder = model.language_model.model
    held = {i for stage in mine for i in stage.layers}
    numbers = [i for i, layer in enumerate(decoder.layers) if layer.block_sparse_moe is not None]
    for i in range(len(decoder.layers)):
        if i not in held:
            decoder.layers[i] = Absent()
    if not any(s.first for s in mine):
        decoder.embed_tokens = Absent()
        model.vision_tower = model.mm_projector = None
    if not any(s.last for s in mine):
        decoder.norm = model.language_model.lm_head = Absent()
        for name in ("output_attn_res_norm", "output_attn_res_proj"):
            if hasattr(decoder, name):
                setattr(decoder, name, Absent())
    model.balancer.layers = model.moe_layers()
    model.balancer.numbers = [at for at, layer in enumerate(numbers) if layer in held]


def layers_here(model: Any) -> list[Any]:
    """The decoder layers of `model` that are on this process."""
    return [layer for layer in model.language_model.model.layers if not isinstance(layer, Absent)]


def cut_layers(model: Any, layout: ParallelConfig, place: int) -> tuple[list[Stage], list[Stage]]:
    """Leave `model` with the stages of the process at `place` in a pipeline. Returns those, and all of them."""
    c = model.config
    ranges = layer_ranges(c.num_hidden_layers, layout.pipeline * layout.pipeline_virtual, layout.pipeline_cut)
    every = stages(ranges, layout.pipeline, c.residual, c.attn_res_block_size)
    keep_stages(model, mine := every[place :: layout.pipeline])
    return mine, every
