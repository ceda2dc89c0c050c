# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3-shaped text models for transformers: loads, generates, computes a loss, trains. Needs torch and transformers >= 5.24 only.

The layers: delta attention with a decay per channel (KDA; Kimi Linear, arXiv 2510.26692), latent attention without positions
(MLA, arXiv 2405.04434), a latent mixture of experts (arXiv 2601.18089), attention over depth (arXiv 2603.15031), SiTU and the
bounded decay (Kimi K3 report, arXiv 2607.24653).

Padding never enters the model. `Packing` says where documents lie; every layer works on the flat list of real tokens [N, ...],
and the result is put back into the grid [B, T, ...] at the end. So left padding, right padding and packed documents are one case.

In memory the experts of a layer are stacked: `w1`, `w3` [E, I, L] and `w2` [E, L, I]. In files every expert has tensors of its own:
a conversion mapping (below, at the end) lets `from_pretrained` and `save_pretrained` read and write those.
"""

import math
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_kimi_k3 import KimiK3Config, KimiLinearConfig

TILE = 16  # tokens of a KDA chunk: with a log decay of at least -5 each, exp(±40) keeps both factors of a tile in float32
ANCHOR = 2.0**58  # about exp(40); a power of two, so it multiplies without rounding
LOSS_ROWS = 2048  # tokens whose float32 logits exist at once
IGNORE = -100


def wide(*tensors: Tensor) -> torch.dtype:
    """float32, or float64 where a tensor is."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def exact(x: Tensor) -> torch.autocast:
    """Autocast off: decays, states and router scores do not survive bfloat16."""
    return torch.autocast(x.device.type, enabled=False)


def recomputed(function, *args):
    """`function(*args)`, its activations dropped and computed again in the backward pass."""
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


# ---------------------------------------------------------------- where documents lie


@dataclass
class Chunks:
    """The tiles of all documents: documents are ranked by length, longest first, and tile s of all of them comes before tile s + 1."""

    order: Tensor  # [documents] the document of each rank
    rows: Tensor  # [M, TILE] flat token of each place; an arbitrary one where `inside` is false
    inside: Tensor  # [M, TILE] whether the place holds a token
    places: Tensor  # [N] place of each token, counted through [M, TILE]
    running: list[int]  # documents that have a tile at each step


