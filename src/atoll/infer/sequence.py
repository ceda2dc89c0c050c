"""One sequence while it is being continued: its tokens, how far the model has read them, where its memory is, the answer so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.infer.draw import Drawer, report
from atoll.infer.images import Image
from atoll.infer.pool import PAGE
from atoll.infer.prefix_cache import Node
from atoll.infer.request import Answer, FinishReason, Request, Step

TURNS = 8  # turn ends remembered, counted from the prompt's end; the first (often shared by many requests) comes on top


@dataclass(eq=False)
class Sequence:
    """`tokens` are prompt and answer; the model has read the first `fed` of them.

    `reading`: the last token read does not yet lead to the next one: prompt, or all of it again after the weights changed.
    `slot`, `pages`, `promised` (pages): its memory in the pool, while it has some. `keys`, `marks`, `node`: names of its prefixes, the
    lengths at which they are kept, and the last one found or kept. `routed`: experts of the tokens fed, int [layers, n, k] each.
    """

    id: int
    request: Request
    drawer: Drawer
    images: list[Image]
    tokens: list[int]
    answer: Answer
    fed: int = 0
    reading: bool = True
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    promised: int = 0
    keys: list[bytes] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    node: Node | None = None
    routed: list[Tensor] = field(default_factory=list)
    routed_tokens: int = 0

    @staticmethod
    def of(id: int, request: Request, images: list[Image], vocabulary: int) -> Sequence:
        drawer = Drawer(request.sampling, request.prompt, vocabulary, request.constraint)
        answer = Answer([], [], [], "length")
        if request.prompt_logprobs:
            answer.prompt_logprobs, answer.prompt_top = [], []
        return Sequence(id, request, drawer, images, list(request.prompt), answer)

    @property
    def left(self) -> int:
        """Tokens that may still be added."""
        return self.request.max_tokens - len(self.answer.ids)

    def pages_needed(self) -> int:
        """Pages for everything that may still be read, drafts included: no draft goes past the last token."""
        return -(-(len(self.tokens) + self.left) // PAGE)

    def prefix_marks(self) -> list[int]:
        """Where prefixes are kept: the last ends of pages before turns end, and those before and at the end of what is read first."""
        turns = self.request.turns
        wanted = {*turns[:1], *turns[-TURNS:], len(self.tokens) - 1, len(self.tokens)}
        return sorted({t // PAGE * PAGE for t in wanted} - {0})

    # -------------------------------------------------- the answer

    def draw(self, logits: Tensor, logprobs: Tensor, version: int, routing: Tensor | None = None) -> Step:
        """The next token, from logits and log-probabilities [V]; ended where it stops, is the last or cannot be drawn."""
        try:
            id = self.drawer.draw(logits)
            self.drawer.accept(id)
        except Exception as error:  # a grammar is the caller's code: its fault ends this sequence, not the others
            return self.end("error", version, str(error) or type(error).__name__)
        value, top = report(logprobs, id, self.request.top_logprobs)
        answer = self.answer
        self.tokens.append(id)
        answer.ids.append(id)
        answer.logprobs.append(value)
        answer.top.append(top)
        answer.versions.append(version)
        finish: FinishReason | None = "stop" if id in self.request.stop_ids else "length" if not self.left else None
        if finish is not None:
            self.close(finish)
        return Step(self.id, id, value, top, routing, version, finish, answer=answer if finish else None)

    def end(self, finish: FinishReason, version: int, error: str = "") -> Step:
        """The last step of a sequence that ends without a token."""
        self.close(finish, error)
        return Step(self.id, None, version=version, finish=finish, error=error, answer=self.answer)

    def close(self, finish: FinishReason, error: str = "") -> None:
        self.answer.finish, self.answer.error = finish, error
        if self.request.routing:
            self.answer.routing = self.routing()

    def routing(self) -> Tensor | None:
        """Experts of all tokens read, int [layers, n, k]; None where they are not recorded."""
        if len(self.routed) > 1:
            self.routed = [torch.cat(self.routed, 1)]
        return self.routed[0] if self.routed else None

    def note_routing(self, routing: Tensor) -> None:
        """Experts int [layers, n, k] of the n tokens about to count as read; those noted before, under older weights, stay."""
        new = self.fed + routing.shape[1] - self.routed_tokens
        if new > 0:
            self.routed.append(routing[:, -new:])
            self.routed_tokens += new

    def note_prompt(self, logprobs: Tensor) -> None:
        """Log-probabilities [n, V] after each of the n tokens about to count as read: those of the prompt's own tokens are kept."""
        answer, wanted = self.answer, self.request.top_logprobs
        assert answer.prompt_logprobs is not None
        assert answer.prompt_top is not None
        for i, row in enumerate(logprobs, self.fed + 1):
            if len(answer.prompt_logprobs) + 1 == i < len(self.request.prompt):
                value, top = report(row, self.request.prompt[i], wanted)
                answer.prompt_logprobs.append(value)
                answer.prompt_top.append(top)
