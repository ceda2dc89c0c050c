"""Gated latent attention without positions (MLA, NoPE): keys and values come from one cached latent a token.

DeepSeek-V2, arXiv 2405.04434, eq. 9-13, without rotation; output gate of arXiv 2505.06708; Kimi K3 report eq. 7.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.nn.cache import LatentState
from atoll.nn.carry import LatentCarry
from atoll.nn.linear import Linear, RMSNorm
from atoll.nn.pooled_cache import LatentRows
from atoll.ops.attention import causal_attention, latent_attention_step
from atoll.ops.paged_attention import paged_latent_attention
from atoll.ops.situ import wide


class LatentAttention(nn.Module):
    """Causal softmax attention, [B,T,dim] to [B,T,dim].

    The cache holds kv_lora_rank + rope_dim values a token. Whole sequences expand it to keys and values; a single new token, and
    any tokens of rows in a pool (`LatentRows`), use the absorbed form, which never does. The `rope_dim` channels are a key shared
    by all heads; they are never rotated and count in the scale. Packed documents: B = 1 and `cu_seqlens` [N+1].

    Args:
        dim: width of the input. num_heads: H. q_lora_rank: rank of the query, or None for a direct projection.
        kv_lora_rank: width of the latent. nope_dim, rope_dim, v_dim: per-head key, shared key and value widths.
        output_gate: multiply the output by sigmoid(g_proj x). latent_eps: epsilon of the two latent norms.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        output_gate: bool = True,
        latent_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.nope_dim, self.rope_dim, self.v_dim = nope_dim, rope_dim, v_dim
        self.scale = (nope_dim + rope_dim) ** -0.5
        self.track_max_logit = False
        self.max_norms: Tensor | None = None  # [2,H]: the longest query and the longest key of each head since it was last set to None
        weights = {"device": device, "dtype": dtype}
        q_width = num_heads * (nope_dim + rope_dim)
        if q_lora_rank is None:
            self.q_proj = Linear(dim, q_width, **weights)
        else:
            self.q_a_proj = Linear(dim, q_lora_rank, **weights)
            self.q_a_layernorm = RMSNorm(q_lora_rank, latent_eps, **weights)
            self.q_b_proj = Linear(q_lora_rank, q_width, **weights)
        self.kv_a_proj_with_mqa = Linear(dim, kv_lora_rank + rope_dim, **weights)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, latent_eps, **weights)
        self.kv_b_proj = Linear(kv_lora_rank, num_heads * (nope_dim + v_dim), **weights)
        self.g_proj = Linear(dim, num_heads * v_dim, **weights) if output_gate else None
        self.o_proj = Linear(num_heads * v_dim, dim, **weights)

    def reset_parameters(self, std: float = 0.02) -> None:
        """Projections normal(0, std), norm weights 1."""
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, cache: LatentState | LatentCarry | LatentRows | None = None
    ) -> Tensor:
        q = self._queries(x)
        rows = self._latent_rows(x)
        if isinstance(cache, LatentRows):
            return self._output(x, self._paged(q, rows, cache))
        if isinstance(cache, LatentCarry):
            cache.rows = rows
            before = 0 if cache.prefix is None else cache.prefix.shape[1]
            rows = rows if cache.prefix is None else torch.cat([cache.prefix, rows], 1)
            bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
            return self._output(x, self._attend_from(q, rows, before, bounds))
        offset = 0
        if cache is not None:
            offset = cache.length
            rows = cache.append(rows)
        if offset and x.shape[1] == 1:
            out = self._absorbed(q, rows)
        else:
            k, v = self._expand(rows)
            if self.track_max_logit and self.training:
                self._note_norms(q, k)
            out = causal_attention(q, k, v, scale=self.scale, cu_seqlens=cu_seqlens, offset=offset)
        return self._output(x, out)

    def _output(self, x: Tensor, out: Tensor) -> Tensor:
        out = out.flatten(2)
        if self.g_proj is not None:
            out = out * torch.sigmoid(self.g_proj(x))
        return self.o_proj(out.to(x.dtype))

    def _attend_from(self, q: Tensor, rows: Tensor, before: int, bounds: list[int]) -> Tensor:
        """Queries [1,T,...] of a part of a row, whose documents lie at `bounds`, over the latents [1,before+T,...] of that part and of the
        `before` tokens ahead of it that its first document has."""
        k, v = self._expand(rows)
        if self.track_max_logit and self.training:
            self._note_norms(q, k)
        n = bounds[1]
        outs = [causal_attention(q[:, :n], k[:, : before + n], v[:, : before + n], scale=self.scale, offset=before)]
        if n < q.shape[1]:
            rest = torch.tensor([b - n for b in bounds[1:]], device=q.device)
            outs.append(causal_attention(q[:, n:], k[:, before + n :], v[:, before + n :], scale=self.scale, cu_seqlens=rest))
        return torch.cat(outs, 1)

    def _queries(self, x: Tensor) -> Tensor:
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.view(*x.shape[:2], self.num_heads, self.nope_dim + self.rope_dim)

    def _latent_rows(self, x: Tensor) -> Tensor:
        """What the cache holds of each token: normed latent, then the shared key as projected. [B,T,kv_lora+rope]"""
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.rope_dim], -1)
        return torch.cat([self.kv_a_layernorm(latent), k_pe], -1)

    def _expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B,S,H,nope+rope] and values [B,S,H,v] of cached rows [B,S,kv_lora+rope]."""
        latent, k_pe = rows.split([self.kv_lora_rank, self.rope_dim], -1)
        kv = self.kv_b_proj(latent).view(*rows.shape[:2], self.num_heads, self.nope_dim + self.v_dim)
        k_nope, v = kv.split([self.nope_dim, self.v_dim], -1)
        return torch.cat([k_nope, k_pe.unsqueeze(2).expand(-1, -1, self.num_heads, -1)], -1), v

    def _absorbed(self, q: Tensor, rows: Tensor) -> Tensor:
        """One new token against cached rows, keys and values never formed. [B,1,H,v]"""
        q_latent, q_pe, w_v = self._absorb(q)
        latent, k_pe = rows.split([self.kv_lora_rank, self.rope_dim], -1)
        lengths = torch.full((q.shape[0],), rows.shape[1], device=q.device)
        context = latent_attention_step(q_latent, q_pe, latent, k_pe, lengths, scale=self.scale)
        return torch.einsum("bthc,hvc->bthv", context.to(w_v.dtype), w_v)

    def _paged(self, q: Tensor, rows: Tensor, cache: LatentRows) -> Tensor:
        """New tokens [B,T] of rows of different lengths against their pages. [B,T,H,v]"""
        q_latent, q_pe, w_v = self._absorb(q)
        lengths, query = cache.append(rows), torch.cat([q_latent, q_pe], -1)
        context, _ = paged_latent_attention(
            query, cache.pages, cache.table, lengths, counts=cache.counts, width=self.kv_lora_rank, scale=self.scale
        )
        return torch.einsum("bthc,hvc->bthv", context.to(w_v.dtype), w_v)

    def _absorb(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries in the latent's space [B,T,H,kv_lora], those of the shared key, and the weights from context to values [H,v,kv_lora]."""
        weight = self.kv_b_proj.weight.view(self.num_heads, self.nope_dim + self.v_dim, self.kv_lora_rank)
        w_k, w_v = weight.split([self.nope_dim, self.v_dim], 1)
        q_nope, q_pe = q.split([self.nope_dim, self.rope_dim], -1)
        return torch.einsum("bthn,hnc->bthc", q_nope, w_k), q_pe, w_v

    @torch.no_grad()
    def _note_norms(self, q: Tensor, k: Tensor) -> None:
        norms = torch.stack([x.to(wide(x.dtype)).norm(dim=-1).amax((0, 1)) for x in (q, k)])
        self.max_norms = norms if self.max_norms is None else torch.maximum(self.max_norms, norms)

    @property
    def max_logit(self) -> Tensor | None:
        """An upper bound [H] of each head's largest logit, by Cauchy-Schwarz: exact maxima would cost a second attention.

        Of norms that are maxima over all tokens, however those were split over calls or processes.
        """
        return None if self.max_norms is None else self.scale * self.max_norms.prod(0)
