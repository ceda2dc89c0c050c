"""POST /v1/completions: texts or token ids continued; with `echo`, the prompt's own log-probabilities too."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from atoll.data.messages import whole as whole_text
from atoll.infer.request import Request, Step
from atoll.infer.stream import TextStream
from atoll.serve.answers import CompletionReader
from atoll.serve.errors import bad_request
from atoll.serve.protocol import CompletionRequest
from atoll.serve.sending import Events, Json, unless_gone
from atoll.serve.service import Job, Service, usage
from atoll.serve.text import Token


async def complete(service: Service, body: CompletionRequest, salt: str, receive: Any) -> Any:
    """The response, whole or as events. Raises `ApiError`."""
    arrived = time.monotonic()
    service.check_model(body.model)
    _check(service, body)
    prompts = await service.prepare(_prompts, service, body)
    service.choices(len(prompts), body.n)
    salt = f"{salt}/{body.cache_salt or ''}"
    requests = [_request(service, body, ids, salt, i) for ids in prompts for i in range(body.n)]
    answer = Completion(service, body, prompts, await service.start(requests, arrived))
    if body.stream:
        return Events(answer.events(), answer.job.close)
    try:
        return Json(await unless_gone(receive, answer.whole()))
    finally:
        answer.job.close()


def _check(service: Service, body: CompletionRequest) -> None:
    service.logprobs(body.logprobs, "logprobs")
    if body.suffix:
        raise bad_request("suffix: this model writes on at the end alone", "suffix")
    if body.best_of not in (None, body.n):
        raise bad_request("best_of: as many as n alone", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens = 0 leaves nothing to answer but with echo", "max_tokens")


def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Token ids of every prompt: work for a thread. A text begins with the model's bos."""
    given = body.prompt
    prompts: list[Any] = [given] if isinstance(given, str) or not given or isinstance(given[0], int) else list(given)
    if len(prompts) > service.settings.max_choices:
        service.choices(len(prompts), body.n)
    out: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            service.check_size(len(prompt), "prompt")
            bos = [service.model.bos_token_id] if body.add_special_tokens else []
            prompt = bos + service.tokenizer.encode(whole_text(prompt, "prompt"))
        if not prompt:
            raise bad_request("prompt is empty: one token at least is expected", "prompt")
        service.check_ids(prompt, "prompt")
        out.append(prompt)
    return out


def _request(service: Service, body: CompletionRequest, ids: list[int], salt: str, choice: int) -> Request:
    scored = bool(body.echo) and body.logprobs is not None
    room = service.room(len(ids), 16 if body.max_tokens is None else body.max_tokens, "prompt")
    return Request(
        ids,
        room,
        body.sampling(choice),
        frozenset({service.model.eos_token_id, *(body.stop_token_ids or [])}),
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=scored,
        salt=salt,
    )


@dataclass
class Choice:
    """One answer: its prompt, what reads its steps, and whether its prompt was sent back already."""

    prompt: list[int]
    echoed: str
    reader: CompletionReader
    tokens: list[Token]
    text: str = ""


class Completion:
    """One request's answers, put together from their steps. Answer i of prompt p has index p · n + i."""

    def __init__(self, service: Service, body: CompletionRequest, prompts: list[list[int]], job: Job) -> None:
        self.service, self.body, self.prompts, self.job = service, body, prompts, job
        self.head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self.head["model"] = service.settings.name
        self.choices: list[Choice] = []
        for ids in prompts:
            echoed = service.tokenizer.decode(ids, skip_special=True) if body.echo else ""
            self.choices += [Choice(ids, echoed, CompletionReader(service.tokenizer, body.stops(), len(echoed)), []) for _ in range(body.n)]

    async def whole(self) -> dict[str, Any]:
        """The response, when all is said."""
        async for index, step in self.job:
            choice = self.choices[index]
            text, tokens = self._feed(index, step)
            choice.text += text
            choice.tokens += tokens
        choices = [self._entry(i, self._prompt(c) + c.text, self._prompt_tokens(c) + c.tokens) for i, c in enumerate(self.choices)]
        for entry, choice in zip(choices, self.choices, strict=True):
            entry["finish_reason"] = choice.reader.ending.finish
            if self.body.return_token_ids:
                entry |= {"prompt_token_ids": choice.prompt, "token_ids": choice.reader.ids}
        return {**self.head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The response's chunks. An echoed prompt comes first, but with its log-probabilities last, when they are known."""
        scored = self.body.logprobs is not None
        for i, choice in enumerate(self.choices):
            if self.body.echo and not scored:
                yield self._chunk(i, choice.echoed, [])
        async for index, step in self.job:
            choice = self.choices[index]
            text, tokens = self._feed(index, step)
            finish = choice.reader.ending.finish if choice.reader.ending.over else None
            if self.body.echo and scored:  # in order: nothing can be sent before the prompt
                choice.text, choice.tokens = choice.text + text, choice.tokens + tokens
                if finish is None:
                    continue
                text, tokens = choice.echoed + choice.text, self._prompt_tokens(choice) + choice.tokens
            if text or tokens or finish:
                ids = [step.id] if step.id is not None else []
                yield self._chunk(index, text, tokens, finish, ids)
        if self.body.usage_wanted():
            yield {**self.head, "choices": [], "usage": self._usage()}

    def _feed(self, index: int, step: Step) -> tuple[str, list[Token]]:
        reader = self.choices[index].reader
        text, tokens = reader.feed(step)
        self.job.note(index, reader.ending)
        return text, tokens

    def _prompt(self, choice: Choice) -> str:
        return choice.echoed if self.body.echo else ""

    def _prompt_tokens(self, choice: Choice) -> list[Token]:
        """The prompt's tokens where they are echoed with log-probabilities; the first has none."""
        answer = choice.reader.ending.answer
        if answer is None or answer.prompt_logprobs is None or answer.prompt_top is None:
            return []
        out, stream, offset = [], TextStream(self.service.tokenizer), 0
        values = [None, *answer.prompt_logprobs]
        for token, value, top in zip(choice.prompt, values, [(), *answer.prompt_top], strict=True):
            out.append(Token(token, value, top, offset))
            offset += 0 if self.service.tokenizer.is_special(token) else len(stream.feed(token))
        return out

    def _entry(self, index: int, text: str, tokens: list[Token]) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = self.service.names.completion_logprobs(tokens, self.body.return_tokens_as_token_ids)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, index: int, text: str, tokens: list[Token], finish: str | None = None, ids: Any = ()) -> dict[str, Any]:
        entry = {**self._entry(index, text, tokens), "finish_reason": finish}
        entry |= {"token_ids": list(ids)} if self.body.return_token_ids else {}
        out = {**self.head, "choices": [entry]}
        return {**out, "usage": None} if self.body.usage_wanted() else out

    def _usage(self) -> dict[str, Any]:
        return usage(sum(map(len, self.prompts)), [c.reader.ending for c in self.choices])
