"""From logits to the next token: pure functions of tensors, no state and no model.

A draw is the inverse of the cumulative distribution at a given uniform number, so that the same numbers give the same tokens on
every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.config import UserError


def check(temperature: float, top_p: float, top_k: int | None) -> None:
    """Refuse settings that describe no distribution. Raises `UserError`, one line."""
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature = {temperature!r}: 0 (greedy) or a number above it is expected")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p = {top_p!r}: a share above 0 and up to 1 is expected")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k = {top_k!r}: a number from 1 is expected")


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """`logits` [..., V] with all but the k largest at -inf; of equal logits at the edge the lower ids stay."""
    if k >= logits.shape[-1]:
        return logits
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    drop = torch.ones_like(logits, dtype=torch.bool).scatter(-1, order[..., :k], False)
    return logits.masked_fill(drop, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """`logits` [..., V] with all but the nucleus at -inf: the fewest most likely tokens whose probabilities reach `p`.

    Nucleus sampling, Holtzman et al., arXiv 1904.09751. At least one token stays.
    """
    if p >= 1:
        return logits
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = sorted_logits.softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of the tokens ahead of each
    drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= p)
    return logits.masked_fill(drop, -torch.inf)


def distribution(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None) -> Tensor:
    """Probabilities [..., V] in at least float32 after temperature, then top-k, then top-p. Temperature 0 is all mass on the argmax."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / temperature
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    return keep_top_p(logits, top_p).softmax(-1)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Token ids int64 [B] drawn from `probs` [B, V] at the numbers `uniform` [B] in [0, 1)."""
    cumulative = probs.double().cumsum(-1)
    target = uniform.double() * cumulative[..., -1]
    ids = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)  # rounding must not reach past the last possible token
    return torch.minimum(ids, last)
