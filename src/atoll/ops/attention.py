"""Softmax attention through PyTorch's SDPA, over packed documents and cached prefixes, and the absorbed decode over MLA's latent cache."""

from __future__ import annotations

import contextlib
import itertools
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.ops.prefix_attention import prefix_attention

# cuDNN first: it has the fastest backward of the fused kernels for unlike key and value widths.
_CUDA = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

MANY = 4  # segments of a length, on average, from which on it pays to bring them together


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int, causal: bool = True) -> Tensor:
    """[B, T, H, D], [B, S, H, D], [B, S, H, Dv] -> [B, T, H, Dv]; query i sees keys 0 ... offset + i, or all of them."""
    width, pad = v.shape[-1], q.shape[-1] - v.shape[-1]
    if q.device.type == "cpu" and pad:
        # The CPU's fused kernel wants one width: zeros appended to v (or to q and k) change nothing.
        v = F.pad(v, (0, max(pad, 0)))
        q, k = (F.pad(u, (0, max(-pad, 0))) for u in (q, k))
    q, k, v = (u.transpose(1, 2) for u in (q, k, v))
    mask = None
    if offset and q.shape[2] > 1:
        seen = torch.arange(q.shape[2], device=q.device)[:, None] + offset
        mask = torch.arange(k.shape[2], device=q.device)[None] <= seen
    fused = sdpa_kernel(_CUDA, set_priority=True) if q.is_cuda else contextlib.nullcontext()
    with fused:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and offset == 0, scale=scale)
    return out[..., :width].transpose(1, 2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, cu_seqlens: Tensor | None = None, offset: int = 0) -> Tensor:
    """softmax(scale q kᵀ) v, each query over the keys up to its own position in its own document.

    q [B, T, H, D], k [B, S, H, D], v [B, S, H, Dv] -> [B, T, H, Dv] in q.dtype; softmax and sums in at least float32.
    offset: cached keys before the first query; S = offset + T. cu_seqlens int64 [N+1]: boundaries of the documents packed into the
    one row of B = 1 (first 0, last T; empty ones allowed), then offset must be 0. Output before a position does not depend on
    anything after it, bit for bit, as long as the later values are finite. Raises ValueError when shapes do not fit.
    """
    if q.shape[:1] + q.shape[2:] != k.shape[:1] + k.shape[2:] or k.shape[:3] != v.shape[:3] or k.shape[1] != offset + q.shape[1]:
        shapes = [list(u.shape) for u in (q, k, v)]
        raise ValueError(f"q [B, T, H, D], k [B, offset + T, H, D], v [B, offset + T, H, Dv] with offset = {offset} do not fit {shapes}")
    if cu_seqlens is None and offset and q.shape[1] > 1 and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return prefix_attention(q, k, v, scale=scale)
    if cu_seqlens is None:
        return _attend(q, k, v, scale, offset)
    if q.shape[0] != 1 or offset:
        raise ValueError(f"packed documents need one row and no cached prefix, not B = {q.shape[0]} and offset = {offset}")
    cuts = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(cuts)]
    if cuts[0] != 0 or cuts[-1] != q.shape[1] or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to {q.shape[1]}, not {cuts}")
    return _each(q, k, v, [n for n in lengths if n], scale, causal=True)


def _each(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, causal: bool) -> Tensor:
    """Attention within each segment of the one row; `lengths` are above 0 and add up to it. Segments of one length are a batch.

    Where many segments share few lengths, as documents and pictures of some tokens do, they are brought together by length first.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    shuffled = len(set(lengths)) * MANY <= len(lengths) and order != list(range(len(lengths)))
    place = None
    if shuffled:
        starts = [0, *itertools.accumulate(lengths)]
        place = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order]).to(q.device)
        q, k, v, lengths = *(u.index_select(1, place) for u in (q, k, v)), [lengths[i] for i in order]
    runs = [(length, len(list(alike))) for length, alike in itertools.groupby(lengths)]
    sizes = [length * count for length, count in runs]
    done = []
    for (length, count), *segment in zip(runs, *(u.split(sizes, 1) for u in (q, k, v)), strict=True):
        q_rows, k_rows, v_rows = (u.reshape(count, length, *u.shape[2:]) for u in segment)
        done.append(_attend(q_rows, k_rows, v_rows, scale, 0, causal).reshape(1, length * count, q.shape[2], v.shape[-1]))
    out = torch.cat(done, 1) if len(done) > 1 else done[0]
    return out if place is None else out.index_select(1, place.argsort())


def segment_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], *, scale: float) -> Tensor:
    """softmax(scale q kᵀ) v, each query over all keys of its own segment, before it and after it.

    q, k [1, N, H, D], v [1, N, H, Dv], segments of `lengths` one after the other (each above 0) -> [1, N, H, Dv] in q.dtype; softmax
    and sums in at least float32. Raises ValueError when the lengths do not add up to N.
    """
    if q.shape != k.shape or q.shape[:3] != v.shape[:3] or q.shape[0] != 1 or sum(lengths) != q.shape[1] or min(lengths, default=1) < 1:
        shapes = [list(u.shape) for u in (q, k, v)]
        raise ValueError(f"q, k, v [1, N, H, D] and lengths above 0 that add up to N are expected, not {shapes} and {lengths}")
    return _each(q, k, v, lengths, scale, causal=False)


def latent_attention_step(q_latent: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """Absorbed decode of MLA: attention over the cached latents themselves, which are keys and values of all heads at once.

    q_latent [B, T, H, R] (queries through the key half of kv_b), q_pe [B, T, H, P], latent [B, S, R], k_pe [B, S, P],
    lengths int64 [B]: cache entries in use, the T new ones included, T <= lengths <= S -> [B, T, H, R] in q_latent.dtype, to be put
    through the value half of kv_b. Query i of a row sees the entries before lengths - T + i + 1; entries past lengths may hold
    anything finite. softmax in at least float32. Source: DeepSeek-V2, arXiv 2405.04434, §2.1.2.
    """
    (batch, steps, heads, _), dtype = q_latent.shape, torch.promote_types(q_latent.dtype, torch.float32)
    flat, flat_pe = (u.reshape(batch, steps * heads, -1) for u in (q_latent, q_pe))
    scores = torch.bmm(flat, latent.mT).to(dtype).add_(torch.bmm(flat_pe, k_pe.mT)).mul_(scale)
    scores = scores.view(batch, steps, heads, -1)
    seen = lengths[:, None] - steps + 1 + torch.arange(steps, device=lengths.device)
    hidden = torch.arange(latent.shape[1], device=lengths.device) >= seen[..., None]
    p = scores.masked_fill_(hidden[:, :, None], -torch.inf).softmax(-1).to(latent.dtype)
    return torch.bmm(p.view(batch, steps * heads, -1), latent).view_as(q_latent).to(q_latent.dtype)
