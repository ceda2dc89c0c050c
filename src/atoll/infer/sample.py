"""Continue text with a model and its tokenizer, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.config import ModelConfig, UserError
from atoll.data.chat import render, tokenize
from atoll.data.tokenizer import Tokenizer, check_fits
from atoll.infer import sampling
from atoll.infer.chat_parser import ChatParser
from atoll.infer.generate import generate
from atoll.infer.parsed import Event, Parsed
from atoll.infer.stream import TextStream


def continue_text(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int | None = None,
    seed: int | None = 0,
    write: Callable[[str], object] | None = None,
    echo: bool = False,
) -> str:
    """The continuation of `prompt` (as the start of a document), up to `tokens` tokens or the end of the document.

    `write` gets each piece of text as soon as its characters are whole; with `echo` the prompt comes first. Raises `UserError`, before
    anything is written, for settings that cannot be and for a tokenizer with ids the model does not know.
    """
    config: ModelConfig = model.config
    _check(config, tokenizer, tokens, temperature, top_p, top_k)
    if echo and write is not None:
        write(prompt)
    stream, pieces = TextStream(tokenizer), []

    def put(text: str) -> None:
        if text:
            pieces.append(text)
            if write is not None:
                write(text)

    def on_token(ids: Tensor) -> None:
        if not tokenizer.is_special(int(ids[0])):
            put(stream.feed(int(ids[0])))

    ids = torch.tensor([[config.bos_token_id, *tokenizer.encode(prompt)]], device=next(model.parameters()).device)
    generate(model, ids, tokens, temperature, top_p, top_k, seed, stop_ids=(config.eos_token_id,), on_token=on_token)
    put(stream.close())
    return "".join(pieces)


def reply(
    model: Any,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    thinking: bool = True,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int | None = None,
    seed: int | None = 0,
    on_event: Callable[[Event], object] | None = None,
) -> Parsed:
    """The assistant's next message after `messages` (as `atoll.data.chat.render` takes them), up to `tokens` tokens.

    `on_event` gets each piece of it as it comes. Raises `UserError` for settings or messages that cannot be, and for a tokenizer without
    the chat format's markers.
    """
    config: ModelConfig = model.config
    _check(config, tokenizer, tokens, temperature, top_p, top_k)
    prompt, _ = tokenize(render(messages, tools, thinking, add_generation_prompt=True), tokenizer)
    parser = ChatParser(tokenizer, thinking)

    def put(events: list[Event]) -> None:
        for event in events:
            if on_event is not None:
                on_event(event)

    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    stops = (config.eos_token_id, tokenizer.special["<|end_of_msg|>"])
    generate(model, ids, tokens, temperature, top_p, top_k, seed, stop_ids=stops, on_token=lambda new: put(parser.feed(int(new[0]))))
    put(parser.close())
    return parser.message


def _check(config: ModelConfig, tokenizer: Tokenizer, tokens: int, temperature: float, top_p: float, top_k: int | None) -> None:
    check_fits(tokenizer, config, "tokenizer.json")
    sampling.check(temperature, top_p, top_k)
    if tokens < 0:
        raise UserError(f"tokens = {tokens}: 0 or more is expected")
