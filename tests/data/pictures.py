"""Image files made for tests, odd ones among them, and micro settings of runs with pictures."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of `image` as a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def gradient(width: int, height: int) -> np.ndarray:
    """uint8 [H, W, 3], each pixel unlike its neighbours."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), (x + y) % 256], -1).astype(np.uint8)


def png(width: int, height: int) -> bytes:
    """A colour picture."""
    return saved(Image.fromarray(gradient(width, height)))


def png_chunks(width: int, height: int, bits: int, colour: int, data: bytes) -> bytes:
    """A PNG written by hand: for depths that Pillow does not write, and headers that lie."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
