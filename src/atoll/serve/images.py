"""Images of a request: data URLs to pictures, as `data.images` reads files of foreign origin."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from atoll.config import UserError, VisionConfig
from atoll.data.images.picture import Picture, stack
from atoll.data.images.reading import BadImage
from atoll.data.images.reading import read_image as read_bytes
from atoll.serve.errors import ApiError, bad_request

DATA_URL = re.compile(r"data:image/(png|jpeg|jpg|webp|gif);base64,", re.IGNORECASE)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # the decoders that bytes from outside may reach
MOST_PATCHES = 16384  # of one image


@dataclass(frozen=True)
class Sent:
    """An image of a request, and a digest of its bytes."""

    picture: Picture
    digest: bytes


def read_image(part: dict[str, Any], vision: VisionConfig | None, max_pixels: int, where: str) -> Sent:
    """The image of an OpenAI content part. Raises `ApiError`, 400: no tower, no data URL, no image, one that is too large."""
    if vision is None:
        raise bad_request("this model has no vision tower: it reads text alone", where, "unsupported_image")
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    found = DATA_URL.match(url) if isinstance(url, str) else None
    if not isinstance(url, str) or found is None:
        raise bad_request(
            "an image is sent within the request, as data:image/png;base64,... (png, jpeg, webp, gif)", where, "invalid_image"
        )
    try:
        content = base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request("the image's base64 is broken", where, "invalid_image") from error
    try:
        picture = read_bytes(content, vision, MOST_PATCHES, pixels=max_pixels, formats=FORMATS)
    except BadImage as error:
        raise bad_request(f"the image cannot be read: {error}", where, "invalid_image") from error
    except UserError as error:
        raise ApiError(501, str(error)) from error
    return Sent(picture, hashlib.blake2b(content, digest_size=16).digest())


def together(sent: Sequence[Sent]) -> tuple[Tensor, Tensor]:
    """`pixel_values` and `grid_thws` of the images, in their order."""
    return stack([s.picture for s in sent])