@dataclass
class Packing:
    """Documents as runs of the flat token list: `ends` cumulates `lengths`. `index` [N] is the place of each token in the grid
    `shape` (B, T), or None where every place holds one. A document is a row of the grid, or, packed, a part of one."""

    shape: tuple[int, int]
    lengths: list[int]
    index: Tensor | None
    device: torch.device

    @classmethod
    def build(cls, input_ids, inputs_embeds=None, mask=None, position_ids=None, cu_seqlens=None, cache=None) -> "Packing":
        """From what callers know: a 0/1 mask [B, S >= T], positions [B, T] that start anew in every document, or `cu_seqlens`.

        With a filled cache, positions say nothing new: a row continues one document.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        grid, cached = input_ids if inputs_embeds is None else inputs_embeds, cache is not None and cache.get_seq_length() > 0
        shape, device = tuple(grid.shape[:2]), grid.device
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < shape[1]):
            raise ValueError("attention_mask: a 0/1 mask [batch, tokens] is expected; 4D masks and static caches are not supported")
        real = None if mask is None else mask[:, -shape[1] :] != 0
        if real is not None and bool(real.all()):
            real = None
        if cu_seqlens is not None:
            if shape[0] != 1 or real is not None or cached:
                raise ValueError("cu_seqlens: packed documents come as one row [1, tokens], without padding or cache")
            edges = cu_seqlens.tolist()
            if edges[0] != 0 or edges[-1] != shape[1] or sorted(edges) != edges:
                raise ValueError(f"cu_seqlens must rise from 0 to {shape[1]}, the row's length")
            return cls(shape, [b - a for a, b in pairwise(edges)], None, device)
        index = None if real is None else real.flatten().nonzero().squeeze(1)
        if position_ids is not None and not cached and shape[1] > 1:
            return cls(shape, _restarts(position_ids.expand(shape), index), index, device)
        return cls(shape, [shape[1]] * shape[0] if real is None else real.sum(1).tolist(), index, device)

    @property
    def packed(self) -> bool:
        return len(self.lengths) != self.shape[0]

    @cached_property
    def ends(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.device).cumsum(0)

    def flatten(self, grid: Tensor) -> Tensor:
        """[B, T, ...] to [N, ...]: the real tokens."""
        flat = grid.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def restore(self, flat: Tensor) -> Tensor:
        """[N, ...] to [B, T, ...], zero where there is padding."""
        if self.index is not None:
            flat = flat.new_zeros(self.shape[0] * self.shape[1], *flat.shape[1:]).index_copy(0, self.index, flat)
        return flat.unflatten(0, self.shape)

    def next_labels(self, labels: Tensor) -> Tensor:
        """[N] the label that each token predicts: its successor's, and none at a document's end."""
        flat = self.flatten(labels)
        targets = torch.cat([flat[1:], flat.new_full((1,), IGNORE)])
        last = self.ends[torch.tensor([n > 0 for n in self.lengths], device=self.device)] - 1
        return targets.index_fill(0, last, IGNORE)

    @cached_property
    def chunks(self) -> Chunks:
        """The tiles of these documents, made once for all layers."""
        lengths = torch.tensor(self.lengths, device=self.device)
        tiles, order = (-(-lengths // TILE)).sort(descending=True, stable=True)
        ranked, starts = lengths[order], (self.ends - lengths)[order]
        runs = tiles > torch.arange(int(tiles[0]), device=self.device)[:, None]  # [steps, ranks]
        step, rank = runs.nonzero(as_tuple=True)
        offset = step[:, None] * TILE + torch.arange(TILE, device=self.device)
        inside = offset < ranked[rank][:, None]
        rows = torch.where(inside, starts[rank][:, None] + offset, 0)
        places = torch.empty(int(lengths.sum()), dtype=torch.int64, device=self.device)
        places[rows[inside]] = inside.flatten().nonzero().squeeze(1)
        return Chunks(order, rows, inside, places, runs.sum(1).tolist())


def _restarts(position_ids: Tensor, index: Tensor | None) -> list[int]:
    """Lengths of the documents of a grid of positions: one begins with every row and wherever the position does not rise."""
    row = torch.arange(position_ids.shape[0], device=position_ids.device)[:, None].expand_as(position_ids).flatten()
    position = position_ids.flatten()
    if index is not None:
        row, position = row[index], position[index]
    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = (position[1:] <= position[:-1]) | (row[1:] != row[:-1])
    starts = begins.nonzero().squeeze(1)
    return torch.cat([starts, starts.new_tensor([row.numel()])]).diff().tolist()


@dataclass
class Past:
    """The cache of this call, and which of its places [B, 1, T, S] each token may look at (None: all, or none was there before)."""

    cache: DynamicCache
    mask: Tensor | None

    @classmethod
    def build(cls, cache: DynamicCache, packing: Packing, mask: Tensor | None) -> "Past":
        if packing.packed:
            raise ValueError("position_ids or cu_seqlens: packed documents cannot be cached; pass use_cache=False")
        (_, tokens), past = packing.shape, cache.get_seq_length()
        if mask is not None and mask.shape[1] != past + tokens:
            raise ValueError(f"attention_mask has {mask.shape[1]} columns: {past} cached and {tokens} new tokens need {past + tokens}")
        if past == 0 or (tokens == 1 and mask is None):
            return cls(cache, None)
        place, query = torch.arange(past + tokens, device=packing.device), past + torch.arange(tokens, device=packing.device)[:, None]
        seen = place <= query
        if mask is not None:  # padding sees itself, so that its softmax is finite
            seen = (seen & (mask[:, None] != 0)) | (place == query)
        return cls(cache, seen.view(-1, 1, tokens, past + tokens))


# ---------------------------------------------------------------- delta attention (KDA)


def log_decay(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay [N, H, K] of raw logits: `lower_bound * sigmoid(exp(A_log) (z + dt_bias))`, or `-exp(A_log) softplus(z + dt_bias)`."""
    rate, shifted = A_log.exp()[:, None], z + dt_bias
    if lower_bound is None:
        return rate * F.logsigmoid(-shifted)
    return lower_bound * torch.sigmoid(rate * shifted)


