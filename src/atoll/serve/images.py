"""Images of a request: data URLs to patches, as the vision tower reads them. PIL is imported when the first image comes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.config import VisionConfig
from atoll.data.images.reading import as_seen
from atoll.serve.errors import ApiError, bad_request

DATA_URL = re.compile(r"data:image/(png|jpeg|jpg|webp|gif);base64,", re.IGNORECASE)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # the decoders that bytes from outside may reach
MOST_PATCHES, MOST_ON_A_SIDE = 16384, 512  # of one image; the blueprint's limits of a frame
SHORTEST = 1  # pixels of a side, after scaling


@dataclass(frozen=True)
class Picture:
    """An image ready for the tower: `patches` float32 [rows · columns, 3, p, p], row by row, and its size, upright."""

    width: int
    height: int
    patches: Tensor
    grid: tuple[int, int, int]
    digest: bytes

    def features(self, vision: VisionConfig) -> int:
        """Tokens it takes in the prompt."""
        return self.grid[1] * self.grid[2] // math.prod(vision.merge_kernel_size)


def read_image(part: dict[str, Any], vision: VisionConfig | None, max_pixels: int, where: str) -> Picture:
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
    return _picture(content, vision, max_pixels, where)


def _picture(content: bytes, vision: VisionConfig, max_pixels: int, where: str) -> Picture:
    try:
        from PIL import Image as files
    except ImportError as error:
        raise ApiError(501, "images need Pillow on the server: pip install 'atoll[images]'") from error
    try:
        with files.open(io.BytesIO(content), formats=FORMATS) as file:
            width, height = file.size
            if width * height > max_pixels:  # read from the header: nothing is decoded yet
                raise bad_request(f"the image has {width * height:,} pixels, {max_pixels:,} at most", where, "invalid_image")
            picture = as_seen(file).convert("RGBA")
    except ApiError:
        raise
    except Exception as error:  # decoders of foreign bytes raise whatever they like
        raise bad_request("the image cannot be read", where, "invalid_image") from error
    pixels = _scaled(picture, vision.patch_size)
    patches, grid = to_patches(pixels, vision)
    return Picture(picture.width, picture.height, patches, grid, hashlib.blake2b(content, digest_size=16).digest())


def _scaled(picture: Any, patch: int) -> Tensor:
    """RGBA to float32 [3, H, W] in -1 to 1, made smaller where it has too many patches, never larger; what shines through is chequered."""
    from PIL import Image as files

    width, height = picture.size
    whole = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(MOST_PATCHES / whole), MOST_ON_A_SIDE * patch / width, MOST_ON_A_SIDE * patch / height)
    size = (max(SHORTEST, int(scale * width)), max(SHORTEST, int(scale * height)))
    resized = picture if size == (width, height) else picture.resize(size, files.Resampling.BICUBIC)
    pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(size[1], size[0], 4).permute(2, 0, 1).float() / 255
    colour, alpha = pixels[:3], pixels[3:]
    rows, columns = torch.arange(size[1]) // 8, torch.arange(size[0]) // 8
    board = torch.where((rows[:, None] + columns) % 2 == 0, 1.0, 180 / 255)
    return (colour * alpha + board * (1 - alpha)) * 2 - 1


def to_patches(pixels: Tensor, vision: VisionConfig) -> tuple[Tensor, tuple[int, int, int]]:
    """[3, H, W] as ([rows · columns, 3, p, p], (1, rows, columns)), black below and to the right up to whole features."""
    p, (down, across) = vision.patch_size, vision.merge_kernel_size
    _, height, width = pixels.shape
    missing = -height % (p * down), -width % (p * across)
    padded = torch.nn.functional.pad(pixels, (0, missing[1], 0, missing[0]), value=-1.0)
    rows, columns = padded.shape[1] // p, padded.shape[2] // p
    patches = padded.view(3, rows, p, columns, p).permute(1, 3, 0, 2, 4).reshape(rows * columns, 3, p, p)
    return patches.contiguous(), (1, rows, columns)
