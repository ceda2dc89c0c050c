"""From logits to the next token: pure functions of tensors, no state and no model.

A draw is the inverse of the cumulative distribution at a given uniform number, so that the same numbers give the same tokens on
every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.config import UserError


def check(
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> None:
    """Refuse settings that describe no distribution. Raises `UserError`, one line."""
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature = {temperature!r}: 0 (greedy) or a number above it is expected")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p = {top_p!r}: a share above 0 and up to 1 is expected")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k = {top_k!r}: a number from 1 is expected")
    if not 0 <= min_p <= 1:
        raise UserError(f"min_p = {min_p!r}: a share from 0 to 1 is expected")
    if not 0 < repetition_penalty < float("inf"):
        raise UserError(f"repetition_penalty = {repetition_penalty!r}: a factor above 0 is expected; 1 changes nothing")
    for name, value in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
        if not math.isfinite(value):
            raise UserError(f"{name} = {value!r}: a finite number is expected; 0 changes nothing")


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
    drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= max(p, torch.finfo(probs.dtype).tiny))
    return logits.masked_fill(drop, -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """`logits` [..., V] with tokens below `p` times the likeliest one's probability at -inf (Nguyen et al., arXiv 2407.01082)."""
    if p <= 0:
        return logits
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -torch.inf)


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """`logits` [..., V] with `bias` added to the ids it names."""
    if not bias:
        return logits
    ids = torch.tensor(list(bias), device=logits.device)
    return logits.index_add(
        -1, ids, torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device).expand(*logits.shape[:-1], -1)
    )


def penalise(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0
) -> Tensor:
    """`logits` [V] less what repeating costs. seen bool [V]: tokens of prompt and answer; counts [V]: how often each stands in the answer.

    Repetition divides what is positive and multiplies what is negative (Keskar et al., arXiv 1909.05858, eq. 2); presence is taken once,
    frequency for each time.
    """
    if repetition != 1.0:
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    if presence or frequency:
        logits = logits - presence * (counts > 0).to(logits.dtype) - frequency * counts.to(logits.dtype)
    return logits


def distribution(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None, min_p: float = 0.0) -> Tensor:
    """Probabilities [..., V] in at least float32 after temperature, top-k, top-p, min-p. Temperature 0 is all mass on the argmax."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.clamp(max=torch.finfo(logits.dtype).max)  # what a penalty divided beyond it is the likeliest, and no NaN
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    # from the largest down, so that the least temperature overflows to -inf alone
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(logits.dtype).tiny)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    return keep_min_p(keep_top_p(logits, top_p), min_p).softmax(-1)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Token ids int64 [B] drawn from `probs` [B, V] at the numbers `uniform` [B] in [0, 1)."""
    cumulative = probs.double().cumsum(-1)
    target = uniform.double() * cumulative[..., -1]
    ids = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)  # rounding must not reach past the last possible token
    return torch.minimum(ids, last)
