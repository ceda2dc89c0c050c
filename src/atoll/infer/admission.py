"""Which requests cannot be: said in one line before anything is spent on them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from atoll.config import UserError
from atoll.infer import draw
from atoll.infer.images import Image, locate
from atoll.infer.request import Request


def check(request: Request, model: Any, max_length: int) -> list[Image]:
    """The request's images. Raises `UserError` naming field, value and remedy."""
    vocabulary, n = model.config.vocab_size, len(request.prompt)
    if not n:
        raise UserError("prompt is empty: one token at least is expected")
    for name, ids in (("prompt", request.prompt), ("stop_ids", request.stop_ids)):
        wrong = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocabulary), None)
        if wrong is not None:
            raise UserError(f"{name} holds token {wrong!r}: whole numbers from 0 to {vocabulary - 1} are expected")
    if request.max_tokens < 0:
        raise UserError(f"max_tokens = {request.max_tokens}: 0 or more is expected")
    if n + request.max_tokens > max_length:
        raise UserError(f"prompt of {n} tokens and max_tokens = {request.max_tokens}: together over max_length = {max_length}; shorten one")
    if not 0 <= request.top_logprobs <= vocabulary:
        raise UserError(f"top_logprobs = {request.top_logprobs}: 0 to {vocabulary} is expected")
    if any(not 0 <= t <= n for t in request.turns) or any(a > b for a, b in pairwise(request.turns)):
        raise UserError(f"turns = {list(request.turns)[:8]}: ascending positions from 0 to the prompt's {n} are expected")
    draw.check(request.sampling, vocabulary)
    return locate(model, request)
