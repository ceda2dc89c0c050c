"""Token ids in the open: POST /inference/v1/generate (ids in, ids out, as rollouts need them), /tokenize and /detokenize."""

from __future__ import annotations

import base64
import dataclasses
import io
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from torch import Tensor

from atoll.data.messages import whole as whole_text
from atoll.infer.request import Answer, Request, Step
from atoll.serve.answers import Ending
from atoll.serve.errors import bad_request
from atoll.serve.prompt import Options, build_prompt
from atoll.serve.protocol import DetokenizeRequest, GenerateRequest, TokenizeRequest
from atoll.serve.sending import Events, Json, unless_gone
from atoll.serve.service import Job, Service, usage
from atoll.serve.text import Token, finite


async def generate(service: Service, body: GenerateRequest, salt: str, receive: Any) -> Any:
    """The response, whole or as events. Raises `ApiError`."""
    arrived, asked = time.monotonic(), body.sampling_params
    service.check_model(body.model)
    service.choices(1, asked.n)
    service.check_ids(body.token_ids, "token_ids")
    service.logprobs(asked.prompt_logprobs, "prompt_logprobs")
    room = service.room(len(body.token_ids), asked.max_tokens, "token_ids")
    stops = {*(() if asked.ignore_eos else (service.model.eos_token_id,)), *(asked.stop_token_ids or [])}
    request = Request(
        body.token_ids,
        room,
        stop_ids=frozenset(stops),
        top_logprobs=max(service.logprobs(asked.logprobs, "logprobs"), asked.prompt_logprobs or 0),
        prompt_logprobs=asked.prompt_logprobs is not None,
        routing=body.return_routed_experts,
        salt=f"{salt}/{body.cache_salt or ''}",
    )
    requests = [dataclasses.replace(request, sampling=asked.sampling(i)) for i in range(asked.n)]
    answer = Generated(service, body, await service.start(requests, arrived))
    if body.stream:
        return Events(answer.events(), answer.job.close)
    try:
        return Json(await unless_gone(receive, answer.whole()))
    finally:
        answer.job.close()


class Generated:
    """One request's answers, put together from their steps."""

    def __init__(self, service: Service, body: GenerateRequest, job: Job) -> None:
        self.service, self.body, self.job = service, body, job
        self.endings = [Ending() for _ in range(body.sampling_params.n)]
        self.tokens: list[list[Token]] = [[] for _ in self.endings]
        self.head = {"request_id": body.request_id or uuid.uuid4().hex, "model": service.settings.name}

    async def whole(self) -> dict[str, Any]:
        """The response, when all is said."""
        async for index, step in self.job:
            self._take(index, step)
        choices = [self._entry(i, tokens, self.endings[i]) for i, tokens in enumerate(self.tokens)]
        return {**self.head, "choices": choices, "prompt_logprobs": self._prompt_logprobs(), "usage": self._usage()}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The response's chunks."""
        async for index, step in self.job:
            tokens = self._take(index, step)
            yield {**self.head, "choices": [self._entry(index, tokens, self.endings[index])]}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield {**self.head, "choices": [], "usage": self._usage()}

    def _take(self, index: int, step: Step) -> list[Token]:
        self.endings[index].note(step, False)
        tokens = [Token.of(step)] if step.id is not None else []
        self.tokens[index] += tokens
        self.job.note(index, self.endings[index])
        return tokens

    def _entry(self, index: int, tokens: list[Token], ending: Ending) -> dict[str, Any]:
        entry: dict[str, Any] = {"index": index, "token_ids": [t.id for t in tokens], "finish_reason": ending.finish, "logprobs": None}
        asked = self.body.sampling_params.logprobs
        if asked is not None:
            entry["logprobs"] = {"content": [self._logprob(t.id, t.logprob or 0.0, t.top[:asked]) for t in tokens]}
        if ending.answer is not None:
            entry |= {"routed_experts": routed(ending.answer.routing), "weight_versions": ending.answer.versions}
        return entry

    def _logprob(self, id: int, logprob: float, top: tuple[tuple[int, float], ...]) -> dict[str, Any]:
        names = self.service.names
        others = [{"token": f"token_id:{i}", "logprob": finite(value), "bytes": list(names.bytes(i))} for i, value in top]
        return {"token": f"token_id:{id}", "logprob": finite(logprob), "bytes": list(names.bytes(id)), "top_logprobs": others}

    def _prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """vLLM's form: of each token of the prompt but the first, id → log-probability, rank (1 is the likeliest) and text."""
        answer: Answer | None = self.endings[0].answer
        if answer is None or answer.prompt_logprobs is None or answer.prompt_top is None:
            return None
        out: list[dict[str, Any] | None] = [None]
        for id, value, top in zip(self.body.token_ids[1:], answer.prompt_logprobs, answer.prompt_top, strict=True):
            ranks = {token: rank for rank, (token, _) in enumerate(top, 1)}
            shown = {**dict(top[: self.body.sampling_params.prompt_logprobs]), id: value}
            out.append(
                {
                    str(i): {"logprob": finite(v), "rank": ranks.get(i), "decoded_token": self.service.names.text(i)}
                    for i, v in shown.items()
                }
            )
        return out

    def _usage(self) -> dict[str, Any]:
        return usage(len(self.body.token_ids), self.endings)


def routed(routing: Tensor | None) -> str | None:
    """Experts [layers, tokens, k] as base64 of a .npy [tokens, layers, k], uint8 or uint16: prompt and answer but the last token,
    which was never fed."""
    if routing is None:
        return None
    kind = np.uint8 if not routing.numel() or int(routing.max()) < 256 else np.uint16
    file = io.BytesIO()
    np.save(file, routing.transpose(0, 1).contiguous().cpu().numpy().astype(kind), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


async def tokenize(service: Service, body: TokenizeRequest) -> Any:
    """Ids of a text, with the model's bos, or of a conversation."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("one of prompt and messages is expected", "prompt")
    ids = await service.prepare(_tokenize, service, body)
    out: dict[str, Any] = {"count": len(ids), "max_model_len": service.settings.max_model_len, "tokens": ids}
    if body.return_token_strs:
        out["token_strs"] = await service.prepare(lambda: [service.names.text(i) for i in ids])
    return Json(out)


def _tokenize(service: Service, body: TokenizeRequest) -> list[int]:
    if body.prompt is None:
        options = Options(body.tools or None, service.settings.thinking)
        return build_prompt(body.messages, options, service.tokenizer, service.memory, "").ids
    service.check_size(len(body.prompt), "prompt")
    bos = [service.model.bos_token_id] if body.add_special_tokens else []
    return bos + service.tokenizer.encode(whole_text(body.prompt, "prompt"))


async def detokenize(service: Service, body: DetokenizeRequest) -> Any:
    """Text of ids, special tokens spelt out."""
    size = service.model.vocab_size
    if wrong := [i for i in body.tokens if i >= size]:
        raise bad_request(f"token {wrong[0]}: ids from 0 to {size - 1} are expected", "tokens")
    return Json({"prompt": await service.prepare(service.tokenizer.decode, body.tokens)})
