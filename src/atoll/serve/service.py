"""What every endpoint shares: the model's limits, the runner, the books; and a request's way through them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from atoll.config import ModelConfig, UserError
from atoll.data.messages import short
from atoll.data.tokenizer import Tokenizer
from atoll.infer.request import Request, Step
from atoll.serve.answers import Ending
from atoll.serve.errors import ApiError, bad_request, too_long
from atoll.serve.grammar import Grammars
from atoll.serve.memory import Memory
from atoll.serve.metrics import Metrics
from atoll.serve.runner import Runner, Stream
from atoll.serve.settings import ServerSettings
from atoll.serve.text import TokenNames


class Service:
    """One model being served. Made in the event loop, which its `runner` answers to."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer, engine: Any, settings: ServerSettings, reload: Any = None) -> None:
        self.model, self.tokenizer, self.settings, self.reload = model, tokenizer, settings, reload
        self.runner = Runner(engine, settings.max_live)
        self.names = TokenNames(tokenizer)
        self.memory = Memory(settings.memory_tokens)
        self.metrics = Metrics(engine.stats)
        self.grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_id, settings.max_schema)
        self.longest = max(1, int(tokenizer.bytes_table.max(initial=1)))  # bytes of a token
        self.created = int(time.time())
        self._preparing = 0  # requests being tokenised

    # ---------------------------------------------------------------- limits

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for a model that is not served here."""
        if name is not None and name != self.settings.name:
            raise ApiError(404, f"model {short(name)}: {self.settings.name!r} is served here", "model", "model_not_found")

    def check_size(self, characters: int, param: str) -> None:
        """Refuse, before it is tokenised, a text that no tokenisation could make short enough."""
        least = characters // self.longest
        if least > self.settings.max_model_len:
            raise too_long(least, self.settings.max_model_len, param)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises `ApiError` 400 for ids that the model does not have, and for images that are none."""
        size = self.model.vocab_size
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise bad_request(f"token {wrong}: ids from 0 to {size - 1} are expected", param)
        if self.model.vision is not None and self.model.vision.media_placeholder_token_id in ids:
            raise bad_request("token ids with an image's place in them: images are sent in chat messages", param)

    def room(self, prompt: int, asked: int | None, param: str) -> int:
        """Tokens that may be added to a prompt of so many. Raises `ApiError` 400 where what is asked for does not fit."""
        limit = self.settings.max_model_len
        if prompt + (1 if asked is None else asked) > limit:
            raise too_long(prompt + (asked or 1), limit, param)
        return min(limit - prompt, self.settings.default_tokens) if asked is None else asked

    def logprobs(self, asked: int | None, param: str) -> int:
        """How many of the likeliest tokens are given. Raises `ApiError` 400 for more than the server gives."""
        if (asked or 0) > self.settings.max_logprobs:
            raise bad_request(f"{param} = {asked}: {self.settings.max_logprobs} at most", param)
        return asked or 0

    def choices(self, prompts: int, n: int) -> None:
        """Raises `ApiError` 400 for more answers than one request may ask for."""
        if prompts * n > self.settings.max_choices:
            raise bad_request(f"{prompts} prompts with n = {n}: {self.settings.max_choices} answers at most", "n")

    # ---------------------------------------------------------------- a request's way

    async def prepare(self, work: Any, *args: Any) -> Any:
        """`in_thread`, for as many requests at once as the runner could take: a flood is refused before it is tokenised."""
        self.runner.check_room(self._preparing + 1)
        self._preparing += 1
        try:
            return await in_thread(work, *args)
        finally:
            self._preparing -= 1

    async def start(self, requests: Sequence[Request], arrived: float) -> Job:
        """Hand the requests to the engine. Raises `ApiError`."""
        try:
            stream = await self.runner.submit(requests, self.settings.timeout)
        except UserError as error:
            raise bad_request(str(error)) from error
        for request in requests:
            self.metrics.prompt_tokens.add(len(request.prompt))
        return Job(self, stream, arrived)


class Job:
    """A request's sequences under way. `close` has to be called, whatever happens: it stops those that nobody reads any more."""

    def __init__(self, service: Service, stream: Stream, arrived: float) -> None:
        self.service, self.stream, self.arrived = service, stream, arrived
        self._first: dict[int, float] = {}

    async def __aiter__(self) -> AsyncIterator[tuple[int, Step]]:
        metrics = self.service.metrics
        async for index, step in self.stream:
            if step.id is not None:
                metrics.new_tokens.add()
                if index not in self._first:
                    self._first[index] = time.monotonic()
                    metrics.first_token.observe(self._first[index] - self.arrived)
            yield index, step

    def note(self, index: int, ending: Ending) -> bool:
        """Whether a sequence is over, which books it. Raises `ApiError` where the engine failed it or the server cut it off."""
        metrics, now = self.service.metrics, time.monotonic()
        if ending.answer is None:
            if ending.finish is not None:  # a stop string, of which the engine does not know
                self.service.runner.cancel(self.stream, index)
            return False
        metrics.finished.add(reason=ending.finish or "cancelled")
        metrics.cached_tokens.add(ending.answer.cached)
        metrics.whole.observe(now - self.arrived)
        if ending.tokens > 1:
            metrics.between.observe((now - self._first[index]) / (ending.tokens - 1))
        if ending.finish == "error":
            raise ApiError(500, f"the engine could not go on: {ending.error or 'no reason is known'}", code="engine_error")
        if ending.finish == "cancelled":
            raise ApiError(503, "the answer was cut off: the server is stopping", code="shutting_down")
        return True

    def close(self) -> None:
        """Stop what still runs."""
        for _ in self.stream.open:
            self.service.metrics.finished.add(reason="abandoned")
        self.service.runner.cancel(self.stream)


def usage(prompt: int, endings: Sequence[Ending]) -> dict[str, Any]:
    """OpenAI's count of tokens. `prompt`: of all prompts, each counted once."""
    new = sum(e.tokens for e in endings)
    cached = [e.answer.cached for e in endings if e.answer is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": min(max(cached, default=0), prompt)},
        "completion_tokens_details": {"reasoning_tokens": sum(e.thinking_tokens for e in endings)},
    }


async def in_thread(work: Any, *args: Any) -> Any:
    """`work(*args)` beside the event loop; a `UserError` becomes 400."""
    try:
        return await asyncio.to_thread(work, *args)
    except UserError as error:
        raise bad_request(str(error), str(error).partition(" ")[0].partition("=")[0].rstrip(":")) from error
