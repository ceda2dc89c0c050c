"""Video as items of up to four frames, each after its time: sampled evenly in time, grouped, scaled by the limits of a whole video.

Kimi K3's settings: 8 frames a second, 4 frames an item, times as hh:mm:ss.fff, at most 16,384 patches a frame and 655,360 a video. The
released processor reads images alone, so the text around an item (its first frame's time) is our reading of those settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from atoll.config import UserError, VisionConfig
from atoll.data.images.picture import Picture, scaled, to_picture
from atoll.data.images.reading import MOST_PIXELS, BadImage

RATE = 8.0  # frames sampled a second
MOST_OF_A_FRAME = 16384  # patches
MOST_OF_A_VIDEO = 655360
MOST_FRAMES = 4096  # sampled; of a longer video, so many spread evenly are kept
SUFFIXES = (".mp4", ".m4v", ".webm", ".mkv", ".mov", ".avi")


class Frames(Protocol):
    """A video: frames uint8 [H, W, 3], all of one size, each with its time in seconds, in order."""

    def __iter__(self) -> Iterator[tuple[float, np.ndarray]]: ...


class AvFrames:
    """The frames of a file, through PyAV."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tuple[float, np.ndarray]]:
        """Raises `BadImage` for a file that is no video; `UserError` where PyAV is missing."""
        try:
            import av  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError("videos need PyAV: pip install 'atoll[video]'") from error
        try:
            with self.path.open("rb") as file, av.open(file) as container:
                for frame in container.decode(video=0):
                    if frame.width * frame.height > MOST_PIXELS:
                        raise BadImage(f"too large: {frame.width:,} x {frame.height:,} pixels, {MOST_PIXELS:,} at most")
                    yield float(frame.time or 0.0), frame.to_ndarray(format="rgb24")
        except BadImage:
            raise
        except Exception as error:  # of foreign bytes, and of whatever library PyAV was built with
            said = " ".join(str(error).split())[:100] or type(error).__name__
            raise BadImage(f"no video that can be read ({said})") from None


def sampled(frames: Iterable[tuple[float, np.ndarray]], rate: float = RATE, most: int = MOST_FRAMES) -> list[tuple[float, np.ndarray]]:
    """The first frame at or after each of the times 0, 1/rate, 2/rate … from the first on; of more than `most`, so many spread evenly."""
    kept: list[tuple[float, np.ndarray]] = []
    due, step = -math.inf, 1 / rate
    for time, frame in frames:
        if time + 1e-6 >= due:
            kept.append((time, frame))
            if len(kept) > 2 * most:  # half the rate from here on: what is held stays bounded
                kept, step = kept[::2], 2 * step
            begun = kept[0][0]
            due = begun + step * (math.floor((time - begun) / step + 1e-6) + 1)
    if len(kept) > most:
        kept = [kept[i] for i in np.linspace(0, len(kept) - 1, most).round().astype(int)]
    return kept


def video_items(
    frames: Iterable[tuple[float, np.ndarray]], vision: VisionConfig, most: int = MOST_OF_A_FRAME, rate: float = RATE
) -> list[tuple[str, Picture]]:
    """(time of its first frame, item) of each group of sampled frames. Raises `BadImage` for a video without a frame."""
    from PIL import Image

    chosen = sampled(frames, rate)
    if not chosen:
        raise BadImage("a video without a frame")
    size = chosen[0][1].shape
    chosen = [(time, frame) for time, frame in chosen if frame.shape == size]
    limit = max(1, min(most, MOST_OF_A_FRAME, MOST_OF_A_VIDEO // len(chosen)))
    group = vision.init_pos_emb_time
    found = []
    for start in range(0, len(chosen), group):
        some = chosen[start : start + group]
        pixels = [scaled(Image.fromarray(frame), vision.patch_size, limit) for _, frame in some]
        found.append((stamp(some[0][0]), to_picture(pixels, vision, (size[1], size[0]))))
    return found


def stamp(seconds: float) -> str:
    """3661.5 → "01:01:01.500"."""
    thousandths = round(max(0.0, seconds) * 1000)
    rest, fraction = divmod(thousandths, 1000)
    return f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}.{fraction:03}"
