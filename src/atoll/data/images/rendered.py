"""Pictures that need no download, each a function of its key: words drawn in a font, and handwritten digits.

Words are those of the Python library's own source, in matplotlib's bundled DejaVu Sans Mono or in fonts of the user's. Digits are the
1,797 that come with scikit-learn (UCI, 8 x 8 pixels, 16 greys), moved, turned and scaled a little. Held-out words are in no training
picture, nor are held-out digits.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config import DataConfig, UserError, VisionConfig
from atoll.data.images.drawing import draw
from atoll.data.images.picture import Picture, to_picture
from atoll.data.sources import walk
from atoll.data.split import unit_hash

LETTERS = 3, 9  # of a word
MET = 3  # times a word must be met in the library to be one
FONT_SIZES = 20, 23  # pixels, both drawn
DIGIT_SHARE = 0.3  # of the pictures drawn in training
SIDE = 28  # pixels of a digit's picture, and the least height of a word's
QUESTION = "what is this?"
KINDS = {"word": "the word ", "digit": "the digit "}  # what an answer begins with


@dataclass(frozen=True)
class Shown:
    """A picture, what kind of thing it shows, and that thing's name."""

    picture: Picture
    kind: str
    name: str


class Renderer:
    """Draws pictures by key. Held in memory: the words of a side, its digits, fonts in every size."""

    def __init__(self, config: DataConfig, vision: VisionConfig, heldout: bool) -> None:
        """Raises `UserError` where a package is missing, or a font cannot be read."""
        self.vision, self.heldout, self.seed = vision, heldout, config.seed
        self.words = [w for w in library_words() if (unit_hash(w) < config.heldout) == heldout]
        images, names = digits()
        side = [i for i in range(len(names)) if (unit_hash(f"digit {i}") < config.heldout) == heldout]
        self.digits, self.names = images[side], names[side]
        for what, found in (("words", self.words), ("digits", side)):
            if not found:
                raise UserError(f"data.heldout = {config.heldout}: leaves no {what} on one side; take a share nearer to a half")
        self.fonts = load_fonts(config.fonts)

    def picture(self, *key: int) -> Shown:
        """The picture of `key`: a word or a digit of this side."""
        numbers = draw("picture", self.seed, self.heldout, *key)
        if numbers.random_sample() < DIGIT_SHARE:
            return self.digit(numbers.randint(len(self.names)), numbers)
        return self.word(self.words[numbers.randint(len(self.words))], numbers)

    def word(self, word: str, numbers: np.random.RandomState) -> Shown:
        """`word` in some font, size, place and greys."""
        from PIL import Image, ImageDraw

        font = self.fonts[numbers.randint(len(self.fonts))]
        left, top, right, bottom = font.getbbox(word)
        room = numbers.randint(2, 7, size=2)
        width, height = int(right - left + room.sum()), max(SIDE, int(bottom - top) + 2)
        paper, ink = (int(v) for v in numbers.randint((176, 0), (256, 80)))
        image = Image.new("L", (width, height), paper)
        below = numbers.randint(0, height - int(bottom - top) + 1)
        ImageDraw.Draw(image).text((int(room[0]) - left, below - top), word, fill=ink, font=font)
        return Shown(self._grey(np.asarray(image), numbers), "word", word)

    def digit(self, index: int, numbers: np.random.RandomState | None = None) -> Shown:
        """Digit `index` of this side, moved, turned and scaled a little by `numbers`; without them upright, in the middle."""
        from PIL import Image

        angle, scale, (x, y) = 0.0, 1.0, (0.5, 0.5)
        if numbers is None:
            numbers = draw("digit", self.seed, self.heldout, index)
        else:
            angle, scale, (x, y) = numbers.uniform(-12, 12), numbers.uniform(0.85, 1.1), numbers.random_sample(2)
        side = round(24 * scale)
        ink = Image.fromarray(self.digits[index]).resize((24, 24), Image.Resampling.BICUBIC)
        turned = ink.rotate(angle, Image.Resampling.BILINEAR).resize((side, side), Image.Resampling.BILINEAR)
        left, top = int(x * (SIDE - side + 1)), int(y * (SIDE - side + 1))
        strength = np.zeros((SIDE, SIDE), np.float32)
        strength[top : top + side, left : left + side] = np.asarray(turned, np.float32) / 255
        paper, dark = numbers.randint((176, 0), (256, 80))
        return Shown(self._grey(paper + (dark - paper) * strength, numbers), "digit", str(self.names[index]))

    def _grey(self, pixels: np.ndarray, numbers: np.random.RandomState) -> Picture:
        noisy = pixels + numbers.normal(0, numbers.uniform(0, 6), pixels.shape)
        return to_picture([np.repeat(np.clip(np.rint(noisy), 0, 255).astype(np.uint8)[..., None], 3, 2)], self.vision)


@lru_cache(maxsize=1)
def library_words() -> tuple[str, ...]:
    """Lower-case words of the Python library's source, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    found: Counter[str] = Counter()
    for name in walk(root, (".py",))[0] if root.is_dir() else ():
        text = (root / name).read_text(encoding="utf-8", errors="ignore")
        found.update(re.findall(rf"(?<![A-Za-z])[a-z]{{{LETTERS[0]},{LETTERS[1]}}}(?![A-Za-z])", text))
    words = tuple(sorted(word for word, times in found.items() if times >= MET))
    if len(words) < 100:
        raise UserError('data.source = "rendered": this Python keeps no source files to take words from; give pictures of your own')
    return words


@lru_cache(maxsize=1)
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Ink uint8 [1797, 8, 8] and names int64 [1797]."""
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("data.source = \"rendered\": digits come with scikit-learn; pip install 'atoll[vision]'") from error
    found: Any = load_digits()
    return np.clip(np.rint(found.images * (255 / 16)), 0, 255).astype(np.uint8), found.target.astype(np.int64)


def load_fonts(paths: tuple[str, ...]) -> list[Any]:
    """Each font in each of `FONT_SIZES`. Raises `UserError`."""
    try:
        from PIL import ImageFont
    except ImportError as error:
        raise UserError("data.source = \"rendered\": drawing needs Pillow; pip install 'atoll[vision]'") from error
    found = []
    for path in paths or (bundled_font(),):
        try:
            found += [ImageFont.truetype(path, size) for size in range(FONT_SIZES[0], FONT_SIZES[1] + 1)]
        except OSError as error:
            raise UserError(f"data.fonts: {path!r} cannot be read as a font ({error}); give .ttf or .otf files") from error
    return found


def bundled_font() -> str:
    """matplotlib's DejaVu Sans Mono."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("data.fonts: the usual font comes with matplotlib; pip install 'atoll[vision]', or give font files") from error
    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf")
