"""Chunked KDA as one op of torch.compile: its loops over documents and the boundaries they need never enter a graph.

The backward op computes the forward pass again: what `chunk.py` keeps outside of graphs has no fixed shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atoll.ops.dispatch import count
from atoll.ops.kda.chunk import chunk_call, kda_chunk
from atoll.ops.kda.chunk_backward import backward
from atoll.ops.kda.chunk_forward import prepare, scan
from atoll.ops.kda.reference import compute_dtype
from atoll.ops.kda.table import checked


def _boundaries(k: Tensor, edges: Tensor | None) -> list[int] | None:
    return None if edges is None else checked(edges, k.shape[0], k.shape[1])


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    edges: Tensor | None,
    lower_bound: float | None,
    scale: float,
    reason: str,
) -> tuple[Tensor, Tensor]:
    count("chunk", reason)
    o, final = kda_chunk(q, k, v, g, beta, A_log, dt_bias, lower_bound, scale, state, _boundaries(k, edges))
    return o.contiguous(), final.contiguous()


def _backward(
    do: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    edges: Tensor | None,
    lower_bound: float | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q, k, v, g, beta, A_log, dt_bias)
    if k.shape[0] * k.shape[1] == 0:
        dstate = None if state is None else dfinal.to(state.dtype, copy=True)
        grads: tuple[Tensor | None, ...] = (dstate, *(torch.zeros_like(x) for x in inputs))
    else:
        layout, spec = chunk_call(inputs, lower_bound, scale, _boundaries(k, edges))
        chunks, joins = prepare(inputs, layout, spec)
        x, entering, _ = scan(chunks, v, state, layout, spec)
        grads = backward(chunks, joins, x, entering, inputs, state, do, dfinal, layout, spec)
    found = [x.contiguous() for x in grads[1:] if x is not None]
    return *found, do.new_empty(0) if grads[0] is None else grads[0].contiguous()  # pyright: ignore[reportReturnType]


_op = torch.library.custom_op("atoll::kda_chunk", _forward, mutates_args=())
_back = torch.library.custom_op("atoll::kda_chunk_backward", _backward, mutates_args=())


@_op.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    edges = rest[3]
    documents = k.shape[0] if edges is None else edges.numel() - 1
    final = v.new_empty(documents, k.shape[2], k.shape[3], v.shape[3], dtype=compute_dtype(q, k, v, g, beta))
    return torch.empty_like(v, memory_format=torch.contiguous_format), final


@_back.register_fake
def _back_fake(do: Tensor, dfinal: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    inputs, state = rest[:7], rest[7]
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*inputs, *([] if state is None else [state]))]
    return (*like, do.new_empty(0)) if state is None else tuple(like)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.constants = inputs[9:11]


def _gradients(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    *grads, dstate = _back(do, dfinal, *saved, *ctx.constants)
    return *grads, None if saved[7] is None else dstate, *[None] * 4


_op.register_autograd(_gradients, setup_context=_setup)
kda_chunk_op = _op
