"""Images of a request: where each stands in its prompt, by what it is recognised, and its embeddings when its turn comes.

Each image goes through the tower by itself, so that its embeddings do not depend on what else the prompt shows.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.config import UserError
from atoll.infer.request import Request
from atoll.nn.media import place_media


@dataclass
class Image:
    """`length` placeholders from `start` on in the prompt; its patches and grid, and its features [length, D] once they are needed."""

    start: int
    length: int
    digest: bytes
    pixels: Tensor
    grid: Tensor
    features: Tensor | None = None


def locate(model: Any, request: Request) -> list[Image]:
    """The images of `request`. Raises `UserError` where placeholders and images do not fit, or the model reads none."""
    vision = model.config.vision
    if request.pixel_values is None and request.grid_thws is None:
        if vision is not None and vision.media_placeholder_token_id in request.prompt:
            raise UserError(f"prompt holds media placeholders (id {vision.media_placeholder_token_id}) without pixel_values; give both")
        return []
    if vision is None:
        raise UserError("pixel_values: this model has no vision tower; take one that has, or leave the images out")
    if request.pixel_values is None or request.grid_thws is None:
        raise UserError("pixel_values and grid_thws: images come as both of the two")
    ids, mark = torch.tensor([request.prompt]), vision.media_placeholder_token_id
    try:
        model.vision_tower.grids(request.pixel_values, request.grid_thws)
        lengths = model.vision_tower.feature_lengths(request.grid_thws)
        if int(ids.eq(mark).sum()) != sum(lengths):
            raise ValueError(f"prompt holds {int(ids.eq(mark).sum())} media placeholders for images of {sum(lengths)} features: one each")
        place_media(ids, lengths, mark)
    except ValueError as error:
        raise UserError(str(error)) from None
    starts = ids[0].eq(mark).nonzero().flatten()[torch.tensor([0, *lengths[:-1]]).cumsum(0)].tolist()
    patches = request.pixel_values.split([math.prod(grid) for grid in request.grid_thws.tolist()])
    grids = request.grid_thws.split(1)
    return [Image(s, n, _digest(p, g), p, g) for s, n, p, g in zip(starts, lengths, patches, grids, strict=True)]


def _digest(pixels: Tensor, grid: Tensor) -> bytes:
    found = hashlib.sha256(str((grid.tolist(), pixels.dtype)).encode())
    found.update(pixels.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.digest()


def embed(model: Any, ids: Tensor, at: int, images: list[Image]) -> Tensor:
    """Input embeddings [1,T,D] of `ids` [1,T], which stand at `at` in a prompt with `images`. Features are dropped once all are used."""
    out = model.embed_text(ids)
    stop = at + ids.shape[1]
    for image in images:
        first, last = max(image.start, at), min(image.start + image.length, stop)
        if first >= last:
            continue
        features = image.features
        if features is None:
            features = image.features = model.features(image.pixels.to(model.device), image.grid)
        out[:, first - at : last - at] = features[first - image.start : last - image.start].to(out.dtype)
        if last == image.start + image.length:
            image.features = None
    return out