def tile_scores(rows: Tensor, keys: Tensor, g: Tensor, total: Tensor, bounded: bool) -> Tensor:
    """[M, H, TILE, TILE] of <rows_i, keys_j> under the decay from j to i; entries j > i are left to the caller's mask.

    Bounded, the exponential splits at an anchor and the tile is a matmul. Unbounded, every pair needs its own sum of log decays:
    a difference of cumulative sums would round away a slow decay after a fast one.
    """
    if bounded:
        up = total.exp() * ANCHOR
        return (rows * up) @ (keys / up).transpose(-1, -2)
    below = torch.ones(TILE, TILE, dtype=torch.bool, device=g.device).tril(-1)[:, :, None]
    pairs = torch.where(below, g[..., :, None, :], 0).cumsum(-3).exp()
    return (pairs * rows[..., :, None, :] * keys[..., None, :, :]).sum(-1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, packing: Packing, bounded: bool):
    """KDA over flat documents, tile by tile (arXiv 2510.26692 §3.1). Returns o [N, H, V] and the final states [documents, H, K, V].

    q (scaled), k of unit length, g log decay [N, H, K]; v [N, H, V]; beta [N, H]. Per tile, G the cumulative log decay:

        A[i,j] = beta_i k_i·k_j exp(G_i - G_j), j < i         P[i,j] = q_i·k_j exp(G_i - G_j), j <= i
        W, U = (I + A)^-1 beta (K exp G), (I + A)^-1 beta V   X = U - W S
        O = (Q exp G) S + P X                                 S' = exp(G_end) S + (K exp(G_end - G))^T X
    """
    c = packing.chunks

    def place(x: Tensor) -> Tensor:
        return x.index_select(0, c.rows.flatten()).unflatten(0, c.rows.shape).transpose(1, 2)  # [M, H, TILE, ...]

    inside = c.inside[:, None, :, None]
    q, k, v = place(q), place(k), place(v)
    g, beta = place(g) * inside, place(beta[..., None]) * inside  # no decay and no write past a document's end
    ones = g.new_ones(TILE, TILE)
    total, rest = ones.tril() @ g, ones.triu(1) @ g  # sums of g up to each token, and after it
    score = tile_scores if bounded else lambda *x: recomputed(tile_scores, *x)
    a = score(k, k, g, total, bounded).tril(-1) * beta
    p = score(q, k, g, total, bounded).tril()
    solved = torch.linalg.solve_triangular(
        a + torch.eye(TILE, dtype=a.dtype, device=a.device), torch.cat([k * total.exp(), v], -1) * beta, upper=False, unitriangular=True
    )
    w, u = solved.split([k.shape[-1], v.shape[-1]], -1)
    parts = zip(
        *(x.split(c.running) for x in (q * total.exp(), p, w, u, (k * rest.exp()).transpose(-1, -2), total[..., -1, :, None].exp())),
        strict=True,
    )
    documents = len(packing.lengths)
    state = v.new_zeros(documents, *v.shape[1:2], k.shape[-1], v.shape[-1]) if state is None else state.index_select(0, c.order)
    outs = []
    for query, scores, weighted, value, tail, decay in parts:
        running = state[: query.shape[0]]
        x = value - weighted @ running
        outs.append(query @ running + scores @ x)
        moved = decay * running + tail @ x
        state = moved if moved.shape[0] == documents else torch.cat([moved, state[moved.shape[0] :]])
    out = torch.cat(outs).transpose(1, 2).flatten(0, 1).index_select(0, c.places)
    return out, state.index_select(0, c.order.argsort())


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token a document: decay, write the difference to what the state predicts, read (arXiv 2510.26692 eq. 1)."""
    state = g.exp()[..., None] * state
    write = beta[..., None] * (v - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * write[..., None, :]
    return (state * q[..., None]).sum(-2), state


def atoll_kda(backend: str, x: Tensor):
    """Atoll's fused op where it is asked for, or, by default, where it is installed and the tensors are on a CUDA device."""
    if backend == "torch" or (backend == "auto" and not x.is_cuda):
        return None
    try:
        from atoll.ops import kda
    except ImportError:
        if backend == "atoll":
            raise ValueError("kda_backend = 'atoll': the package atoll is not installed; take 'torch'") from None
        return None
    return kda


