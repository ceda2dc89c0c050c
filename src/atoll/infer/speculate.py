"""Guesses of the next tokens, which the model then reads in one call: from the text so far, or from a smaller model.

A guess costs and saves time only: a token is drawn from the model's own logits, with the sequence's own random numbers, and the
guesses after the first that was not drawn are taken back (Leviathan et al., arXiv 2211.17192, with the same draw on both sides in
place of their acceptance rule, so that a seed gives one answer). Prompt lookup: Saxena, 2023.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from atoll.config import UserError
from atoll.infer.evaluating import evaluating
from atoll.infer.sequence import Sequence

CHUNK = 512  # tokens the small model reads at once


class Drafter(Protocol):
    def propose(self, s: Sequence, count: int) -> list[int]:
        """Up to `count` tokens that may follow `s`."""
        ...

    def forget(self, s: Sequence) -> None:
        """`s` has ended."""
        ...


class Lookup:
    """What followed the last tokens where they stood before: first by three of them, then by two."""

    ORDERS = (3, 2)

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, dict[tuple[int, ...], int]]] = {}  # sequence → tokens indexed, n-gram → where it last ended

    def propose(self, s: Sequence, count: int) -> list[int]:
        done, index = self._seen.get(s.id, (0, {}))
        tokens = s.tokens
        for end in range(done, len(tokens)):  # n-grams that end before the last token: something follows them
            for order in self.ORDERS:
                if end >= order:
                    index[tuple(tokens[end - order : end])] = end
        self._seen[s.id] = (len(tokens), index)
        for order in self.ORDERS:
            found = index.get(tuple(tokens[-order:])) if len(tokens) >= order else None
            if found is not None:
                return tokens[found : found + count]
        return []

    def forget(self, s: Sequence) -> None:
        self._seen.pop(s.id, None)


class DraftModel:
    """What a smaller model of the same vocabulary finds likeliest. It keeps a cache a sequence, of the tokens that are certain.

    Raises `UserError` where the vocabularies differ.
    """

    def __init__(self, model: Any, vocabulary: int) -> None:
        if model.config.vocab_size != vocabulary:
            raise UserError(
                f"draft: a vocabulary of {model.config.vocab_size} tokens, not the model's {vocabulary}; draft with one that agrees"
            )
        self.model = model
        self._caches: dict[int, Any] = {}

    def propose(self, s: Sequence, count: int) -> list[int]:
        if count < 1 or s.images:
            return []
        model, out = self.model, []
        with evaluating(model):
            cache = self._caches.setdefault(s.id, model.new_cache(1))
            for piece in torch.tensor([s.tokens[cache.length : -1]], device=model.device).split(CHUNK, 1):
                if piece.shape[1]:
                    model(piece, cache=cache, logits=False)
            guess, last = cache.fork(1), s.tokens[-1]
            while len(out) < count:
                last = int(model(torch.tensor([[last]], device=model.device), cache=guess).logits[0, -1].argmax())
                out.append(last)
        return out

    def forget(self, s: Sequence) -> None:
        self._caches.pop(s.id, None)
