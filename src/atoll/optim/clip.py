"""Clip of attention weights by the largest logit they produced. (Gradients are clipped by `torch.nn.utils`; see build.py.)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def qk_clip(layer: Any, limit: float, masters: Mapping[Tensor, Tensor] | None = None, skip: Tensor | None = None) -> None:
    """Shrink the query and key weights of heads whose largest logit passed `limit`. MuonClip, Kimi K2 report §2.1.

    `layer` is an MLA layer (`num_heads`, `nope_dim`, `rope_dim`, `v_dim`) with `max_logit` [H]: the largest scaled logit of each
    head in the step or an upper bound of it, or None when it was not tracked (then nothing happens). With
    γ = min(1, limit / max_logit), a head's own query and key rows are multiplied by √γ; query rows that meet the key shared by
    all heads by γ, because that key cannot shrink for one head alone. Every logit of the head thus shrinks by exactly γ. (The
    report says this of a rotary shared key; an unrotated one obeys the same algebra.)

    `masters` maps a low-precision weight to the float32 master that must shrink with it. `skip` is a float tensor of 0 or 1: 1
    leaves everything alone. No host sync.
    """
    logits: Tensor | None = getattr(layer, "max_logit", None)
    if logits is None:
        return
    gamma = (limit / logits.clamp_min(torch.finfo(logits.dtype).tiny)).clamp_max(1.0)
    keep = ~torch.isfinite(logits) if skip is None else ~torch.isfinite(logits) | (skip > 0)
    gamma = torch.where(keep, torch.ones_like(gamma), gamma)[:, None, None]
    heads, nope, rope, v = (int(getattr(layer, name)) for name in ("num_heads", "nope_dim", "rope_dim", "v_dim"))
    query = getattr(layer, "q_b_proj", None) or layer.q_proj
    for weight in (query.weight, layer.kv_b_proj.weight):
        exact = weight if masters is None else masters.get(weight, weight)
        rows = exact.view(heads, -1, exact.shape[-1])
        rows[:, :nope].mul_(gamma.sqrt().to(exact.dtype))
        if weight is query.weight:
            rows[:, nope:].mul_(gamma.to(exact.dtype))
            assert rows.shape[1] == nope + rope
        else:
            assert rows.shape[1] == nope + v
        if exact is not weight:
            weight.copy_(exact)
