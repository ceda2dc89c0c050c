"""Continue token ids with a model: one pass over the prompt, then one token at a time on its cache."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from atoll.config import UserError
from atoll.infer import sampling


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    cache: Any = None,
    stop_ids: Collection[int] = (),
    on_token: Callable[[Tensor], object] | None = None,
    pixel_values: Tensor | None = None,
    grid_thws: Tensor | None = None,
) -> Tensor:
    """`input_ids` int64 [B, T] continued by `model` (an `atoll.Model`): followed by up to `max_new_tokens` sampled ids, int64 [B, T + n].

    Rows share one length. With `cache`, `input_ids` continues what the cache holds; it then holds all but the last sampled token.
    Temperature 0 is greedy. The same `seed` gives the same ids. A row ends at the first of `stop_ids`, which is kept; rows that
    end early are filled with the model's padding id, and the loop ends when all rows have. `on_token` is called with each step's
    ids, int64 [B] on the CPU. `pixel_values` and `grid_thws` are the images of the prompt's placeholders, as in the model's forward; what
    is returned holds the prompt as given. The model's training mode is restored. Raises `UserError` for settings that cannot be.
    """
    _check(input_ids, max_new_tokens)
    images = {k: v for k, v in (("pixel_values", pixel_values), ("grid_thws", grid_thws)) if v is not None}
    if images:
        _check_ends_in_text(input_ids, model)
    sampling.check(temperature, top_p, top_k)
    was_training = model.training
    model.eval()
    try:
        cache = model.new_cache(input_ids.shape[0]) if cache is None else cache
        step = _Sampler(temperature, top_p, top_k, seed)
        return _loop(model, input_ids, max_new_tokens, cache, step, frozenset(stop_ids), on_token, images)
    finally:
        model.train(was_training)


def _check(input_ids: Tensor, max_new_tokens: int) -> None:
    if input_ids.dim() != 2 or input_ids.shape[0] < 1 or input_ids.shape[1] < 1:
        raise UserError(f"input_ids has shape {list(input_ids.shape)}: [rows, tokens] with at least one token is expected")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens = {max_new_tokens!r}: 0 or more is expected")


def _check_ends_in_text(input_ids: Tensor, model: Any) -> None:
    """The last token is fed by itself, after the images."""
    vision = model.config.vision
    if input_ids.shape[1] < 2 or (vision is not None and bool(input_ids[:, -1].eq(vision.media_placeholder_token_id).any())):
        raise UserError("input_ids end with an image: a prompt with images ends with at least one token of text")


class _Sampler:
    """Draws one step's tokens with random numbers of its own, on the CPU so that every device gives the same ones."""

    def __init__(self, temperature: float, top_p: float, top_k: int | None, seed: int | None) -> None:
        self.settings = (temperature, top_p, top_k)
        self.numbers = torch.Generator()
        if seed is None:
            self.numbers.seed()
        else:
            self.numbers.manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [B, V] → ids int64 [B] on the CPU."""
        probs = sampling.distribution(logits.cpu(), *self.settings)
        return sampling.draw(probs, torch.rand(probs.shape[0], generator=self.numbers, dtype=torch.float64))


def _loop(
    model: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    cache: Any,
    sample: _Sampler,
    stop_ids: frozenset[int],
    on_token: Callable[[Tensor], object] | None,
    images: dict[str, Tensor],
) -> Tensor:
    rows = input_ids.shape[0]
    done = torch.zeros(rows, dtype=torch.bool)
    pad = torch.full((rows,), model.config.pad_token_id)
    new: list[Tensor] = []
    if max_new_tokens and input_ids.shape[1] > 1:  # logits of the whole prompt would be its length times the vocabulary
        model(input_ids[:, :-1], cache=cache, logits=False, **images)
    feed = input_ids[:, -1:]
    while len(new) < max_new_tokens and not bool(done.all()):
        ids = torch.where(done, pad, sample(model(feed, cache=cache).logits[:, -1]))
        new.append(ids)
        done = done | torch.tensor([int(i) in stop_ids for i in ids])
        if on_token is not None:
            on_token(ids)
        feed = ids.unsqueeze(1).to(input_ids.device)
    return torch.cat([input_ids, *(ids.unsqueeze(1).to(input_ids.device) for ids in new)], dim=1)