def kda(q, k, v, z, beta, A_log, dt_bias, lower_bound, state, packing: Packing, backend: str) -> tuple[Tensor, Tensor]:
    """Delta attention of flat tokens, norms and gates inside: q, k, z [N, H, K], v [N, H, V], beta [N, H] raw logits. float32 or wider."""
    step = state is not None and all(n == 1 for n in packing.lengths)
    if (fused := atoll_kda(backend, q)) and not step:
        cu_seqlens = F.pad(packing.ends, (1, 0))
        row = [x[None] for x in (q, k, v, z, beta)]
        options = {"lower_bound": lower_bound, "initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
        out, state = fused(*row, A_log, dt_bias, **options)
        return out[0], state
    dtype = wide(q, A_log)
    q, k, v, z, beta, A_log, dt_bias = (x.to(dtype) for x in (q, k, v, z, beta, A_log, dt_bias))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, beta, g = q * q.shape[-1] ** -0.5, torch.sigmoid(beta), log_decay(z, A_log, dt_bias, lower_bound)
    if step:
        return delta_step(q, k, v, g, beta, state)
    return delta_rule(q, k, v, g, beta, state, packing, lower_bound is not None)


class ShortConv(nn.Module):
    """A causal filter of a few taps on each channel, then SiLU; its weight stays float32."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))

    def forward(self, x: Tensor, window: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        """x [N, C]; `window` [documents, C, taps - 1], the inputs before each document (None: zeros). Also returns the next window."""
        before = self.weight.shape[-1] - 1
        lengths = torch.tensor(packing.lengths, device=x.device)
        document = torch.arange(len(packing.lengths), device=x.device).repeat_interleave(lengths)
        places = torch.arange(x.shape[0], device=x.device) + (document + 1) * before  # each document after its window
        whole = x.new_zeros(x.shape[0] + len(packing.lengths) * before, x.shape[1]).index_copy(0, places, x)
        tails = (packing.ends - lengths)[:, None] + before * torch.arange(len(packing.lengths), device=x.device)[:, None]
        tails = tails + torch.arange(before, device=x.device)  # [documents, taps - 1] where the windows stand
        if window is not None:
            whole = whole.index_copy(0, tails.flatten(), window.transpose(1, 2).flatten(0, 1).to(x.dtype))
        y = F.conv1d(whole.t()[None].to(self.weight.dtype), self.weight, groups=x.shape[1])[0].t()
        following = whole.index_select(0, (tails + lengths[:, None]).flatten()).view(*tails.shape, -1)
        return F.silu(y.index_select(0, places - before)).to(x.dtype), following.transpose(1, 2)


class GatedHeadNorm(nn.Module):
    """`weight * x / rms(x) * sigmoid(gate)` over a head's channels, at least float32 inside; its weight stays float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = x.to(wide(x)), gate.to(wide(gate))
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * torch.sigmoid(gate)


class DeltaAttention(nn.Module):
    """KDA: a causal mixing of tokens through one [K, V] state a head."""

    def __init__(self, c: KimiLinearConfig, layer: int):
        super().__init__()
        linear = c.linear_attn_config
        self.heads, self.head_dim, self.lower_bound = linear["num_heads"], linear["head_dim"], linear["gate_lower_bound"]
        self.layer, self.config = layer, c
        dim, inner, taps = c.hidden_size, self.heads * self.head_dim, linear["short_conv_kernel_size"]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, inner, bias=False) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(inner, taps) for _ in range(3))
        self.f_a_proj, self.f_b_proj = nn.Linear(dim, self.head_dim, bias=False), nn.Linear(self.head_dim, inner, bias=False)
        kept = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=kept))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=kept))
        self.b_proj = nn.Linear(dim, self.heads, bias=False)
        if linear["use_full_rank_gate"]:
            self.g_proj = nn.Linear(dim, inner, bias=False)
        else:
            self.g_a_proj, self.g_b_proj = nn.Linear(dim, self.head_dim, bias=False), nn.Linear(self.head_dim, inner, bias=False)
        self.o_norm = GatedHeadNorm(self.head_dim, c.rms_norm_eps)
        self.o_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, packing: Packing, past: Past | None) -> Tensor:
        cache = None if past is None else past.cache
        windows, state = [None] * 3, None
        if cache is not None and (window := cache.get_conv_state(self.layer)) is not None:
            windows, state = window.chunk(3, 1), cache.get_recurrent_state(self.layer)
        split, inputs = (-1, self.heads, self.head_dim), (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        z, beta = self.f_b_proj(self.f_a_proj(x)).view(split), self.b_proj(x)
        gate = self.g_proj(x) if hasattr(self, "g_proj") else self.g_b_proj(self.g_a_proj(x))
        with exact(x):
            convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            mixed, windows = zip(*(f(y, w, packing) for f, y, w in zip(convs, inputs, windows, strict=True)), strict=True)
            q, k, v = (y.view(split) for y in mixed)
            dt_bias = self.dt_bias.view(self.heads, self.head_dim)
            out, state = kda(q, k, v, z, beta, self.A_log, dt_bias, self.lower_bound, state, packing, self.config.kda_backend)
            out = self.o_norm(out, gate.view(split)).flatten(1).to(x.dtype)
        if cache is not None:  # the window is as wide as what is kept, so it replaces it
            cache.update_conv_state(torch.cat(windows, 1).detach(), self.layer)
            cache.update_recurrent_state(state.detach(), self.layer)
        return self.o_proj(out)


# ---------------------------------------------------------------- latent attention (MLA)


class RMSNorm(nn.Module):
    """`weight * x / rms(x)`, statistics in at least float32, cast back before the weight as in the release."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(wide(x))
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LatentAttention(nn.Module):
    """Causal softmax attention whose keys and values come from one latent a token. Nothing is rotated; the cache holds the latents."""

    def __init__(self, c: KimiLinearConfig, layer: int):
        super().__init__()
        self.layer, self.heads, self.rank = layer, c.num_attention_heads, c.kv_lora_rank
        self.nope, self.rope, self.value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.scale = (self.nope + self.rope) ** -0.5
        width = self.heads * (self.nope + self.rope)
        if c.q_lora_rank is None:
            self.q_proj = nn.Linear(c.hidden_size, width, bias=False)
        else:
            self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps)
            self.q_b_proj = nn.Linear(c.q_lora_rank, width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, c.latent_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        if c.mla_use_output_gate:
            self.g_proj = nn.Linear(c.hidden_size, self.heads * self.value, bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, c.hidden_size, bias=False)

    def forward(self, x: Tensor, packing: Packing, past: Past | None) -> Tensor:
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(-1, self.heads, self.nope + self.rope)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        latent = self.kv_a_layernorm(latent)
        begun = past is not None and past.cache.get_seq_length(self.layer) > 0
        if past is not None:
            rows = (packing.restore(y)[:, None].detach() for y in (latent, shared))
            kept = past.cache.update(*rows, self.layer)
        if not begun:
            out = self._documents(q, *self._expand(latent, shared), packing.lengths)
        else:
            attend = self._absorbed if packing.shape[1] == 1 and type(self.kv_b_proj) is nn.Linear else self._continued
            out = packing.flatten(attend(packing.restore(q).transpose(1, 2), *kept, past.mask).transpose(1, 2))
        out = out.flatten(1)
        return self.o_proj(out * torch.sigmoid(self.g_proj(x)) if hasattr(self, "g_proj") else out)

    def _expand(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., H, nope + rope] and values [..., H, V] of latents [..., R] and shared keys [..., rope]."""
        k, v = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).split([self.nope, self.value], -1)
        return torch.cat([k, shared.unsqueeze(-2).expand(*k.shape[:-1], -1)], -1), v

    def _documents(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        """[N, H, V]: each document on its own; documents of one length together."""
        if len(set(lengths)) == 1:
            groups = [[x.unflatten(0, (len(lengths), -1)) for x in (q, k, v)]]
        else:
            groups = zip(*([part[None] for part in x.split(lengths) if len(part)] for x in (q, k, v)), strict=True)
        outs = []
        for group in groups:
            heads_first = (x.transpose(1, 2) for x in group)
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=self.scale)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)

    def _continued(self, q: Tensor, latent: Tensor, shared: Tensor, mask: Tensor | None) -> Tensor:
        """[B, H, T, V]: new tokens against all cached ones, keys and values formed."""
        k, v = (x.transpose(1, 2) for x in self._expand(latent[:, 0], shared[:, 0]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)

    def _absorbed(self, q: Tensor, latent: Tensor, shared: Tensor, mask: Tensor | None) -> Tensor:
        """[B, H, 1, V]: one new token against the latents themselves; keys and values are never formed."""
        w_k, w_v = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split([self.nope, self.value], 1)
        q_nope, q_shared = q.split([self.nope, self.rope], -1)
        scores = (q_nope @ w_k) @ latent.transpose(-1, -2) + q_shared @ shared.transpose(-1, -2)
        scores = scores.to(wide(scores)) * self.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return (scores.softmax(-1).to(latent.dtype) @ latent) @ w_v.transpose(-1, -2)


# ---------------------------------------------------------------- MLPs and experts


def glu(c: KimiLinearConfig, gate: Tensor, up: Tensor) -> Tensor:
    """SiTU-GLU (Kimi K3 report eq. 12), `b1 tanh(gate/b1) sigmoid(gate) * b2 tanh(up/b2)`, or SwiGLU; at least float32 inside."""
    a, b = gate.to(wide(gate)), up.to(wide(up))
    if c.hidden_act == "silu":
        return (F.silu(a) * b).to(gate.dtype)
    b1, b2 = c.activation_situ_beta, c.activation_situ_linear_beta
    return (b1 * torch.tanh(a / b1) * torch.sigmoid(a) * (b if b2 is None else b2 * torch.tanh(b / b2))).to(gate.dtype)


class GatedMLP(nn.Module):
    """`down(glu(gate x, up x))`: the dense layers and the shared experts."""

    def __init__(self, c: KimiLinearConfig, inner: int):
        super().__init__()
        self.config = c
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(glu(self.config, self.gate_proj(x), self.up_proj(x)))


class Router(nn.Module):
    """Sigmoid scores in at least float32, and a bias that selects experts and weighs nothing. Training here leaves the bias as it is."""

    e_score_correction_bias: Tensor

    def __init__(self, c: KimiLinearConfig):
        super().__init__()
        self.config = c
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        kept = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("e_score_correction_bias", torch.zeros(c.num_experts, dtype=kept))

    def forward(self, x: Tensor) -> Tensor:
        """Scores [N, E]."""
        with exact(x):
            dtype = wide(x, self.weight)
            return torch.sigmoid(F.linear(x.to(dtype), self.weight.to(dtype)))

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        """Experts [N, k] of scores [N, E]."""
        return (scores + self.e_score_correction_bias).topk(self.config.num_experts_per_token, -1).indices

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Mixture weights [N, k] of chosen experts."""
        source = scores if self.config.router_weights == "unbiased" else scores + self.e_score_correction_bias
        weights = source.gather(1, ids)
        if self.config.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.config.routed_scaling_factor


class Experts(nn.Module):
    """All routed experts of a layer, stacked: w1 (gate) and w3 (up) [E, I, L], w2 (down) [E, L, I]."""

    def __init__(self, c: KimiLinearConfig):
        super().__init__()
        self.config = c
        dim, inner = c.routed_expert_hidden_size or c.hidden_size, c.moe_intermediate_size
        self.w1, self.w3 = (nn.Parameter(torch.empty(c.num_experts, inner, dim)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(c.num_experts, dim, inner))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum [N, L] of each token's experts; weights apply after `w2`, the sum is at least float32."""
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.config.num_experts)
        rows = x.index_select(0, order // ids.shape[1])
        hidden = glu(self.config, grouped_linear(rows, self.w1, counts), grouped_linear(rows, self.w3, counts))
        out = grouped_linear(hidden, self.w2, counts).index_select(0, order.argsort()).view(*ids.shape, -1)
        return (out.to(weights.dtype) * weights[..., None]).sum(1).to(x.dtype)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows sorted by expert, `counts` [E] each, through weight [E, out, in]: one kernel for bfloat16 on CUDA, else a product an expert."""
    if rows.is_cuda and rows.dtype == weight.dtype == torch.bfloat16 and all(n % 8 == 0 for n in weight.shape[1:]):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    # unbind, not indexing: its backward stacks once, where every index would fill a gradient of the whole stack
    groups = zip(rows.split(counts.tolist()), weight.unbind(0), strict=True)
    return torch.cat([F.linear(part, w) for part, w in groups if len(part)])


class LatentMoE(nn.Module):
    """Routed experts that work in a narrow latent, shared experts at full width."""

    def __init__(self, c: KimiLinearConfig):
        super().__init__()
        latent = c.routed_expert_hidden_size
        self.gate, self.experts = Router(c), Experts(c)
        if latent:
            self.routed_expert_down_proj = nn.Linear(c.hidden_size, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, c.hidden_size, bias=False)
        self.routed_expert_norm = RMSNorm(latent, c.rms_norm_eps) if latent and c.latent_moe_use_norm else None
        self.shared_experts = GatedMLP(c, c.num_shared_experts * c.moe_intermediate_size) if c.num_shared_experts else None

    def forward(self, x: Tensor, routing: "Routing") -> Tensor:
        scores = self.gate(x)
        if routing.ids is None:
            routing.ids = self.gate.choose(scores)
        latent = self.routed_expert_down_proj(x) if hasattr(self, "routed_expert_down_proj") else x
        out = self.experts(latent, routing.ids, self.gate.weigh(scores, routing.ids))
        if self.routed_expert_norm is not None:
            out = self.routed_expert_norm(out)
        if hasattr(self, "routed_expert_up_proj"):
            out = self.routed_expert_up_proj(out)
        return out if self.shared_experts is None else out + self.shared_experts(x)


@dataclass
class Routing:
    """Experts [N, k] of one layer's tokens: filled by the first pass, found again by a recomputed one, so that near ties cannot flip."""

    ids: Tensor | None = None


# ---------------------------------------------------------------- the decoder


class Weight(nn.Module):
    """A named vector or matrix whose use lies outside."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


def depth_mix(norm: Tensor, query: Tensor, eps: float, *rows: Tensor) -> Tensor:
    """Softmax over sources of <rmsnorm(row) * norm, query>, times the raw sources (arXiv 2603.15031 eq. 8-10). Rows [N, D]."""
    dtype = wide(*rows)
    key = norm.to(dtype) * query.to(dtype).flatten()
    scores = [(r.to(dtype) * key).sum(-1) * torch.rsqrt(r.to(dtype).square().mean(-1) + eps) for r in rows]
    weights = torch.stack(scores).softmax(0)[..., None]
    return sum(w * r for w, r in zip(weights, rows, strict=True)).to(rows[0].dtype)


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """Read over depth, mix over time, add; read over depth, MLP, add.

    The stream between layers is the running sum of the current block and the bank of finished sources, the embedding first.
    """

    def __init__(self, c: KimiLinearConfig, layer: int):
        super().__init__()
        self.residual, self.eps = c.residual, c.rms_norm_eps
        self.closes = c.residual == "full" or (c.residual == "block" and layer % c.attn_res_block_size == 0)
        self.self_attn = DeltaAttention(c, layer) if c.layer_types[layer] == "linear_attention" else LatentAttention(c, layer)
        if layer < c.first_k_dense_replace:
            self.mlp = GatedMLP(c, c.intermediate_size)
        else:
            self.block_sparse_moe = LatentMoE(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.residual != "plain":
            self.self_attention_res_norm, self.mlp_res_norm = Weight(c.hidden_size), Weight(c.hidden_size)
            self.self_attention_res_proj, self.mlp_res_proj = Weight(1, c.hidden_size), Weight(1, c.hidden_size)

    def forward(self, prefix: Tensor, *bank: Tensor, packing: Packing, past: Past | None, routing: Routing) -> tuple[Tensor, ...]:
        h = self._read("self_attention", prefix, bank)
        if self.closes:
            bank = (*bank, prefix)
        out = self.self_attn(self.input_layernorm(h), packing, past)
        prefix = out if self.closes else prefix + out
        h = self.post_attention_layernorm(self._read("mlp", prefix, bank))
        if self.residual == "full":
            bank = (*bank, prefix)
        out = self.mlp(h) if hasattr(self, "mlp") else self.block_sparse_moe(h, routing)
        return (out if self.residual == "full" else prefix + out, *bank)

    def _read(self, part: str, prefix: Tensor, bank: tuple[Tensor, ...]) -> Tensor:
        if self.residual == "plain":
            return prefix
        norm, query = getattr(self, f"{part}_res_norm"), getattr(self, f"{part}_res_proj")
        return recomputed(depth_mix, norm.weight, query.weight, self.eps, *bank, prefix)


class KimiK3PreTrainedModel(PreTrainedModel):
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        *("A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", r"\.o_norm\.", "e_score_correction_bias")
    ]
    _supports_sdpa = True
    _is_stateful = True  # a delta state cannot be taken back, so no assisted decoding
    _tied_weights_keys = {}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The start of training: projections normal, norms 1, pseudo-queries 0, no bias, and a decay of one token to a thousand."""
        std = self.config.get_text_config().initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding, Router)):
            init.normal_(module.weight, std=std)
        if isinstance(module, Router):
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, Experts):
            for weight in (module.w1, module.w3, module.w2):
                init.normal_(weight, std=std)
        elif isinstance(module, (RMSNorm, GatedHeadNorm)):
            init.ones_(module.weight)
        elif isinstance(module, ShortConv):
            bound = module.weight.shape[-1] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, DeltaAttention):
            init.zeros_(module.A_log)
            step = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            init.copy_(module.dt_bias, step + torch.log(-torch.expm1(-step)))  # inverse softplus
        elif isinstance(module, Weight):
            (init.zeros_ if module.weight.ndim == 2 else init.ones_)(module.weight)


