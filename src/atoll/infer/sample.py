"""Continue text with a model and its tokenizer, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.config import UserError
from atoll.infer.generate import generate
from atoll.infer.stream import TextStream


class TextTokenizer(Protocol):
    """What sampling needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Tokens it may give."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special tokens added."""
        ...

    def token_bytes(self, id: int) -> bytes:
        """The bytes that token `id` stands for."""
        ...


def check_tokenizer(tokenizer: TextTokenizer, vocab_size: int, name: str = "tokenizer.json") -> None:
    """Refuse a tokenizer that gives ids the model has no embedding for. Raises `UserError`."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(f"{name}: {tokenizer.vocab_size} tokens, but the model knows {vocab_size}; use the tokenizer it was trained with")


def continue_text(
    model: nn.Module,
    tokenizer: TextTokenizer,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int | None = None,
    seed: int | None = 0,
    write: Callable[[str], object] | None = None,
) -> str:
    """The continuation of `prompt` (as the start of a document), up to `tokens` tokens or the end of the document.

    `write` gets each piece of text as soon as its characters are whole.
    """
    config = model.config
    check_tokenizer(tokenizer, config.vocab_size)
    stream, pieces = TextStream(tokenizer), []

    def put(text: str) -> None:
        if text:
            pieces.append(text)
            if write is not None:
                write(text)

    def on_token(ids: Tensor) -> None:
        id = int(ids[0])
        if id < tokenizer.vocab_size and id not in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
            put(stream.feed(id))  # an id past the tokenizer's own has no text

    ids = torch.tensor([[config.bos_token_id, *tokenizer.encode(prompt)]], device=next(model.parameters()).device)
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    generate(model, ids, tokens, **options, stop_ids=(config.eos_token_id,), on_token=on_token)
    put(stream.close())
    return "".join(pieces)
