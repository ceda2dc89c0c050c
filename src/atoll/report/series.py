"""Smoothing and thinning of curves: numpy arrays in, numpy arrays out. NaN marks a missing value throughout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def window(points: int) -> int:
    """Width of the running mean for a curve of `points` points: a thirtieth of it, odd, at least 1."""
    return max(1, points // 30) | 1


def smooth(values: np.ndarray, width: int, keep_start: bool = False) -> np.ndarray:
    """Centred running mean over `width` points, cut off at the ends; missing values are passed over. With `keep_start` the reach
    shrinks on both sides together at the beginning, so that a steep fall there is not flattened."""
    known = np.isfinite(values)
    half = width // 2
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(values))
    low = np.maximum(at - half, 0)
    high = np.minimum(at + (np.minimum(at, half) if keep_start else half) + 1, len(values))
    number = counts[high] - counts[low]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(number > 0, (sums[high] - sums[low]) / number, np.nan)


def median(values: np.ndarray, width: int, keep_start: bool = False) -> np.ndarray:
    """As `smooth`, by the median: one outlier moves nothing. Long curves are solved at 1,500 points and joined by lines."""
    half, last = width // 2, len(values) - 1
    at = np.unique(np.linspace(0, last, min(len(values), 1500)).astype(int))
    level = np.full(len(at), np.nan)
    for i, centre in enumerate(at):
        right = min(int(centre), half) if keep_start else half
        part = values[max(0, centre - half) : centre + right + 1 : max(1, half // 100)]
        part = part[np.isfinite(part)]
        if len(part):
            level[i] = np.median(part)
    known = np.isfinite(level)
    return np.interp(np.arange(len(values)), at[known], level[known]) if known.any() else np.full(len(values), np.nan)


def smooth_pieces(values: np.ndarray, pieces: list[slice], method: Callable[..., np.ndarray] = smooth) -> np.ndarray:
    """`smooth` (or `median`) within each piece, so that no mean reaches over a stage boundary."""
    out = np.full(len(values), np.nan)
    width = window(len(values))
    for piece in pieces:
        out[piece] = method(values[piece], min(width, (piece.stop - piece.start) // 3 | 1), keep_start=piece.start == 0)
    return out


def thin(x: np.ndarray, y: np.ndarray, points: int = 1500) -> tuple[np.ndarray, np.ndarray]:
    """At most about `points` of the curve: in each of equal runs of points the lowest and the highest, in their order, so peaks stay."""
    if len(x) <= points:
        return x, y
    edges = np.linspace(0, len(x), points // 2 + 1).astype(int)
    keep: set[int] = {0, len(x) - 1}
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        part = y[low:high]
        if np.isfinite(part).any():
            keep |= {low + int(np.nanargmin(part)), low + int(np.nanargmax(part))}
    order = np.array(sorted(keep))
    return x[order], y[order]
