"""The engine: sequences that come and go, continued together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from atoll.config import UserError
from atoll.infer import draw
from atoll.infer.request import Answer, Request, Step
from atoll.infer.sequence import Sequence

GRID = 64


@dataclass(frozen=True)
class EngineSettings:
    """What an engine may use.

    Args:
        slots: sequences decoded at once. prefill_chunk: tokens of prompts read a turn, a multiple of 64.
        device_mib, host_mib: memory for states and cached prefixes, on the model's device and in host memory.
        max_length: tokens of a sequence at most, prompt and answer. version: of the weights.
    """

    slots: int = 8
    prefill_chunk: int = 256
    device_mib: float = 512.0
    host_mib: float = 512.0
    max_length: int = 32768
    version: int = 0


class Engine:
    """Continues sequences with one model. One thread at a time."""

    def __init__(self, model: Any, *, settings: EngineSettings = EngineSettings()) -> None:
        self.model, self.settings, self.version = model, settings, settings.version
        self._next = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._caches: dict[int, Any] = {}
        self._out: list[Step] = []
        self._generated = self._prefilled = 0

    def submit(self, request: Request) -> int:
        """Queue `request`; returns its number. Raises `UserError` for what cannot be."""
        self._check(request)
        sequence = Sequence.of(self._next, request, self.model.config.vocab_size)
        self._next += 1
        if request.max_tokens:
            self._waiting.append(sequence)
        else:
            self._out.append(sequence.end("length", self.version))
        return sequence.id

    def fork(self, request: Request, copies: int) -> list[int]:
        """`copies` answers of one prompt."""
        return [self.submit(request) for _ in range(copies)]

    def cancel(self, sequence: int) -> None:
        """End a sequence at once; of one that has ended, or never was, nothing happens."""
        for held in (self._waiting, self._running):
            for s in [s for s in held if s.id == sequence]:
                held.remove(s)
                self._caches.pop(s.id, None)
                self._out.append(s.end("cancelled", self.version))

    def idle(self) -> bool:
        return not (self._waiting or self._running or self._out)

    @torch.no_grad()
    def step(self) -> list[Step]:
        """One turn: read some of the prompts, then one token for each running sequence."""
        out, self._out = self._out, []
        while self._waiting and len(self._running) < self.settings.slots:
            s = self._waiting.pop(0)
            self._caches[s.id] = self.model.new_cache(1)
            self._running.append(s)
        for s in list(self._running):
            ids = torch.tensor([s.tokens[s.fed :]], device=self.model.device)
            result = self.model(ids, cache=self._caches[s.id], logits=True)
            logits = draw.wide_logits(result.logits[0])
            logprobs = logits.log_softmax(-1)
            s.note_prompt(logprobs)
            s.fed += ids.shape[1]
            step = s.draw(logits[-1], logprobs[-1], self.version)
            out.append(step)
            if step.finish is not None:
                self._running.remove(s)
                del self._caches[s.id]
        return out

    def run(self, requests: Iterable[Request]) -> list[Answer]:
        """Submit all, step to the end; answers in order."""
        numbers = [self.submit(r) for r in requests]
        answers: dict[int, Answer] = {}
        while not self.idle():
            answers |= {s.sequence: s.answer for s in self.step() if s.answer is not None}
        return [answers[n] for n in numbers]

    def set_version(self, version: int) -> None:
        """The weights changed."""
        self.version = version
        for s in self._running:
            s.fed, self._caches[s.id] = 0, self.model.new_cache(1)

    def stats(self) -> dict[str, float | int]:
        return {"running": len(self._running), "waiting": len(self._waiting), "slots": self.settings.slots, "version": self.version}

    def _check(self, request: Request) -> None:
        c, s = self.model.config, self.settings
        if not request.prompt:
            raise UserError("prompt is empty: one token at least is expected")
        wrong = next((i for i in request.prompt if not 0 <= i < c.vocab_size), None)
        if wrong is not None:
            raise UserError(f"prompt holds token {wrong}: ids from 0 to {c.vocab_size - 1} are expected")
        if request.max_tokens < 0:
            raise UserError(f"max_tokens = {request.max_tokens}: 0 or more is expected")
        total = len(request.prompt) + request.max_tokens
        if total > s.max_length:
            raise UserError(
                f"prompt of {len(request.prompt)} tokens and max_tokens = {request.max_tokens}: over max_length = {s.max_length}"
            )
        draw.check(request.sampling, c.vocab_size)
