"""One sequence while it is being continued: its tokens, how far the model has read them, and the answer so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.infer.draw import Drawer, report
from atoll.infer.request import Answer, FinishReason, Request, Step


@dataclass
class Sequence:
    """`tokens` are prompt and answer; the model has read the first `fed` of them.

    `reading`: the last token read does not yet lead to the next one: prompt, or all of it again after the weights changed.
    `slot`, `pages`: where the engine keeps its states. `routed`: experts of each token fed, int [layers, n, k] a call.
    """

    id: int
    request: Request
    drawer: Drawer
    tokens: list[int]
    answer: Answer
    fed: int = 0
    reading: bool = True
    routed: list[Tensor] = field(default_factory=list)
    routed_tokens: int = 0

    @staticmethod
    def of(id: int, request: Request, vocabulary: int) -> Sequence:
        drawer = Drawer(request.sampling, request.prompt, vocabulary, request.constraint)
        answer = Answer([], [], [], "length")
        if request.prompt_logprobs:
            answer.prompt_logprobs, answer.prompt_top = [], []
        return Sequence(id, request, drawer, list(request.prompt), answer)

    @property
    def left(self) -> int:
        """Tokens that may still be added."""
        return self.request.max_tokens - len(self.answer.ids)

    def draw(self, logits: Tensor, logprobs: Tensor, version: int, routing: Tensor | None = None) -> Step:
        """The next token, from logits and log-probabilities [V]; ended where it stops, is the last or cannot be drawn."""
        try:
            id = self.drawer.draw(logits)
            self.drawer.accept(id)
        except Exception as error:  # a grammar is the caller's code: its fault ends this sequence, not the others
            return self.end("error", version, str(error) or type(error).__name__)
        value, top = report(logprobs, id, self.request.top_logprobs)
        self.tokens.append(id)
        for held, new in zip((self.answer.ids, self.answer.logprobs, self.answer.top), (id, value, top), strict=True):
            held.append(new)  # pyright: ignore[reportArgumentType]
        self.answer.versions.append(version)
        finish = "stop" if id in self.request.stop_ids else "length" if not self.left else None
        if finish is not None:
            self.close(finish)
        return Step(self.id, id, value, top, routing, version, finish, answer=self.answer if finish else None)

    def end(self, finish: FinishReason, version: int, error: str = "") -> Step:
        """The last step of a sequence that ends without a token."""
        self.close(finish, error)
        return Step(self.id, None, version=version, finish=finish, error=error, answer=self.answer)

    def close(self, finish: FinishReason, error: str = "") -> None:
        self.answer.finish, self.answer.error = finish, error
        if self.request.routing and self.routed:
            self.answer.routing = torch.cat(self.routed, 1)

    def note_routing(self, routing: Tensor) -> None:
        """Experts int [layers, n, k] of the n tokens that follow those already noted, or that repeat some of them."""
        new = self.fed + routing.shape[1] - self.routed_tokens
        if new > 0:
            self.routed.append(routing[:, -new:])
            self.routed_tokens += new

    def note_prompt(self, logprobs: Tensor) -> None:
        """Log-probabilities [n, V] after each of the n tokens about to count as read: those of the prompt that follow them are kept."""
        answer, wanted = self.answer, self.request.top_logprobs
        if answer.prompt_logprobs is None or answer.prompt_top is None:
            return
        for i, row in enumerate(logprobs, self.fed + 1):
            if len(answer.prompt_logprobs) + 1 == i < len(self.request.prompt):
                value, top = report(row, self.request.prompt[i], wanted)
                answer.prompt_logprobs.append(value)
                answer.prompt_top.append(top)
