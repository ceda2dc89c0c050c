"""Causal attention behind a long prefix: two plain calls of a fused kernel, joined by their log-sum-exps.

Queries i = 0 … T-1 see the keys of the prefix and the keys 0 … i of their own. A mask [T, S] of that would be as large as the scores;
without one, part p gives softmax(q k_pᵀ) v_p and the logarithm of its normaliser, and with l = log Σ exp(l_p)

    out = Σ_p exp(l_p - l) out_p.

The gradient needs no more than that: the probabilities of the joint softmax are exp(q kᵀ - l), and Σ_j P_ij dP_ij is the row sum of
dout · out. So each part's own backward kernel, given the joint `out` and `l` in place of its own, returns the joint gradient: the method
of FlashAttention (arXiv 2205.14135, Algorithm 4) with the blocks apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.situ import wide


class _Part(NamedTuple):
    """out [B,H,T,Dv], log-sum-exp [B,H,T] in at least float32, and what the kernel wants back."""

    out: Tensor
    lse: Tensor
    extra: tuple[Any, ...]


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Part:
    """The twin: [B,H,T,D], [B,H,S,D], [B,H,S,Dv]."""
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return _Part(((scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype)).to(v.dtype), lse, ())


def _plain_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, _: Any) -> Any:
    scores = _scores(q, k, causal, scale)
    exact = scores.dtype
    grad = grad.to(exact)
    p = (scores - lse.unsqueeze(-1)).exp()
    d_scores = p * (grad @ v.to(exact).mT - (grad * out.to(exact)).sum(-1, keepdim=True)) * scale
    return d_scores @ k.to(exact), d_scores.mT @ q.to(exact), p.mT @ grad


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    exact = wide(q.dtype)
    scores = q.to(exact) @ k.to(exact).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return scores


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Part:
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return _Part(found[0], found[1].view(q.shape[:3]), tuple(found[2:8]))


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, extra: tuple[Any, ...]
) -> Any:
    q_edges, k_edges, q_most, k_most, seed, offset = extra
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    stats = lse.unsqueeze(-1).contiguous()
    return op(grad, q, k, v, out, stats, seed, offset, None, q_edges, k_edges, q_most, k_most, 0.0, causal, scale=scale)


class _Prefixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, fused: bool) -> Tensor:
        offset = k.shape[2] - q.shape[2]
        run = _cudnn if fused else _plain
        ahead = run(q, k[:, :, :offset], v[:, :, :offset], False, scale)
        own = run(q, k[:, :, offset:], v[:, :, offset:], True, scale)
        lse = torch.logaddexp(ahead.lse, own.lse)
        out = sum(p.out.to(lse.dtype) * (p.lse - lse).exp().unsqueeze(-1) for p in (ahead, own))
        assert isinstance(out, Tensor)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.fused, ctx.extra = scale, fused, (ahead.extra, own.extra)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        offset = k.shape[2] - q.shape[2]
        run = _cudnn_backward if ctx.fused else _plain_backward
        grad = grads[0].to(q.dtype)
        parts = ((slice(offset), False, ctx.extra[0]), (slice(offset, None), True, ctx.extra[1]))
        (q0, k0, v0), (q1, k1, v1) = (run(grad, q, k[:, :, s], v[:, :, s], out, lse, c, ctx.scale, e) for s, c, e in parts)
        return (q0.to(lse.dtype) + q1).to(q.dtype), torch.cat([k0, k1], 2).to(k.dtype), torch.cat([v0, v1], 2).to(v.dtype), None, None


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, fused: bool | None = None) -> Tensor:
    """softmax(scale q kᵀ) v, query i over the keys 0 … S - T + i; nothing of size T x S is formed on a GPU.

    q [B,T,H,D], k [B,S,H,D], v [B,S,H,Dv], T < S -> [B,T,H,Dv] in q.dtype; softmax and sums in at least float32. fused: cuDNN's kernels,
    for 16-bit floats on a GPU; None takes them there. Differentiable once. Raises ValueError when there is no prefix.
    """
    if k.shape[1] <= q.shape[1]:
        raise ValueError(f"{q.shape[1]} queries and {k.shape[1]} keys: more keys than queries are expected")
    fused = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) if fused is None else fused
    out = _Prefixed.apply(*(t.transpose(1, 2) for t in (q, k, v)), scale, fused)
    return out.transpose(1, 2)  # type: ignore[no-any-return,union-attr]
