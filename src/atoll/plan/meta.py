"""The same count from the model itself: built on the meta device, where a tensor has a shape and no memory."""

from __future__ import annotations

import re

from atoll.config import ModelConfig
from atoll.plan import parameters as p

_BIAS = "gate.e_score_correction_bias"  # a buffer: the balancer sets it, no gradient does
_LAYER = re.compile(r"\.layers\.(\d+)\.")

# First match names the group; the mixers are told apart by their layer.
_GROUPS = (
    (re.compile(r"^vision_tower\."), p.TOWER),
    (re.compile(r"^mm_projector\."), p.PROJECTOR),
    (re.compile(r"\.embed_tokens\."), p.EMBEDDING),
    (re.compile(r"\.lm_head\."), p.LM_HEAD),
    (re.compile(r"_res_(norm|proj)\."), p.RESIDUAL),
    (re.compile(r"\.mlp\."), p.DENSE),
    (re.compile(r"\.block_sparse_moe\.experts\."), p.ROUTED),
    (re.compile(r"\.block_sparse_moe\.shared_experts\."), p.SHARED),
    (re.compile(r"\.block_sparse_moe\.routed_expert_"), p.LATENT),
    (re.compile(r"\.block_sparse_moe\.gate\."), p.ROUTER),
    (re.compile(r"(_layernorm|\.model\.norm)\.weight$"), p.NORMS),
)


def group_of(name: str, config: ModelConfig) -> str:
    """The group of the count that the parameter `name` belongs to. Raises `KeyError` for a name no group knows."""
    layer = _LAYER.search(name)
    if layer and ".self_attn." in name:
        return p.KDA if config.is_kda(int(layer[1])) else p.MLA
    for pattern, group in _GROUPS:
        if pattern.search(name):
            return group
    raise KeyError(name)


def measure(config: ModelConfig) -> dict[str, int]:
    """Parameters and router biases of the model built on the meta device, by group. `A_log` has one number a head here:
    its padding exists only in files."""
    import torch

    from atoll.model import Model

    with torch.device("meta"):
        model = Model(config)
    sizes = dict.fromkeys((g.name for g in p.count(config).groups), 0)
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith(_BIAS))]
    for name, tensor in named:
        sizes[group_of(name, config)] += tensor.numel()
    return sizes


def a_log_padding(config: ModelConfig) -> int:
    """Numbers the files hold beyond the heads, over all KDA layers (zeros in the release)."""
    return p.kda_layers(config) * ((config.a_log_storage or config.kda_num_heads) - config.kda_num_heads)


def disagreements(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Groups where the built model and the closed form differ (padding of `A_log` aside): name → (built, counted). Empty when right."""
    built, padding = measure(config), {p.KDA: a_log_padding(config)}
    counted = {g.name: g.total - padding.get(g.name, 0) for g in p.count(config).groups}
    return {name: (built[name], counted[name]) for name in counted if built[name] != counted[name]}
