"""Kimi Delta Attention: linear attention with a per-channel decay and the delta rule (Kimi Linear, arXiv 2510.26692, eq. 1).

Paths: `reference.py` token by token, the formula; `chunk.py` in chunks, plain torch on any device; `triton_path.py` on a GPU;
`fla_path.py`, flash-linear-attention's kernels, only when asked for. `kernel_report()` says which path each call took, `strict()`
makes a fallback an error.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from atoll.ops.dispatch import HAS_TRITON, count, kernel_report, passed_over, strict
from atoll.ops.kda import fla_path
from atoll.ops.kda.chunk import kda_chunk
from atoll.ops.kda.chunk_op import kda_chunk_op
from atoll.ops.kda.reference import Inputs, kda_recurrent, log_decay
from atoll.ops.kda.step import ConvState, OutputNorm, kda_step
from atoll.ops.kda.table import checked
from atoll.ops.kda.tiles import anchor_limit
from atoll.ops.kda.triton_path import kda_triton, refusal

__all__ = ["ConvState", "OutputNorm", "kda", "kda_step", "kernel_report", "log_decay", "strict"]

_BACKENDS = ("auto", "recurrent", "chunk", "triton", "fla")


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], letters: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"kda: {name} has shape {tuple(tensor.shape)}; it must be {letters} = {shape}")


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor | None, sequences: int
) -> None:
    if k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"kda: k has shape {tuple(k.shape)}, v {tuple(v.shape)}; they must be [B, T, H, K] and [B, T, H, V]")
    batch, length, heads, width = k.shape
    _expect("q", q, (batch, length, heads, width), "[B, T, H, K]")
    _expect("v", v, (batch, length, heads, v.shape[3]), "[B, T, H, V]")
    _expect("g", g, (batch, length, heads, width), "[B, T, H, K]")
    _expect("beta", beta, (batch, length, heads), "[B, T, H]")
    _expect("A_log", A_log, (heads,), "[H]")
    _expect("dt_bias", dt_bias, (heads, width), "[H, K]")
    if state is not None:
        _expect("initial_state", state, (sequences, heads, width, v.shape[3]), "[N, H, K, V]")
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if not tensor.is_floating_point():
            raise ValueError(f"kda: {name} has dtype {tensor.dtype}; it must be a floating dtype")


def _triton_refusal(q: Tensor, v: Tensor, lower_bound: float | None, tensors: tuple[Tensor, ...]) -> str:
    """Why the Triton kernels cannot take this call; empty when they can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    return refusal(q, v, lower_bound, tuple(t.dtype for t in tensors))


def _choose(backend: str, q: Tensor, v: Tensor, lower_bound: float | None, tensors: tuple[Tensor, ...]) -> tuple[str, str]:
    """The path, and why a faster one was passed over."""
    if backend not in _BACKENDS:
        raise ValueError(f"kda: backend = {backend!r}; it must be one of {', '.join(_BACKENDS)}")
    if backend in ("triton", "fla"):
        reason = _triton_refusal(q, v, lower_bound, tensors) if backend == "triton" else fla_path.refusal(q, lower_bound)
        if not q.is_cuda and (backend == "fla" or os.environ.get("TRITON_INTERPRET") != "1"):
            reason = "the tensors are not on a GPU"
        if reason:
            raise ValueError(f"kda: backend = {backend!r}: {reason}; use auto or chunk")
    if backend != "auto":
        return backend, ""
    reason = _triton_refusal(q, v, lower_bound, tensors) if q.is_cuda else ""
    if q.is_cuda and not reason:
        return "triton", ""
    path = "recurrent" if q.shape[1] <= 1 or (lower_bound is not None and -lower_bound > anchor_limit()) else "chunk"
    if reason:
        passed_over("kda", reason, path)
    return path, reason


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences; L2 norms of q and k, the gate and the sigmoid of beta are inside.

    Per head, with S zero or given at the start of each document, q and k divided by sqrt(sum of squares + 1e-6):
    `S <- exp(g) S; S <- S + beta k (v - S^T k)^T; o = S^T q scale` (Kimi Linear, arXiv 2510.26692, eq. 1).
    An output does not depend on a later token, bit for bit.

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]; floating dtypes. Arithmetic in float32, or float64 when an input is.
        g: [B, T, H, K] raw decay logits. beta: [B, T, H] raw logits. A_log: [H]. dt_bias: [H, K].
        lower_bound: negative bound of the log-decay, `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`;
            None is the unbounded `-exp(A_log) * softplus(g + dt_bias)`.
        scale: factor on q; K^-0.5 by default.
        initial_state: [N, H, K, V]; N = B, or the number of documents.
        output_final_state: also return the states after each sequence.
        cu_seqlens: int64 [N+1], document boundaries from 0 to T when B = 1; empty documents are allowed. On the CPU they are checked.
            On a GPU the Triton path neither checks nor waits for them (it can be captured in a CUDA graph): they have to rise from 0 to
            T, and tokens that no document covers, were there any, get no output. The torch paths read them back.
        backend: "auto": Triton on a GPU when the call fits its kernels (see `refusal` in triton_path.py: decay bounded by -5.5 or
            less, widths, dtypes), else plain torch, in chunks. "recurrent" (token by token), "chunk" (plain torch), "triton", or "fla":
            flash-linear-attention's chunk_kda, when atoll[fla] is installed.

    Returns:
        o [B, T, H, V] in v's dtype, and the final state [N, H, K, V] (float32 or wider) or None.

    Under torch.compile "triton" and "chunk" are one op each, whatever the boundaries; "recurrent" is traced, token by token, and "fla"
    breaks the graph.

    Raises:
        ValueError: a shape, a dtype, the bound or the backend does not fit; in strict mode, a fallback on a GPU.
    """
    sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    _check(q, k, v, g, beta, A_log, dt_bias, initial_state, sequences)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"kda: lower_bound = {lower_bound}; it must be negative, or None for unbounded decay")
    if cu_seqlens is not None and k.shape[0] != 1:
        raise ValueError(f"kda: cu_seqlens needs a batch of 1, got B = {k.shape[0]}; flatten the documents into one row")
    path, reason = _choose(backend, q, v, lower_bound, (q, k, v, g, beta))
    factor = k.shape[3] ** -0.5 if scale is None else float(scale)
    o, final = _run(path, reason, (q, k, v, g, beta, A_log, dt_bias), lower_bound, factor, initial_state, cu_seqlens, output_final_state)
    return o, final if output_final_state else None


def _run(
    path: str,
    reason: str,
    inputs: Inputs,
    lower_bound: float | None,
    scale: float,
    state: Tensor | None,
    edges: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    if path == "triton":  # counts by itself, compiled or not
        assert lower_bound is not None
        return kda_triton(*inputs, lower_bound, scale, state, edges, output_final_state)
    if torch.compiler.is_compiling():
        if path == "chunk":
            return kda_chunk_op(*inputs, state, edges, lower_bound, scale, reason)
    else:
        count(path, reason)
    if path == "fla":
        return fla_path.kda_fla(*inputs, lower_bound, scale, state, edges, output_final_state)
    boundaries = None if edges is None else checked(edges, *inputs[1].shape[:2])
    run = kda_recurrent if path == "recurrent" else kda_chunk
    return run(*inputs, lower_bound, scale, state, boundaries)
