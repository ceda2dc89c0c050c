"""Features among text: which rows of the input come from token embeddings and which from the vision tower.

A placeholder token marks an item (an image or a clip). Its features stand either in place of as many placeholders, or in place of
one, and the row grows (the hub's form). Both are one gather from the token rows followed by the feature rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MediaLayout:
    """Where a batch's text and features go. `source` int64 [B·T']: which row of [all B·T tokens, then all M features] stands there."""

    source: Tensor
    counts: Tensor  # int64 [B, T]: rows each token becomes
    features: int  # M

    def merge(self, text: Tensor, features: Tensor) -> Tensor:
        """`text` [B, T, ...] and `features` [M, ...] as [B, T', ...], in text's type. Gradients reach both, in a fixed order of sums."""
        rows = torch.cat([text.flatten(0, 1), features.to(text.dtype)])
        return rows.index_select(0, self.source).unflatten(0, (text.shape[0], -1))

    def fill(self, text: Tensor, value: int) -> Tensor:
        """`text` [B, T] as [B, T'], with `value` where features stand."""
        return self.merge(text, text.new_full((self.features,), value))

    def bounds(self, cu_seqlens: Tensor) -> Tensor:
        """Document bounds [N+1] of a packed row, moved to where the row's growth has put them."""
        ends = torch.cat([self.counts.new_zeros(1), self.counts[0].cumsum(0)])
        return ends.index_select(0, cu_seqlens.to(ends.dtype)).to(cu_seqlens.dtype)


def place_media(input_ids: Tensor, lengths: list[int], placeholder: int) -> MediaLayout:
    """The layout of `input_ids` [B, T] with items of `lengths` features, met row by row.

    One placeholder an item: the row grows. One a feature: it does not. Raises ValueError, one line, when the number of placeholders is
    neither, when an item's placeholders do not stand side by side in one row, or when rows would grow to different lengths.
    """
    marks = input_ids.eq(placeholder)
    found, total = int(marks.sum()), sum(lengths)
    if found not in (len(lengths), total):
        wanted = f"{len(lengths)}, one an item, or {total}, one a feature, are expected"
        raise ValueError(f"input_ids hold {found} media placeholders (id {placeholder}): {wanted}")
    if found == total:
        _check_runs(marks, lengths)
    each = torch.tensor(lengths if found != total else [1] * total, device=input_ids.device)
    counts = torch.ones_like(input_ids).masked_scatter(marks, each)
    grown = counts.sum(1).tolist()
    if len(set(grown)) > 1:
        raise ValueError(f"rows of input_ids grow to {grown} tokens: give rows of one length, or one row packed by cu_seqlens")
    source = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts.flatten())
    at_feature = marks.flatten().repeat_interleave(counts.flatten())
    rows = torch.arange(total, device=counts.device) + counts.numel()
    return MediaLayout(source.masked_scatter(at_feature, rows), counts, total)


def refuse_media(input_ids: Tensor, placeholder: int) -> None:
    """Raise ValueError, one line, when `input_ids` hold placeholders; for a call without images."""
    if found := int(input_ids.eq(placeholder).sum()):
        raise ValueError(f"input_ids hold {found} media placeholders (id {placeholder}) and there are no pixel_values; give both")


def _check_runs(marks: Tensor, lengths: list[int]) -> None:
    """Each item's placeholders are neighbours in one row."""
    positions, columns = marks.flatten().nonzero().flatten().cpu(), marks.shape[1]
    for i, part in enumerate(positions.split(lengths)):
        first, last = int(part[0]), int(part[-1])
        if last - first != len(part) - 1 or first // columns != last // columns:
            raise ValueError(f"item {i}: its {len(part)} placeholders in input_ids do not stand side by side in one row")
