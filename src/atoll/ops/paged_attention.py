"""Absorbed attention over MLA's latents in pages: rows of different lengths read one memory through a table of their own.

The naive twin. A page holds `pages.shape[1]` neighbouring tokens of one sequence; a row's table names its pages in order. The row is
read in splits, each with the log of its sum of exponentials, by which their results are joined: what is formed at once is bounded
however long a row is, and what other rows hold is never looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPLIT = 64  # pages read at once


def paged_latent_attention(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    width: int,
    scale: float,
    counts: Tensor | None = None,
    split: int = SPLIT,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q · rowᵀ) row[:width] over each sequence's cached rows, keys and values at once; and the log-sum-exp.

    q [B, T, H, R]: absorbed queries, the part that meets the shared key behind the latent's `width` channels. pages [N, page, R].
    table int64 [B, P]: pages of each sequence in order; entries past its end may name any page. lengths int64 [B]: rows in use, the T new
    ones included. Query i of a sequence sees the rows before lengths - T + i + 1. counts int64 [B]: how many of the T are real; padding
    after them sees what the last of them does, so that it depends on nothing else. What is not seen must be finite.
    Returns out [B, T, H, width] in q.dtype and lse [B, T, H] in at least float32, -inf where nothing is seen (out is 0 there).
    softmax in at least float32. Source: DeepSeek-V2, arXiv 2405.04434, §2.1.2.
    """
    batch, steps, heads, _ = q.shape
    size, flat = pages.shape[1], q.reshape(batch, steps * heads, -1)
    seen = lengths[:, None] - steps + 1 + torch.arange(steps, device=q.device)  # [B, T]
    if counts is not None:
        seen = torch.minimum(seen, (lengths - steps + counts)[:, None])
    outs, lses = [], []
    for first in range(0, max(table.shape[1], 1), split):
        part = table[:, first : first + split]
        rows = pages.index_select(0, part.reshape(-1)).view(batch, -1, pages.shape[2])
        hidden = torch.arange(rows.shape[1], device=q.device) + first * size >= seen[..., None]
        out, lse = _part(flat, rows, hidden.repeat_interleave(heads, 1), width, scale)
        outs.append(out)
        lses.append(lse)
    out, lse = merge_attention(outs, lses)
    return out.view(batch, steps, heads, width).to(q.dtype), lse.view(batch, steps, heads)


def _part(q: Tensor, rows: Tensor, hidden: Tensor, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, Q, R], rows [B, S, R], hidden [B, Q, S] -> [B, Q, width] and [B, Q], in at least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.bmm(q, rows.mT).to(dtype).mul_(scale).masked_fill_(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
    return torch.bmm(p.to(rows.dtype), rows[..., :width]).to(dtype), lse


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One attention over the keys of several: outs [..., D] and lses [...], the logs of their sums of exponentials, -inf without a key."""
    if len(outs) == 1:
        return outs[0], lses[0]
    lse = torch.stack(lses).logsumexp(0)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    total = outs[0] * (lses[0] - finite).exp().unsqueeze(-1)
    for out, part in zip(outs[1:], lses[1:], strict=True):
        total = total + out * (part - finite).exp().unsqueeze(-1)
    return total, lse
