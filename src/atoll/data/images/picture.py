"""From pixels to patches: how far a picture is scaled down, what shines through it, and the grid the vision tower is told of.

Kimi K3's published preprocessing: never scaled up; black below and to the right up to whole features; (x / 255 - 0.5) / 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atoll.config import VisionConfig

MOST_PATCHES = 65536  # of a picture, before it is filled up to whole features
MOST_ON_A_SIDE = 512  # patches
SQUARE, WHITE, GREY = 8, 255, 180  # the chessboard behind what is transparent, the first square white


@dataclass(frozen=True)
class Picture:
    """`patches` uint8 [frames · rows · columns, 3, p, p], frame by frame, row by row.

    `grid` (frames, rows, columns) in patches; `size` (width, height) as given, in pixels.
    """

    patches: np.ndarray
    grid: tuple[int, int, int]
    size: tuple[int, int]

    def features(self, vision: VisionConfig) -> int:
        """Tokens it takes among text."""
        return features_of(self.grid, vision)


def features_of(grid: tuple[int, int, int], vision: VisionConfig) -> int:
    """Tokens that an item of this grid takes among text, whatever its frames."""
    return grid[1] * grid[2] // math.prod(vision.merge_kernel_size)


def scaled_size(width: int, height: int, patch: int, most: int = MOST_PATCHES, side: int = MOST_ON_A_SIDE) -> tuple[int, int]:
    """Width and height after scaling: s = min(1, sqrt(most / (⌊W/p⌋ · ⌊H/p⌋)), side·p / W, side·p / H), each of the four at least 1."""
    whole = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(most / whole), side * patch / width, side * patch / height)
    return max(1, math.floor(scale * width + 1e-6)), max(1, math.floor(scale * height + 1e-6))


def grid_of(width: int, height: int, vision: VisionConfig, frames: int = 1) -> tuple[int, int, int]:
    """The grid of a picture of this size, after scaling."""
    down, across = (n * vision.patch_size for n in vision.merge_kernel_size)
    a, b = vision.merge_kernel_size
    return frames, a * -(-height // down), b * -(-width // across)


def scaled(image: Any, patch: int, most: int = MOST_PATCHES) -> np.ndarray:
    """A PIL image in mode RGB or RGBA as uint8 [H, W, 3], scaled down (bicubic) where it is too large, then laid on the chessboard."""
    from PIL import Image

    size = scaled_size(image.size[0], image.size[1], patch, most)
    image = image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    if pixels.shape[2] == 3:
        return pixels
    rows, columns = np.arange(size[1]) // SQUARE, np.arange(size[0]) // SQUARE
    board = np.where((rows[:, None] + columns) % 2 == 0, WHITE, GREY)[..., None]
    alpha = pixels[..., 3:].astype(np.float32) / 255
    return np.rint(pixels[..., :3] * alpha + board * (1 - alpha)).astype(np.uint8)


def to_picture(frames: Sequence[np.ndarray], vision: VisionConfig, size: tuple[int, int] | None = None) -> Picture:
    """Frames uint8 [H, W, 3] of one size, already scaled, as one item; `size` is that of the original (default: theirs)."""
    height, width, _ = frames[0].shape
    p, (t, h, w) = vision.patch_size, grid_of(width, height, vision, len(frames))
    padded = np.zeros((t, h * p, w * p, 3), np.uint8)
    padded[:, :height, :width] = frames
    patches = padded.reshape(t, h, p, w, p, 3).transpose(0, 1, 3, 5, 2, 4).reshape(-1, 3, p, p)
    return Picture(np.ascontiguousarray(patches), (t, h, w), size or (width, height))


def stack(pictures: Sequence[Picture]) -> tuple[torch.Tensor, torch.Tensor]:
    """`pixel_values` float32 [N, 3, p, p], -1 to 1, and `grid_thws` int64 [pictures, 3], as the model takes them."""
    pixels = torch.from_numpy(np.concatenate([p.patches for p in pictures])).float()
    return pixels.div_(127.5).sub_(1.0), torch.tensor([p.grid for p in pictures])
