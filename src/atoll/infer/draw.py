"""The next token of one sequence: its own random numbers, counts and grammar, so that nothing depends on its neighbours in a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atoll.config import UserError
from atoll.infer import sampling
from atoll.infer.request import Constraint, Sampling


def check(asked: Sampling, vocabulary: int) -> None:
    """Refuse what cannot be drawn from. Raises `UserError`, one line."""
    sampling.check(
        asked.temperature,
        asked.top_p,
        asked.top_k,
        asked.min_p,
        asked.repetition_penalty,
        asked.presence_penalty,
        asked.frequency_penalty,
    )
    for id, value in asked.logit_bias.items():
        if not 0 <= id < vocabulary:
            raise UserError(f"logit_bias of token {id}: ids from 0 to {vocabulary - 1} are expected")
        if not math.isfinite(value):
            raise UserError(f"logit_bias of token {id} = {value!r}: a finite number is expected")
    if asked.seed is not None and not -(2**63) <= asked.seed < 2**63:
        raise UserError(f"seed = {asked.seed}: a number of 64 bits is expected")


def wide_logits(logits: Tensor) -> Tensor:
    """Logits [..., V] on the CPU in at least float32, where every device draws alike."""
    return logits.cpu().to(torch.promote_types(logits.dtype, torch.float32))


def report(logprobs: Tensor, id: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of `id` and the `top` likeliest tokens with theirs, of log-probabilities [V]."""
    found: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = logprobs.topk(min(top, logprobs.numel()))
        found = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return float(logprobs[id]), found


class Drawer:
    """Draws a sequence's tokens one after the other: `draw` the next, `accept` it (or another) before the one after.

    Args:
        asked: how. prompt: the tokens a repetition penalty counts from the start. vocabulary: number of ids.
        constraint: a grammar, if any.
    """

    def __init__(self, asked: Sampling, prompt: list[int], vocabulary: int, constraint: Constraint | None = None) -> None:
        self.asked, self.constraint = asked, constraint
        self.numbers = torch.Generator()
        if asked.seed is None:
            self.numbers.seed()
        else:
            self.numbers.manual_seed(asked.seed)
        self._penal = asked.repetition_penalty != 1.0 or asked.presence_penalty != 0.0 or asked.frequency_penalty != 0.0
        self._seen = self._counts = torch.empty(0)
        if self._penal:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool)
            self._seen[torch.tensor(prompt)] = True
            self._counts = torch.zeros(vocabulary, dtype=torch.int64)

    def draw(self, logits: Tensor) -> int:
        """An id drawn from logits [V] (see `wide_logits`). Raises ValueError where no token may come."""
        if bool(logits.isnan().any()):
            raise ValueError("the model's logits are not numbers")
        a = self.asked
        logits = sampling.add_bias(logits, a.logit_bias)
        if self._penal:
            logits = sampling.penalise(logits, self._seen, self._counts, a.repetition_penalty, a.presence_penalty, a.frequency_penalty)
        allowed = None if self.constraint is None else self.constraint.allowed()
        if allowed is not None:
            if not bool(allowed.any()):
                raise ValueError("the grammar allows no token")
            logits = logits.masked_fill(~allowed[: logits.numel()].to(logits.device), -torch.inf)
        probs = sampling.distribution(logits, a.temperature, a.top_p, a.top_k, a.min_p)
        uniform = torch.rand(1, generator=self.numbers, dtype=torch.float64)
        return int(sampling.draw(probs.unsqueeze(0), uniform))

    def accept(self, id: int) -> None:
        """`id` came next."""
        if self._penal:
            self._seen[id] = True
            self._counts[id] += 1
        if self.constraint is not None:
            self.constraint.accept(id)