class KimiK3TextModel(KimiK3PreTrainedModel):
    """Token ids to normed hidden states. (A class of its own name: conversion mappings are found by class name, and transformers
    has a `KimiLinearModel` with another mapping.)"""

    config_class = KimiLinearConfig

    def __init__(self, config: KimiLinearConfig):
        super().__init__(config)
        if getattr(config, "quantization_config", None):
            raise ValueError("quantization_config: quantised experts are not read by this code; export the model unquantised")
        self.gradient_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        if config.residual != "plain":
            self.output_attn_res_norm, self.output_attn_res_proj = Weight(config.hidden_size), Weight(1, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: DynamicCache | None = None,
        cu_seq_lens_q: Tensor | None = None,
        routing: list[Tensor] | None = None,
        packing: Packing | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, D], zero at padding.

        Packed documents: `position_ids` that start anew in each, or `cu_seq_lens_q` [documents + 1]. `routing`: experts to force, ids
        [N, k] a MoE layer. `output_hidden_states` and `output_attentions` are refused: between layers there is no one hidden state.
        """
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name):
                raise ValueError(f"{name} = True: not returned by this model")
        cache = cache if cache is not None else past_key_values
        packing = packing or Packing.build(input_ids, inputs_embeds, attention_mask, position_ids, cu_seq_lens_q, cache)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(cache, use_cache, packing)
        past = None if cache is None else Past.build(cache, packing, attention_mask)
        forced = iter(routing or [])
        stream = (packing.flatten(x),)
        for layer in self.layers:
            routes = Routing(next(forced, None) if hasattr(layer, "block_sparse_moe") else None)
            stream = layer(*stream, packing=packing, past=past, routing=routes)
        prefix, *bank = stream
        if self.config.residual != "plain":
            norm, query = self.output_attn_res_norm.weight, self.output_attn_res_proj.weight
            prefix = recomputed(depth_mix, norm, query, self.config.rms_norm_eps, *bank, prefix)
        return BaseModelOutputWithPast(last_hidden_state=packing.restore(self.norm(prefix)), cache=cache)

    def _cache(self, cache: DynamicCache | None, use_cache: bool | None, packing: Packing) -> DynamicCache | None:
        """The cache to use: the caller's, a new one, or none in training and for packed documents unless asked for."""
        if self.training and self.gradient_checkpointing and torch.is_grad_enabled():
            return None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packing.packed
        if not use_cache and cache is None:
            return None
        cache = DynamicCache(config=self.config) if cache is None else cache
        if cache.is_linear != [kind == "linear_attention" for kind in self.config.layer_types]:
            raise ValueError("cache: layers of another model; build it as DynamicCache(config=model.config)")
        return cache


