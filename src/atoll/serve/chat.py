"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from atoll.infer.request import Request
from atoll.serve.answers import ChatPiece, ChatReader, Ending
from atoll.serve.errors import bad_request
from atoll.serve.grammar import Grammar, wanted
from atoll.serve.prompt import Options, Prompt, build_prompt, take_images
from atoll.serve.protocol import ChatRequest
from atoll.serve.sending import Events, Json, unless_gone
from atoll.serve.service import Job, Service, usage
from atoll.serve.text import Token


async def chat(service: Service, body: ChatRequest, salt: str, receive: Any) -> Any:
    """The response, whole or as events. Raises `ApiError`."""
    arrived = time.monotonic()
    service.check_model(body.model)
    service.choices(1, body.n)
    _check(service, body)
    salt = f"{salt}/{body.cache_salt or ''}"
    options = _options(body, service.settings.thinking)
    prompt, grammar = await service.prepare(_prepare, service, body, options, salt)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    room = service.room(len(prompt.ids), asked, "messages")
    job = await service.start([_request(service, body, prompt, room, grammar, salt, i) for i in range(body.n)], arrived)
    for how, count in prompt.history.items():
        service.metrics.history.add(count, message=how)
    answer = Chat(service, body, prompt, options.thinking, job)
    if body.stream:
        return Events(answer.events(), job.close)
    try:
        return Json(await unless_gone(receive, answer.whole()))
    finally:
        job.close()


def _check(service: Service, body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs = true", "top_logprobs")
    service.logprobs(body.top_logprobs, "top_logprobs")
    texts = [part.get("text") for message in body.messages for part in _parts(message)]
    service.check_size(sum(len(text) for text in texts if isinstance(text, str)), "messages")


def _parts(message: Any) -> list[dict[str, Any]]:
    """The parts of a message that is not checked yet."""
    content = message.get("content") if isinstance(message, dict) else None
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else [{"text": content}]


def _options(body: ChatRequest, thinking: bool) -> Options:
    return Options(body.tools or None, body.thinks(thinking), body.effort(), body.tool_choice, body.response_format)


def _prepare(service: Service, body: ChatRequest, options: Options, salt: str) -> tuple[Prompt, Grammar | None]:
    """Tokens and grammar of a request: work for a thread."""
    s = service.settings
    messages, pictures = take_images(body.messages, service.model.vision, s.max_image_pixels, s.max_images)
    prompt = build_prompt(messages, options, service.tokenizer, service.memory, salt, pictures, service.model.vision)
    wish = wanted(options)
    if not wish or (wish.schema is None and not service.grammars.available):
        return prompt, None
    return prompt, service.grammars.compile(wish, options.thinking)


def _request(service: Service, body: ChatRequest, prompt: Prompt, room: int, grammar: Grammar | None, salt: str, choice: int) -> Request:
    stops = {service.model.eos_token_id, service.tokenizer.special["<|end_of_msg|>"], *(body.stop_token_ids or [])}
    return Request(
        prompt.ids,
        room,
        body.sampling(choice),
        frozenset(stops),
        top_logprobs=body.top_logprobs or 0 if body.logprobs else 0,
        turns=prompt.turns,
        salt=salt,
        constraint=grammar.copy() if grammar is not None else None,
        pixel_values=prompt.pixel_values,
        grid_thws=prompt.grid_thws,
    )


class Chat:
    """One request's answers, put together from their steps."""

    def __init__(self, service: Service, body: ChatRequest, prompt: Prompt, thinking: bool, job: Job) -> None:
        self.service, self.body, self.prompt, self.job = service, body, prompt, job
        self.readers = [ChatReader(service.tokenizer, thinking, body.stops()) for _ in range(body.n)]
        self.head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.settings.name}

    async def whole(self) -> dict[str, Any]:
        """The response, when all is said."""
        pieces: list[list[ChatPiece]] = [[] for _ in self.readers]
        async for index, step in self.job:
            pieces[index] += self.readers[index].feed(step)
            self._ended(index)
        choices = [self._choice(i, found) for i, found in enumerate(pieces)]
        out = {**self.head, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        return {**out, "prompt_token_ids": self.prompt.ids} if self.body.return_token_ids else out

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The response's chunks."""
        for i in range(self.body.n):
            yield self._chunk(i, {"role": "assistant", "content": ""})
        async for index, step in self.job:
            reader = self.readers[index]
            before = len(reader.ids)
            for piece in reader.feed(step):
                yield self._chunk(index, piece.delta, self._logprobs([piece]), ids=reader.ids[before:])
                before = len(reader.ids)
            if self._ended(index):
                yield self._chunk(index, {}, finish=reader.finish_reason(), ids=reader.ids[before:])
        if self.body.usage_wanted():
            yield {**self.head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()}

    def _ended(self, index: int) -> bool:
        """Whether a sequence is over; then it is booked and remembered."""
        reader = self.readers[index]
        if not self.job.note(index, reader.ending):
            return False
        if (ids := reader.kept_ids()) is not None:
            self.service.memory.put(self.prompt.place, reader.message, ids)
        self.service.metrics.malformed.add(reader.message.malformed)
        return True

    def _choice(self, index: int, pieces: list[ChatPiece]) -> dict[str, Any]:
        reader = self.readers[index]
        said = reader.message
        message: dict[str, Any] = {"role": "assistant", "content": reader.shown or (None if said.tool_calls else ""), "refusal": None}
        if said.thinking is not None:
            message |= {"reasoning": said.thinking, "reasoning_content": said.thinking}
        if said.tool_calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": call.name, "arguments": _text(call.arguments)}}
                for id, call in zip(reader.call_ids, said.tool_calls, strict=False)
            ]
        out = {"index": index, "message": message, "logprobs": self._logprobs(pieces), "finish_reason": reader.finish_reason()}
        out |= {"malformed": True} if said.malformed else {}
        return {**out, "token_ids": reader.ids} if self.body.return_token_ids else out

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None, ids: Any = ()) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        choice |= {"token_ids": list(ids)} if self.body.return_token_ids else {}
        out = {**self.head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**out, "usage": None} if self.body.usage_wanted() else out

    def _logprobs(self, pieces: list[ChatPiece]) -> dict[str, Any] | None:
        """Of the content's tokens, and beside them of the thoughts'."""
        if not self.body.logprobs:
            return None

        def named(tokens: list[Token]) -> list[dict[str, Any]]:
            return [self.service.names.chat_logprob(t) for t in tokens]

        content = [t for piece in pieces for t in piece.content]
        return {"content": named(content), "refusal": None, "reasoning": named([t for piece in pieces for t in piece.thinking])}

    def _usage(self) -> dict[str, Any]:
        endings: list[Ending] = [reader.ending for reader in self.readers]
        return usage(len(self.prompt.ids), endings)


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
