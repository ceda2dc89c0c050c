"""The engine: sequences that come and go, continued together by one model on one pool of memory, prefixes kept for the next.

A turn (`step`) reads some tokens of one prompt, then feeds every running sequence its last token in one call, whatever their lengths.
What a request gets does not depend on its neighbours beyond rounding; what the contract says exactly: docs/inference.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from atoll.config import UserError
from atoll.infer import admission
from atoll.infer.calls import Caller, Result
from atoll.infer.evaluating import evaluating
from atoll.infer.pool import Pool
from atoll.infer.prefix_cache import PrefixCache
from atoll.infer.request import Answer, Request, Step
from atoll.infer.scheduler import Scheduler
from atoll.infer.sequence import Sequence
from atoll.infer.settings import DEFAULTS, MIB, EngineSettings
from atoll.infer.speculate import Drafter, DraftModel, Lookup

__all__ = ["Engine", "EngineSettings"]


class Engine:
    """Continues sequences with `model` (an `atoll.Model`). Not thread-safe: one thread calls it, or one at a time.

    draft: a smaller model of the same vocabulary, for `speculate = "draft"`. Raises `UserError` for settings that cannot be.
    """

    def __init__(self, model: Any, *, settings: EngineSettings = DEFAULTS, draft: Any = None) -> None:
        settings.check()
        if (draft is None) != (settings.speculate != "draft"):
            wrong = "a draft model is missing" if draft is None else "takes no draft model"
            raise UserError(f"speculate = {settings.speculate!r}: {wrong}")
        self.model, self.settings, self.version = model, settings, settings.version
        dtype = model.language_model.lm_head.weight.dtype
        limit = int(settings.device_mib * MIB)
        self.pool = Pool(model.config, settings.slots, limit, dtype=dtype, device=model.device)
        self.cache = PrefixCache(self.pool, int(settings.host_mib * MIB))
        self.scheduler, self.caller = Scheduler(self.pool, self.cache), Caller(model, self.pool, settings.prefill_chunk)
        self.drafter: Drafter | None = None
        if settings.speculate != "none":
            self.drafter = Lookup() if draft is None else DraftModel(draft, model.config.vocab_size)
        self._next, self._out = 0, list[Step]()
        self._counts = dict.fromkeys(("generated", "prefilled", "drafted", "accepted"), 0)

    # -------------------------------------------------- asking

    def submit(self, request: Request) -> int:
        """Queue `request`; its number among the steps. Raises `UserError` for what cannot be."""
        images = admission.check(request, self.model, self.settings.max_length)
        s = Sequence.of(self._next, request, images, self.model.config.vocab_size)
        if s.pages_needed() * self.pool.page_bytes > self.pool.limit:
            need = s.pages_needed() * self.pool.page_bytes / MIB
            raise UserError(f"device_mib = {self.settings.device_mib}: prompt and max_tokens need {need:.1f}; shorten one or give more")
        self._next += 1
        if request.max_tokens or request.prompt_logprobs:
            self.scheduler.waiting.append(s)
        else:
            self._out.append(s.end("length", self.version))
        return s.id

    def fork(self, request: Request, copies: int) -> list[int]:
        """`copies` answers of one prompt, which is read once. With a seed, copy i draws with seed + i.

        Raises `UserError` as `submit`, and for a constraint, of which each sequence needs its own.
        """
        if request.constraint is not None and copies > 1:
            raise UserError("constraint: it follows one sequence; submit each copy with its own")
        seed = request.sampling.seed
        seeds = [None if seed is None else seed + i for i in range(copies)]
        return [self.submit(replace(request, sampling=replace(request.sampling, seed=each))) for each in seeds]

    def cancel(self, sequence: int) -> None:
        """End a sequence: its memory is free at once, its last step says "cancelled". One that has ended, or never was, is let be."""
        for s in [*self.scheduler.running, *self.scheduler.waiting]:
            if s.id == sequence:
                self._remove(s)
                self._out.append(s.end("cancelled", self.version))

    def idle(self) -> bool:
        """Whether `step` has nothing to do or to say."""
        return not (self.scheduler.running or self.scheduler.waiting or self._out)

    def run(self, requests: Iterable[Request]) -> list[Answer]:
        """Submit all and step to the end; their answers in order. Raises `UserError` when sequences of others are under way."""
        if not self.idle():
            raise UserError("run: sequences submitted before are under way; step them to their end, or submit these as well")
        numbers, answers = [], dict[int, Answer]()
        try:
            numbers += [self.submit(request) for request in requests]
            while not self.idle():
                answers |= {step.sequence: step.answer for step in self.step() if step.answer is not None}
        except BaseException:  # a request that cannot be, an interrupt: nothing of this run is left behind
            for s in [*self.scheduler.running, *self.scheduler.waiting]:
                self._remove(s)
            self._out.clear()
            raise
        return [answers[number] for number in numbers]

    def set_version(self, version: int) -> None:
        """The weights have changed: kept prefixes and states are dropped, running sequences are read again before they go on.

        Tokens, log-probabilities, routing and versions that were recorded stay.
        """
        self.version = version
        self.scheduler.restart()

    # -------------------------------------------------- a turn

    def step(self) -> list[Step]:
        """One turn: read up to `prefill_chunk` tokens of prompts, then one token (more with guesses) for each sequence already running."""
        rows = self.scheduler.decoding()
        try:
            with evaluating(self.model):
                self._read()
                if rows:
                    self._decode(rows)
        except BaseException:  # states may be half written: nothing of them is used again
            self.scheduler.restart()
            raise
        out, self._out = self._out, []
        return out

    def _read(self) -> None:
        budget = self.settings.prefill_chunk
        while budget > 0 and (s := self.scheduler.next_to_read(self.version)) is not None:
            end, every = self.caller.chunk_end(s), s.request.prompt_logprobs
            self.scheduler.provide(s, end)
            found = self.caller.read(s, end, every)
            budget -= end - s.fed
            self._counts["prefilled"] += end - s.fed
            routing = None
            if s.request.routing and found.routing is not None:
                routing = found.routing[:, 0, : end - s.fed]
                s.note_routing(routing)
                routing = routing[:, -1]
            if every:
                s.note_prompt(found.logprobs[0])
            s.fed = end
            self.scheduler.keep(s)
            if end == len(s.tokens):
                self._first(s, found, routing)

    def _first(self, s: Sequence, found: Result, routing: Any) -> None:
        """The first token after what was read."""
        s.reading = False
        if s.left:
            self._put(s, s.draw(found.logits[0, -1], found.logprobs[0, -1], self.version, routing))
        else:  # the prompt's log-probabilities were all that was wanted
            self._put(s, s.end("length", self.version))

    def _decode(self, rows: list[Sequence]) -> None:
        """Feed each of `rows` its last token and its guesses, draw what follows."""
        drafts = [self._draft(s) for s in rows]
        for s, draft in zip(rows, drafts, strict=True):
            self.scheduler.provide(s, s.fed + 1 + len(draft))
        found, cache = self.caller.decode(rows, drafts)
        right = [self._follow(s, draft, found, i) for i, (s, draft) in enumerate(zip(rows, drafts, strict=True))]
        if any(drafts):
            self.model.replay(cache, torch.tensor(right, device=self.pool.device))

    def _draft(self, s: Sequence) -> list[int]:
        count = min(self.settings.draft_tokens, s.left - 1)
        return self.drafter.propose(s, count) if self.drafter is not None and count > 0 else []

    def _follow(self, s: Sequence, draft: list[int], found: Result, row: int) -> int:
        """Draw after each token that was fed, as long as the guesses are what is drawn. How many of those fed count; 0 at the end."""
        self._counts["drafted"] += len(draft)
        for t in range(1 + len(draft)):
            routing = None
            if s.request.routing and found.routing is not None:
                s.note_routing(found.routing[:, row, t : t + 1])
                routing = found.routing[:, row, t]
            s.fed += 1
            step = s.draw(found.logits[row, t], found.logprobs[row, t], self.version, routing)
            self._put(s, step)
            if step.finish is not None:
                return 0
            if t == len(draft) or step.id != draft[t]:
                return t + 1
            self._counts["accepted"] += 1
        raise AssertionError("a draft has an end")

    def _put(self, s: Sequence, step: Step) -> None:
        self._counts["generated"] += step.id is not None
        self._out.append(step)
        if step.finish is not None:
            self._remove(s)

    def _remove(self, s: Sequence) -> None:
        self.scheduler.remove(s)
        if self.drafter is not None:
            self.drafter.forget(s)

    # -------------------------------------------------- looking

    def stats(self) -> dict[str, float | int]:
        """Numbers now and since the start: sequences, memory, hits of kept prefixes, tokens. Bytes; pages of 64 tokens."""
        queue, pool, cache = self.scheduler, self.pool, self.cache
        return {
            "running": len(queue.running),
            "waiting": len(queue.waiting),
            "slots": self.settings.slots,
            "slots_used": self.settings.slots - len(pool.free_slots),
            "pages_used": pool.pages_used,
            "pages_promised": pool.promised,
            "pages_total": pool.limit // pool.page_bytes if pool.page_bytes else 0,
            "device_bytes": pool.bytes_used(),
            "host_bytes": cache.host_bytes,
            "slot_bytes": pool.snapshot_bytes,
            "snapshots": pool.snapshots,
            "prefix_queries": queue.queries,
            "prefix_hits": queue.hits,
            "prefix_tokens": queue.hit_tokens,
            "prefix_nodes": len(cache.nodes),
            "evictions": cache.evictions,
            "restores": cache.restores,
            "drops": cache.drops,
            **self._counts,
            "version": self.version,
        }