KimiLinearModel = KimiK3TextModel  # the released name


def cross_entropy(head, x: Tensor, targets: Tensor) -> Tensor:
    """Sum over counted targets of -log softmax(head(x)), LOSS_ROWS tokens at a time: all float32 logits never exist together."""

    def rows(x: Tensor, targets: Tensor) -> Tensor:
        logits = head(x)
        return F.cross_entropy(logits.to(wide(logits)), targets, ignore_index=IGNORE, reduction="sum")

    return sum(recomputed(rows, *part) for part in zip(x.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True))


class KimiLinearForCausalLM(KimiK3PreTrainedModel, GenerationMixin):
    """The text model with its LM head: `language_model` of the nested form, or a flat `kimi_linear` folder."""

    config_class = KimiLinearConfig

    def __init__(self, config: KimiLinearConfig):
        super().__init__(config)
        self.model = KimiK3TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: DynamicCache | None = None,
        cu_seq_lens_q: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T or logits_to_keep, V], and the mean loss over counted targets where `labels` [B, T] are given.

        Labels are usually `input_ids`: the shift is made here; -100, padding and a document's first token are not counted.
        `num_items_in_batch` replaces the count; `shift_labels`, already shifted, may stand in for labels.
        With `config.logits_with_loss = False` a call with labels returns no logits.
        """
        shift_labels = kwargs.pop("shift_labels", None)  # not in the signature, from which Trainer reads which labels there must be
        cache = cache if cache is not None else past_key_values
        packing = Packing.build(input_ids, inputs_embeds, attention_mask, position_ids, cu_seq_lens_q, cache)
        out = self.model(
            input_ids, attention_mask, cache=cache, inputs_embeds=inputs_embeds, use_cache=use_cache, packing=packing, **kwargs
        )
        hidden, loss, logits = out.last_hidden_state, None, None
        training = labels is not None or shift_labels is not None
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if not training or self.config.logits_with_loss:
            kept = slice(-logits_to_keep if logits_to_keep else None, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        if training:
            targets = packing.next_labels(labels) if shift_labels is None else packing.flatten(shift_labels)
            if whole and logits is not None:
                total = cross_entropy(nn.Identity(), packing.flatten(logits), targets)
            else:
                total = cross_entropy(self.lm_head, packing.flatten(hidden), targets)
            loss = total / ((targets != IGNORE).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=out.cache)


class KimiK3ForConditionalGeneration(KimiK3PreTrainedModel, GenerationMixin):
    """The released nested form, `language_model.*`. Text only."""

    config_class = KimiK3Config
    base_model_prefix = "language_model"

    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        if config.vision_config:
            raise ValueError("vision_config is set: this code reads text-only folders; the vision tower is not supported")
        self.language_model = KimiLinearForCausalLM(config.text_config)
        self.post_init()

    @property
    def base_model(self) -> KimiK3TextModel:
        """The decoder: what trainers call for hidden states."""
        return self.language_model.model

    def get_decoder(self) -> KimiK3TextModel:
        return self.base_model

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.language_model.lm_head = value

    @wraps(KimiLinearForCausalLM.forward)
    def forward(self, *args, **kwargs):
        return self.language_model(*args, **kwargs)


# ---------------------------------------------------------------- files: one tensor an expert, A_log perhaps padded


class UnpadHeads(ConversionOps):
    """A_log [heads] of a vector that may be padded with zeros (the release stores 128) or shaped [1, 1, H, 1]; `inverse` pads it again."""

    def __init__(self, inverse: bool = False):
        self.inverse = inverse

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, config=None, **kwargs):
        stored = next(iter(input_dict.values()))
        flat = (stored[0] if isinstance(stored, list) else stored).flatten()
        text = config.get_text_config()
        heads = text.linear_attn_config["num_heads"]
        if self.inverse:
            flat = F.pad(flat, (0, max(0, (text.a_log_storage or 0) - heads)))
        elif flat.numel() > heads:
            if bool(flat[heads:].any()):
                raise ValueError(f"A_log: entries past the {heads} heads are not zero, so they are not padding")
            text.a_log_storage, flat = flat.numel(), flat[:heads].clone()
        return {target_patterns[0]: flat}

    @property
    def reverse_op(self) -> "UnpadHeads":
        return UnpadHeads(not self.inverse)


register_checkpoint_conversion_mapping(
    "KimiK3TextModel",
    [
        *(WeightConverter(rf"\.experts.*.{w}.weight", rf"\.experts.{w}", operations=[MergeModulelist(dim=0)]) for w in ("w1", "w3", "w2")),
        WeightConverter(r"\.self_attn.A_log", r"\.self_attn.A_log", operations=[UnpadHeads()]),
    ],
    overwrite=True,
)

__all__ = ["KimiK3ForConditionalGeneration", "KimiLinearForCausalLM", "KimiLinearModel"]
