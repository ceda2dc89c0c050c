"""KDA in chunks, in plain torch: every causal 16-token tile is a dense matmul, and only the chunk states are computed in order.

Kimi Linear, arXiv 2510.26692, §3.1 (the chunkwise form). Per head and chunk, with G the cumulative log-decay inside the chunk,
S the state entering it and the unit queries Q already scaled:

    A[i,j]   = beta_i sum_c k_i k_j exp(G_i - G_j), j < i      Aqk[i,j] = sum_c q_i k_j exp(G_i - G_j), j <= i
    T        = (I + A)^-1                                      X = T diag(beta) (V - (K exp G) S)
    O        = (Q exp G) S + Aqk X                             S' = exp(G_C) S + (K exp(G_C - G))^T X

Diagonal tiles: `tiles.py`. Tiles are joined in pairs until they fill the chunk: queries and keys of the later half carry the decay
from its start, keys of the earlier half the decay to its end, so every exponent there is at most zero; the inverse grows with them.

The backward pass is written out. Two facts make it short. With D = T^T dX the gradient of A is -D X^T, that of V is beta D, that of the
logit of beta (1 - beta) <D, X>: neither V nor T's factors are needed. And G enters only through exp(±G) beside q and k, so that
dG_i = q_i dq_i + k_i (dk_i as row) - k_i (dk_i as column), plus <S', dS'> at the chunk's last token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.kda.chunk_backward import backward
from atoll.ops.kda.chunk_forward import Chunks, Join, Spec, chunk_size, outputs, prepare, put_back, scan
from atoll.ops.kda.layout import Layout, chunk_layout
from atoll.ops.kda.reference import compute_dtype, kda_recurrent
from atoll.ops.kda.tiles import Tiles, anchor_limit

_KEEP_ELEMENTS = 1 << 23  # above this many query elements the backward pass recomputes the forward instead of keeping it


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, spec: Spec, state: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        chunks, joins = prepare(inputs, layout, spec)
        x, entering, final = scan(chunks, inputs[2], state, layout, spec)
        out = put_back(outputs(chunks, x, entering, spec), layout, inputs[2]).to(inputs[2].dtype)
        ctx.layout, ctx.spec, ctx.has_state, ctx.joins = layout, spec, state is not None, len(joins)
        ctx.keep = inputs[0].numel() <= _KEEP_ELEMENTS
        kept = [*chunks.tiles, *chunks[1:], *(t for join in joins for t in join), x, entering] if ctx.keep else []
        ctx.save_for_backward(*inputs, *([] if state is None else [state]), *kept)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, dfinal = grad_outputs
        layout, spec = ctx.layout, ctx.spec
        saved = ctx.saved_tensors  # once: recompute hooks refuse a second unpack
        inputs, rest = saved[:7], saved[7:]
        state, rest = (rest[0], rest[1:]) if ctx.has_state else (None, rest)
        if ctx.keep:
            chunks = Chunks(Tiles(*rest[:5]), *rest[5:16])
            joins = [Join(*rest[16 + 5 * j : 21 + 5 * j]) for j in range(ctx.joins)]
            x, entering = rest[-2:]
        else:
            chunks, joins = prepare(inputs, layout, spec)
            x, entering, _ = scan(chunks, inputs[2], state, layout, spec)
        return None, None, *backward(chunks, joins, x, entering, inputs, state, dout, dfinal, layout, spec)


def chunk_call(
    inputs: tuple[Tensor, ...], lower_bound: float | None, scale: float, boundaries: list[int] | None, size: int | None = None
) -> tuple[Layout, Spec]:
    """Where the tokens of a call lie in chunks, and what is not a tensor."""
    q, k = inputs[:2]
    batch, length, heads, width = k.shape
    edges = [n * length for n in range(batch + 1)] if boundaries is None else boundaries
    layout = chunk_layout(tuple(edges), size or chunk_size(width), heads, q.device)
    return layout, Spec(lower_bound, scale, compute_dtype(*inputs[:5]), batch * length, heads)


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float,
    initial_state: Tensor | None,
    boundaries: list[int] | None,
    size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The chunked path; arguments as `kda_recurrent`, `size` the chunk's tokens (16, 32, 64 or 128).

    Returns:
        o [B, T, H, V] in v's dtype, final state [N, H, K, V] in at least float32.
    """
    if lower_bound is not None and abs(lower_bound) > anchor_limit():
        raise ValueError(
            f"kda: lower_bound = {lower_bound}: below {-anchor_limit():.2f} a chunk's factors leave float32's range; use backend recurrent"
        )
    if k.shape[0] * k.shape[1] == 0:
        return kda_recurrent(q, k, v, g, beta, A_log, dt_bias, lower_bound, scale, initial_state, boundaries)
    inputs = (q, k, v, g, beta, A_log, dt_bias)
    return _ChunkKDA.apply(*chunk_call(inputs, lower_bound, scale, boundaries, size), initial_state, *inputs)  # pyright: ignore[reportReturnType]
