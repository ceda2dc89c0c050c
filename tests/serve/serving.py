"""A server on a free port of the loopback, in this process, with a tiny random model: what the tests of this folder talk to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch
from conversations import TOKENIZER

from atoll.config import ModelConfig, load_config
from atoll.infer.engine import Engine, EngineSettings
from atoll.model import Model
from atoll.serve.app import create_app
from atoll.serve.process import Server, bind
from atoll.serve.service import Service
from atoll.serve.settings import ServerSettings

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


class Served:
    """A running server: `url`, its `service`, and the engine inside."""

    def __init__(self, model: Model, settings: ServerSettings, engine: EngineSettings, tokenizer: Any = TOKENIZER) -> None:
        self.socket = bind(settings)
        self.settings = dataclasses.replace(settings, port=self.socket.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.settings.port}"
        self.model, self.tokenizer = model, tokenizer
        self.engine = Engine(model, settings=dataclasses.replace(engine, max_length=settings.max_model_len))
        self.app = create_app(lambda: Service(model.config, tokenizer, self.engine, self.settings), self.settings)
        self.server = Server(self.app, self.settings)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.socket])), daemon=True)

    @property
    def service(self) -> Service:
        return self.app.service


@contextlib.contextmanager
def served(
    model: Model | None = None, engine: EngineSettings | None = None, tokenizer: Any = TOKENIZER, **settings: Any
) -> Iterator[Served]:
    """A server until the block ends."""
    made = Served(
        model or small_model(), ServerSettings(**{"port": 0, "max_model_len": 2048, **settings}), engine or EngineSettings(), tokenizer
    )
    made.thread.start()
    while not made.server.started:
        assert made.thread.is_alive()
    try:
        yield made
    finally:
        made.server.should_exit = True
        made.thread.join(20)
        made.socket.close()
        assert not made.thread.is_alive()


__all__ = ["Served", "load_config", "served", "small_model"]
