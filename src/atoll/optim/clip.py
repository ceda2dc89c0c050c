"""Clip of attention weights by the largest logit they produced. (Gradients are clipped by `torch.nn.utils`; see build.py.)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def qk_clip(layer: Any, limit: float, masters: Mapping[Tensor, Tensor] | None = None, skip: Tensor | None = None) -> None:
    """Shrink the query and key weights of heads whose largest logit passed `limit`; see `clip_factors`.

    `masters` maps a low-precision weight to the float32 master that must shrink with it. `skip` is a float tensor of 0 or 1: 1
    leaves everything alone. No host sync.
    """
    for name, factors in clip_factors(layer, limit, skip).items():
        weight = layer.get_parameter(name)
        exact = weight if masters is None else masters.get(weight, weight)
        exact.mul_(factors.to(exact.dtype))
        if exact is not weight:
            weight.copy_(exact)


@torch.no_grad()
def clip_factors(layer: Any, limit: float, skip: Tensor | None = None) -> dict[str, Tensor]:
    """What each row of a layer's query and key weights is to be multiplied by: name → [rows, 1]. MuonClip, Kimi K2 report §2.1.

    `layer` is an MLA layer (`num_heads`, `nope_dim`, `rope_dim`, `v_dim`) with `max_logit` [H]: the largest scaled logit of each
    head in the step or an upper bound of it, or None when it was not tracked (then nothing is to be done). With
    γ = min(1, limit / max_logit), a head's own query and key rows are multiplied by √γ; query rows that meet the key shared by
    all heads by γ, because that key cannot shrink for one head alone. Every logit of the head thus shrinks by exactly γ. (The
    report says this of a rotary shared key; an unrotated one obeys the same algebra.)
    """
    logits: Tensor | None = getattr(layer, "max_logit", None)
    if logits is None:
        return {}
    gamma = (limit / logits.clamp_min(torch.finfo(logits.dtype).tiny)).clamp_max(1.0)
    keep = ~torch.isfinite(logits) if skip is None else ~torch.isfinite(logits) | (skip > 0)
    gamma = torch.where(keep, torch.ones_like(gamma), gamma)[:, None]
    half, one = gamma.sqrt(), torch.ones_like(gamma)
    nope, rope, v = (int(getattr(layer, name)) for name in ("nope_dim", "rope_dim", "v_dim"))
    query = "q_b_proj" if hasattr(layer, "q_b_proj") else "q_proj"
    rows = {query: ((half, nope), (gamma, rope)), "kv_b_proj": ((half, nope), (one, v))}
    return {f"{n}.weight": torch.cat([f.expand(-1, width) for f, width in parts], 1).reshape(-1, 1) for n, parts in rows.items()}
