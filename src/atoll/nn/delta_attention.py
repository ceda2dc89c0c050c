"""Kimi Delta Attention: linear attention with a decay per channel, bounded so that every 16-token tile is a matmul.

Kimi Linear, arXiv 2510.26692, eq. 1-10; the bounded decay is the Kimi K3 report's eq. 5, arXiv 2607.24653.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.nn.cache import DeltaState, value_major
from atoll.nn.carry import DeltaCarry
from atoll.nn.linear import Linear, Weight
from atoll.nn.pooled_cache import DeltaRows
from atoll.ops import kda
from atoll.ops.conv import short_conv
from atoll.ops.kda import ConvState, OutputNorm, kda_step
from atoll.ops.norm import gated_rms_norm


class DeltaAttention(nn.Module):
    """Causal mixing of tokens through one [K,V] state a head.

    `forward(x)` maps [B,T,dim] to [B,T,dim]. Packed documents: B = 1 and `cu_seqlens` [N+1]; state and convolution start
    anew in each. `cache` (a `DeltaState`, or `DeltaRows` for one token or a few of rows in a pool) carries both over calls and is updated
    in place.

    Args:
        dim: width of the input.
        num_heads, head_dim: heads H and their key and value width K = V; `head_dim` is also the rank of the decay's projection.
        conv_size: taps of the causal convolutions on queries, keys and values.
        lower_bound: lower bound of the log decay a token, in [-5, 0); None is the unbounded softplus gate.
        full_rank_gate: output gate by one matrix; else by two of rank `head_dim`.
        eps: epsilon of the output norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        conv_size: int = 4,
        lower_bound: float | None = -5.0,
        full_rank_gate: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.lower_bound, self.eps = num_heads, head_dim, lower_bound, eps
        self.probe: list[Tensor] | None = None
        inner = num_heads * head_dim
        weights = {"device": device, "dtype": dtype}
        exact = {"device": device, "dtype": torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)}
        self.q_proj, self.k_proj, self.v_proj = (Linear(dim, inner, **weights) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Weight(inner, 1, conv_size, **exact) for _ in range(3))
        self.f_a_proj, self.f_b_proj = Linear(dim, head_dim, **weights), Linear(head_dim, inner, **weights)
        self.A_log = nn.Parameter(torch.zeros(num_heads, **exact))
        self.dt_bias = nn.Parameter(torch.zeros(inner, **exact))
        self.b_proj = Linear(dim, num_heads, **weights)
        if full_rank_gate:
            self.g_proj = Linear(dim, inner, **weights)
        else:
            self.g_a_proj, self.g_b_proj = Linear(dim, head_dim, **weights), Linear(head_dim, inner, **weights)
        self.o_norm = Weight(head_dim, **exact)
        self.o_proj = Linear(inner, dim, **weights)

    def reset_parameters(self, std: float = 0.02) -> None:
        """A_log 0; dt_bias the inverse softplus of a log-uniform step in [1e-3, 1e-1]; filters uniform; projections normal(0, std)."""
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=std)
        for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d):
            bound = conv.weight.shape[-1] ** -0.5
            nn.init.uniform_(conv.weight, -bound, bound)
        with torch.no_grad():
            self.A_log.zero_()
            step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp().clamp_(min=1e-4)
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
            self.o_norm.weight.fill_(1.0)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, cache: DeltaState | DeltaCarry | DeltaRows | None = None) -> Tensor:
        if isinstance(cache, DeltaCarry):
            states = cache.enter(1 if cu_seqlens is None else cu_seqlens.numel() - 1)
            out = self.forward(x, cu_seqlens=cu_seqlens, cache=states)
            cache.leave(states)
            return out
        if isinstance(cache, DeltaRows):
            return self._row_steps(x, cache)
        if cache is not None and self._steps(x, cache):
            return self._step(x, cache)
        q, k, v = self._convolved(x, cu_seqlens, cache)
        live = q.shape[1]
        decay = self.f_b_proj(self.f_a_proj(x))[:, :live].reshape(q.shape)
        if self.probe is not None:
            self.probe.append(self.log_decay(decay.detach()))
        out, state = kda(
            q,
            k,
            v,
            decay,
            self.b_proj(x)[:, :live],
            self.A_log,
            self.dt_bias.view(self.num_heads, self.head_dim),
            lower_bound=self.lower_bound,
            initial_state=None if cache is None else cache.state,
            output_final_state=cache is not None,
            cu_seqlens=cu_seqlens,
        )
        if cache is not None:
            cache.state = state
        out = F.pad(out, (0, 0, 0, 0, 0, x.shape[1] - live)) if live < x.shape[1] else out
        out = gated_rms_norm(out, self.o_norm.weight, self._gate(x).view(out.shape), self.eps)
        return self.o_proj(out.flatten(2).to(x.dtype))

    def _gate(self, x: Tensor) -> Tensor:
        return self.g_proj(x) if hasattr(self, "g_proj") else self.g_b_proj(self.g_a_proj(x))

    def _steps(self, x: Tensor, cache: DeltaState) -> bool:
        """Whether the one-kernel step takes this call: one token after others, on a GPU, nothing to learn or to look at."""
        ready = cache.state is not None and cache.window is not None and self.probe is None
        return ready and x.is_cuda and x.shape[1] == 1 and not torch.is_grad_enabled() and x.dtype in (torch.float32, torch.bfloat16)

    def _step(self, x: Tensor, cache: DeltaState) -> Tensor:
        """One token of each sequence, [B,1,dim] to [B,1,dim]: convolution, recurrence and gated norm in one launch, the state in place."""
        assert cache.state is not None
        assert cache.window is not None
        cache.state = value_major(cache.state)
        token = x[:, 0]
        projected = (self.q_proj(token), self.k_proj(token), self.v_proj(token))
        filters = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
        out, _, conv = kda_step(
            projected,
            self.f_b_proj(self.f_a_proj(token)).view(-1, self.num_heads, self.head_dim),
            self.b_proj(token),
            self.A_log,
            self.dt_bias.view(self.num_heads, self.head_dim),
            cache.state,
            ConvState(filters, cache.window),
            lower_bound=self.lower_bound,
            norm=OutputNorm(self.o_norm.weight, self._gate(token), self.eps),
            inplace=True,
        )
        cache.window = conv.window
        return self.o_proj(out.flatten(1)).unsqueeze(1)

    # -------------------------------------------------- rows of a pool

    def _row_steps(self, x: Tensor, cache: DeltaRows) -> Tensor:
        """A few tokens of each row, [B,T,dim] to [B,T,dim], one after the other; slots are left as they are where it is a draft."""
        shape = (*x.shape[:2], self.num_heads, self.head_dim)
        projected = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        inputs = projected, self.f_b_proj(self.f_a_proj(x)).view(shape), self.b_proj(x)
        if cache.draft:
            cache.inputs = inputs
            state, window = (t.index_select(0, cache.slots) for t in (cache.state, cache.window))
            out = self._advance(inputs, state, window, [torch.arange(len(x), device=x.device)] * x.shape[1])
        else:
            out = self._advance(inputs, cache.state, cache.window, [cache.slots] * x.shape[1])
        out = gated_rms_norm(out, self.o_norm.weight, self._gate(x).view(shape), self.eps)
        return self.o_proj(out.flatten(2).to(x.dtype))

    def replay(self, cache: DeltaRows, counts: Tensor) -> None:
        """Advance the slots of a draft by its first `counts` int64 [B] tokens, for good: Kimi K3 report §5.4.2."""
        assert cache.inputs is not None
        steps = [torch.where(counts > t, cache.slots, -1) for t in range(int(counts.max()))]
        if steps:
            self._advance(cache.inputs, cache.state, cache.window, steps)
        cache.inputs = None

    def _advance(self, inputs: tuple[Tensor, Tensor, Tensor], state: Tensor, window: Tensor, slots: list[Tensor]) -> Tensor:
        """What is read at each step [B,T,H,V]; `state` and `window` advance in place. `slots`: int64 [B] a step, -1 to skip a row."""
        filters = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
        bias = self.dt_bias.view(self.num_heads, self.head_dim)
        outs = []
        for t, rows in enumerate(slots):
            token = [x[:, t] for x in inputs]
            conv = ConvState(filters, window)
            outs.append(kda_step(token[0], token[1], token[2], self.A_log, bias, state, conv, lower_bound=self.lower_bound, slots=rows)[0])
        return torch.stack(outs, 1)

    # -------------------------------------------------- whole sequences

    def _convolved(self, x: Tensor, cu_seqlens: Tensor | None, cache: DeltaState | None) -> tuple[Tensor, ...]:
        """Queries, keys and values [B,n,H,K] of a call's n real tokens after convolution and SiLU; moves the cache's window on."""
        live = x.shape[1] if cache is None or cache.count is None else cache.count
        inner = self.num_heads * self.head_dim
        windows = [None] * 3 if cache is None or cache.window is None else list(cache.window.split(inner, -1))
        pairs = ((self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d))
        outs, ends = [], []
        for (proj, conv), window in zip(pairs, windows, strict=True):
            y, end = short_conv(
                proj(x)[:, :live], conv.weight, initial_state=window, cu_seqlens=cu_seqlens, output_final_state=cache is not None
            )
            outs.append(y.view(x.shape[0], live, self.num_heads, self.head_dim))
            ends.append(end)
        if cache is not None:
            cache.window = torch.cat(ends, -1)
        return tuple(outs)

    def log_decay(self, logits: Tensor) -> Tensor:
        """Log decay g of raw logits [B,T,H,K], in at least float32: what the op computes inside, for looking at."""
        raw = logits.to(self.dt_bias.dtype) + self.dt_bias.detach().view(self.num_heads, self.head_dim)
        rate = self.A_log.detach().exp().unsqueeze(-1)
        return -rate * F.softplus(raw) if self.lower_bound is None else self.lower_bound * torch.sigmoid(rate * raw)
