"""Documents of text and pictures as ids: the placeholder once for each feature, never a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.config import ModelConfig, UserError
from atoll.data.images.picture import Picture, features_of


@dataclass(frozen=True)
class Item:
    """A picture that is read when its turn comes: its grid is known, `load` gives it."""

    grid: tuple[int, int, int]
    load: Callable[[], Picture]


@dataclass(frozen=True)
class Sample:
    """A document: ids int64 [T], which of them are targets (bool), and its items in the order of their placeholders.

    `prompt`: tokens before what is said of the last item, 0 where nothing is; `kind` and `truth`: of a rendered picture, what it shows.
    """

    ids: np.ndarray
    trained: np.ndarray
    items: tuple[Item, ...]
    kind: str = ""
    truth: str = ""
    prompt: int = 0


def document(parts: Sequence[Sequence[int] | Item], model: ModelConfig) -> Sample:
    """bos, the parts (ids of text, or items), eos. Every token of text is a target."""
    assert model.vision is not None
    mark = model.vision.media_placeholder_token_id
    ids = [model.bos_token_id]
    for part in parts:
        ids += [mark] * features_of(part.grid, model.vision) if isinstance(part, Item) else part
    whole = np.asarray([*ids, model.eos_token_id], dtype=np.int64)
    items = tuple(part for part in parts if isinstance(part, Item))
    said = int(np.flatnonzero(whole == mark)[-1]) + 2 if items else 0  # a token of text follows an item in every prompt
    return Sample(whole, whole != mark, items, prompt=said if said < len(whole) - 1 else 0)


def runs(ids: np.ndarray, items: Sequence[Item], model: ModelConfig) -> list[tuple[int, int]]:
    """Where in `ids` each item's placeholders begin and end."""
    assert model.vision is not None
    at = np.flatnonzero(ids == model.vision.media_placeholder_token_id)
    sizes = [features_of(item.grid, model.vision) for item in items]
    starts = np.cumsum([0, *sizes])[:-1]
    return [(int(at[s]), int(at[s]) + n) for s, n in zip(starts, sizes, strict=True)]


def pieces(sample: Sample, length: int, model: ModelConfig, name: str, cut: str = "move") -> list[Sample]:
    """`sample` in pieces of at most `length` tokens, none of which cuts an item.

    A piece that goes on with text begins with the token before it, as context. An item that would be cut begins the next piece. Raises
    `UserError` where an item is longer than a row, and, with `cut` "refuse", where one would be moved.
    """
    found, places = [], runs(sample.ids, sample.items, model)
    start, total = 0, len(sample.ids)
    while True:
        stop = min(total, start + length)
        broken = next(((a, b) for a, b in places if a < stop < b), None)
        if broken is not None:
            _check_fits(broken[1] - broken[0], length, name, cut)
            stop = broken[0]
        if stop - start > 1:  # a token alone predicts nothing
            items = tuple(item for item, (a, b) in zip(sample.items, places, strict=True) if start <= a and b <= stop)
            found.append(Sample(sample.ids[start:stop], sample.trained[start:stop], items))
        if stop == total:
            return found
        alone = any(a < stop <= b or (a == stop and b - a >= length) for a, b in places)
        start = stop if alone else stop - 1


def _check_fits(features: int, length: int, name: str, cut: str) -> None:
    if features > length:
        remedy = f"raise stages.length to {features}, or lower data.image_patches"
        raise UserError(f"stages: length = {length}: {name} has an image of {features:,} tokens, which a row cannot hold; {remedy}")
    if cut == "refuse":
        remedy = 'raise stages.length, or set data.image_cut = "move"'
        raise UserError(f"data.image_cut = {cut!r}: {name}: a row of {length:,} tokens would cut an image; {remedy}")
