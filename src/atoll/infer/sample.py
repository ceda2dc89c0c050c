"""Continue text with a model and its tokenizer, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.config import ModelConfig, UserError
from atoll.data.chat import render, tokenize
from atoll.data.images.picture import Picture, stack
from atoll.data.images.reading import BadImage, read_file
from atoll.data.images.sources import MARK
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
    pictures: Sequence[Picture] = (),
) -> str:
    """The continuation of `prompt` (as the start of a document), up to `tokens` tokens or the end of the document.

    `pictures` stand where the prompt has `MARK`, or before it.

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

    begun = _illustrated(prompt, len(pictures), tokenizer, config) if pictures else tokenizer.encode(prompt)
    ids = torch.tensor([[config.bos_token_id, *begun]], device=next(model.parameters()).device)
    shown = _shown(pictures, ids.device)
    generate(model, ids, tokens, temperature, top_p, top_k, seed, stop_ids=(config.eos_token_id,), on_token=on_token, **shown)
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
    pictures: Sequence[Picture] = (),
) -> Parsed:
    """The assistant's next message after `messages` (as `atoll.data.chat.render` takes them), up to `tokens` tokens.

    `pictures` are those of the messages' image parts, in their order.

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
    stops, shown = (config.eos_token_id, tokenizer.special["<|end_of_msg|>"]), _shown(pictures, ids.device)

    def on_token(new: Tensor) -> None:
        put(parser.feed(int(new[0])))

    generate(model, ids, tokens, temperature, top_p, top_k, seed, stop_ids=stops, on_token=on_token, **shown)
    put(parser.close())
    return parser.message


def read_pictures(paths: Sequence[str], config: ModelConfig) -> list[Picture]:
    """The pictures in these files, as the model's tower takes them. Raises `UserError`: no tower, or a file that gives no picture."""
    if not paths:
        return []
    if config.vision is None:
        raise UserError(f"--image {paths[0]}: this model has no vision tower; leave it out, or take a model that reads images")
    found = []
    for path in paths:
        try:
            found.append(read_file(Path(path).expanduser(), config.vision))
        except BadImage as error:
            raise UserError(f"--image {path}: {error}") from None
    return found


def _illustrated(prompt: str, pictures: int, tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """Ids of a prompt with one placeholder a picture. What ends with a picture goes on in the next line, as a caption does."""
    if config.vision is None:
        raise UserError("pictures: this model has no vision tower")
    marks = prompt.count(MARK)
    if marks not in (0, pictures):
        raise UserError(f"prompt: {marks} {MARK} and {pictures} images; give as many, or no {MARK}, and images come first")
    pieces = prompt.split(MARK) if marks else [*[""] * pictures, prompt]
    pieces[-1] = pieces[-1] or "\n"
    ids: list[int] = []
    for i, piece in enumerate(pieces):
        ids += ([config.vision.media_placeholder_token_id] if i else []) + tokenizer.encode(piece)
    return ids


def _shown(pictures: Sequence[Picture], device: torch.device) -> dict[str, Tensor]:
    """The model's arguments of pictures."""
    if not pictures:
        return {}
    pixels, grids = stack(pictures)
    return {"pixel_values": pixels.to(device), "grid_thws": grids}


def _check(config: ModelConfig, tokenizer: Tokenizer, tokens: int, temperature: float, top_p: float, top_k: int | None) -> None:
    check_fits(tokenizer, config, "tokenizer.json")
    sampling.check(temperature, top_p, top_k)
    if tokens < 0:
        raise UserError(f"tokens = {tokens}: 0 or more is expected")
