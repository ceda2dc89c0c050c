"""A server on a free port of the loopback, in this process, with a tiny random model or a written one: what this folder's tests talk to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from conversations import TOKENIZER

from atoll.config import ModelConfig
from atoll.data.chat import render, tokenize
from atoll.infer.engine import Engine, EngineSettings
from atoll.infer.request import Answer, Request, Step
from atoll.model import Model
from atoll.serve.app import create_app
from atoll.serve.process import Server, bind
from atoll.serve.service import Service
from atoll.serve.settings import ServerSettings

CLOSE, END = TOKENIZER.special["<|close|>"], TOKENIZER.special["<|end_of_msg|>"]
SHAPES: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "kda_num_heads": 2, "kda_head_dim": 8,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 48,
    "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16,
}  # fmt: skip


def small_model(**change: Any) -> Model:
    """A random model whose vocabulary is that of `conversations.TOKENIZER`."""
    model = Model(ModelConfig(**{**SHAPES, **change}))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model.eval()


def small_engine(model: Model | None = None, **settings: Any) -> Engine:
    """The engine that the server has inside, alone."""
    return Engine(model or small_model(), settings=EngineSettings(**{"max_length": 2048, "device_mib": 64, "host_mib": 16, **settings}))


def written(message: dict[str, Any], thinking: bool = True) -> list[int]:
    """What a model writes, after the generation prefix, that says `message`."""
    before = [{"role": "user", "content": ""}]
    whole, _ = tokenize(render([*before, {"role": "assistant", **message}], thinking=thinking), TOKENIZER)
    prefix, _ = tokenize(render(before, thinking=thinking, add_generation_prompt=True), TOKENIZER)
    return whole[len(prefix) :]


class Scripted:
    """An engine that says what `script` gives for a request, a token every `pace` seconds; `gate`, when cleared, holds it."""

    def __init__(self, script: Callable[[Request], list[int]], pace: float = 0.0) -> None:
        self.pace = pace
        self.script, self.requests, self.gate = script, list[Request](), threading.Event()
        self.gate.set()
        self._left: dict[int, tuple[list[int], Answer]] = {}
        self._out: list[Step] = []
        self.cancelled: list[int] = []

    def submit(self, request: Request) -> int:
        self.requests.append(request)
        number = len(self.requests) - 1
        self._left[number] = (self.script(request)[: request.max_tokens], Answer([], [], [], "length"))
        return number

    def step(self) -> list[Step]:
        self.gate.wait(0.01)
        time.sleep(self.pace)
        out, self._out = self._out, []
        for number, (ids, answer) in list(self._left.items()) if self.gate.is_set() else []:
            id = ids[len(answer.ids)]
            answer.ids.append(id)
            finish = "stop" if id in self.requests[number].stop_ids else "length" if len(answer.ids) == len(ids) else None
            answer.finish = finish or "length"
            out.append(Step(number, id, -0.5, ((id, -0.5),), finish=finish, answer=answer if finish else None))
            if finish:
                del self._left[number]
        return out

    def cancel(self, sequence: int) -> None:
        if sequence in self._left:
            self.cancelled.append(sequence)
            _, answer = self._left.pop(sequence)
            self._out.append(Step(sequence, None, finish="cancelled", answer=dataclasses.replace(answer, finish="cancelled")))

    def idle(self) -> bool:
        return not (self._left or self._out)

    def stats(self) -> dict[str, Any]:
        return {"running": len(self._left)}

    def set_version(self, version: int) -> None:
        self.version = version


class Served:
    """A running server: `url`, its `service`, and the engine inside."""

    def __init__(self, model: ModelConfig, engine: Any, settings: ServerSettings, reload: Any = None) -> None:
        self.socket = bind(settings)
        self.settings = dataclasses.replace(settings, port=self.socket.getsockname()[1])
        self.url, self.engine = f"http://127.0.0.1:{self.settings.port}", engine
        self.app = create_app(lambda: Service(model, TOKENIZER, engine, self.settings, reload), self.settings)
        self.server = Server(self.app, self.settings)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.socket])), daemon=True)

    @property
    def service(self) -> Service:
        return self.app.service

    def until(self, holds: Callable[[], bool], seconds: float = 20) -> None:
        """Wait until `holds`; fails when it never does."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "what was waited for did not come"
            time.sleep(0.01)


@contextlib.contextmanager
def served(engine: Any = None, config: ModelConfig | None = None, reload: Any = None, **settings: Any) -> Iterator[Served]:
    """A server until the block ends; with `engine` in place of a model, that."""
    if engine is None:
        engine = small_engine()
    config = config or (engine.model.config if isinstance(engine, Engine) else ModelConfig(**SHAPES))
    made = Served(config, engine, ServerSettings(**{"port": 0, "max_model_len": 2048, **settings}), reload)
    made.thread.start()
    try:
        made.until(lambda: made.server.started or not made.thread.is_alive())
        assert made.server.started
        yield made
    finally:
        made.server.should_exit = True
        made.thread.join(20)
        made.socket.close()
        assert not made.thread.is_alive()
