"""Image files of foreign origin to pictures: the right pixels, or one clear line (`BadImage`). Pillow is imported when the first comes.

Upright by its EXIF orientation; grey, palette, CMYK, one-bit and 16-bit as colour of 8 bits; what is transparent on a chessboard; an
animated file as one item of frames spread evenly over it. Nothing is decoded before its header's size was found bearable.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config import UserError, VisionConfig
from atoll.data.images.picture import MOST_PATCHES, Picture, scaled, to_picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # decoders that bytes from outside may reach
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
MOST_BYTES = 1 << 28  # of a file
MOST_PIXELS = 1 << 26  # of a frame, as its header says
MOST_FRAMES = 256  # of an animated file that are looked at


class BadImage(ValueError):
    """One line on why a file gives no picture."""


def read_image(
    content: bytes, vision: VisionConfig, most: int = MOST_PATCHES, *, pixels: int = MOST_PIXELS, formats: tuple[str, ...] = FORMATS
) -> Picture:
    """The picture in `content`, the bytes of a file of one of `formats`, scaled down to `most` patches, its frames of at most `pixels`.

    Raises `BadImage`; `UserError` where Pillow is missing.
    """
    files = _pillow()
    if not content:
        raise BadImage("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd EXIF and the like; sizes are judged here
            with files.open(io.BytesIO(content), formats=formats) as image:
                return _picture(image, vision, most, pixels)
    except BadImage:
        raise
    except files.DecompressionBombError:
        raise BadImage(f"too large: over {pixels:,} pixels") from None
    except files.UnidentifiedImageError:
        raise BadImage("not an image, or of a kind that is not read") from None
    except MemoryError:
        raise BadImage("too large for this machine's memory") from None
    except Exception as error:  # decoders of foreign bytes raise whatever they like
        said = " ".join(str(error).split())[:100] or type(error).__name__
        raise BadImage(f"damaged ({said})") from None


def read_file(path: Path, vision: VisionConfig, most: int = MOST_PATCHES) -> Picture:
    """The picture in the ordinary file at `path`. Raises `BadImage`."""
    return read_image(bytes_of(path), vision, most)


def bytes_of(path: Path, limit: int = MOST_BYTES) -> bytes:
    """The bytes of an ordinary file of at most `limit`. Raises `BadImage`: no file, a pipe or device, too large."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise BadImage("no ordinary file")
            if about.st_size > limit:
                raise BadImage(f"{about.st_size:,} bytes, {limit:,} at most")
            return file.read(limit)
    except OSError as error:
        raise BadImage(f"cannot be read ({error.strerror or error})") from None


def below(root: Path, name: str) -> Path:
    """The file `name` in the folder `root`, links resolved. Raises `BadImage` where it lies outside it."""
    if not name or "\0" in name or Path(name).is_absolute():
        raise BadImage("a path within the data's own folder is expected")
    top = root.resolve()
    path = (top / name).resolve()
    if not path.is_relative_to(top):
        raise BadImage("lies outside the data's own folder")
    return path


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise UserError("images need Pillow: pip install 'atoll[vision]'") from error
    return PIL.Image


def _picture(image: Any, vision: VisionConfig, most: int, pixels: int) -> Picture:
    _bearable(image.size, pixels)
    count = min(MOST_FRAMES, getattr(image, "n_frames", 1))
    chosen = np.unique(np.linspace(0, count - 1, min(count, vision.init_pos_emb_time)).round().astype(int)).tolist()
    frames, sizes = [], []
    for number in chosen:
        if count > 1:
            image.seek(number)
            _bearable(image.size, pixels)  # pages of a TIFF are each as they like
        upright = _upright(image)
        sizes.append(upright.size)
        frames.append(scaled(_colour(upright), vision.patch_size, most))
    same = [frame for frame in frames if frame.shape == frames[0].shape]
    return to_picture(same, vision, sizes[0])


def _bearable(size: tuple[int, int], most: int) -> None:
    if size[0] * size[1] > most:
        raise BadImage(f"too large: {size[0]:,} x {size[1]:,} pixels, {most:,} at most")


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # EXIF that cannot be read says nothing
        return image.copy()


def _colour(image: Any) -> Any:
    """The image in mode RGB, or RGBA where anything may shine through."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return _deep(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        return image.convert("RGBA")
    return image.convert("RGB")


def _deep(image: Any) -> Any:
    """Grey of more than 8 bits as 8 bits."""
    from PIL import Image

    values = np.asarray(image, dtype=np.float64)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise BadImage(f"pixels of mode {image.mode} outside 0 to 65,535, or fractions: save it as 8 or 16 bits")
    return Image.fromarray(np.rint(values / 257).astype(np.uint8))
