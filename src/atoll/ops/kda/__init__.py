"""Kimi Delta Attention: linear attention with a per-channel decay and the delta rule (Kimi Linear, arXiv 2510.26692, eq. 1).

Paths: `reference.py` token by token, the formula; `chunk.py` in chunks, plain torch on any device; Triton on a GPU.
`kernel_report()` says which path each call took.
"""

from __future__ import annotations

import itertools
import os

from torch import Tensor

from atoll.ops.dispatch import calls as _calls
from atoll.ops.kda.chunk import kda_chunk
from atoll.ops.kda.reference import kda_recurrent, log_decay
from atoll.ops.kda.step import ConvState, OutputNorm, kda_step
from atoll.ops.kda.tiles import anchor_limit

__all__ = ["ConvState", "OutputNorm", "kda", "kda_step", "kernel_report", "log_decay"]

_BACKENDS = ("auto", "recurrent", "chunk", "triton", "fla")


def kernel_report(clear: bool = False) -> dict[str, int]:
    """How many calls took each path since the start or the last clear, with the reason when a faster path was passed over.

    `kda` counts under the bare path, other ops under their name and path, for example {"triton": 12, "kda_step triton": 40,
    "chunk (lower_bound = None is outside [-5.9, 0))": 3}; convolution and norms count kernels, and what a kernel on a GPU refused.
    `backend="triton"` raises instead of falling back.
    """
    report = dict(_calls)
    if clear:
        _calls.clear()
    return report


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


def _boundaries(cu_seqlens: Tensor, batch: int, length: int) -> list[int]:
    """Document boundaries as integers, checked."""
    if batch != 1:
        raise ValueError(f"kda: cu_seqlens needs a batch of 1, got B = {batch}; flatten the documents into one row")
    edges = cu_seqlens.tolist()
    if not edges or edges[0] != 0 or edges[-1] != length or any(a > b for a, b in itertools.pairwise(edges)):
        raise ValueError(f"kda: cu_seqlens must rise from 0 to T = {length}, got {edges[:4]} … {edges[-2:]}")
    return edges


def _triton_refusal(q: Tensor, v: Tensor, lower_bound: float | None, tensors: tuple[Tensor, ...]) -> str:
    """Why the Triton kernels cannot take this call; empty when they can."""
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are not on a GPU"
    try:
        from atoll.ops.kda.triton_path import refusal
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return refusal(q, v, lower_bound, tuple(t.dtype for t in tensors))


def _choose(backend: str, q: Tensor, v: Tensor, lower_bound: float | None, tensors: tuple[Tensor, ...]) -> tuple[str, str]:
    """The path, and why a faster one was passed over."""
    if backend not in _BACKENDS:
        raise ValueError(f"kda: backend = {backend!r}; it must be one of {', '.join(_BACKENDS)}")
    if backend == "fla":
        raise ValueError("kda: backend = 'fla' is not connected yet; use auto, triton, chunk or recurrent")
    if backend == "triton":
        reason = _triton_refusal(q, v, lower_bound, tensors)
        if reason:
            raise ValueError(f"kda: backend = 'triton': {reason}; use auto or chunk")
        return backend, ""
    if backend != "auto":
        return backend, ""
    reason = _triton_refusal(q, v, lower_bound, tensors) if q.is_cuda else ""
    if q.is_cuda and not reason:
        return "triton", ""
    if q.shape[1] <= 1 or (lower_bound is not None and -lower_bound > anchor_limit()):
        return "recurrent", reason
    return "chunk", reason


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
        cu_seqlens: int64 [N+1], document boundaries when B = 1; empty documents are allowed.
        backend: "auto", "recurrent" (token by token), "chunk" (plain torch), "triton", "fla".

    Returns:
        o [B, T, H, V] in v's dtype, and the final state [N, H, K, V] (float32 or wider) or None.

    Raises:
        ValueError: a shape, a dtype, the bound or the backend does not fit.
    """
    sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    _check(q, k, v, g, beta, A_log, dt_bias, initial_state, sequences)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"kda: lower_bound = {lower_bound}; it must be negative, or None for unbounded decay")
    boundaries = None if cu_seqlens is None else _boundaries(cu_seqlens, k.shape[0], k.shape[1])
    path, reason = _choose(backend, q, v, lower_bound, (q, k, v, g, beta))
    _calls[f"{path} ({reason})" if reason else path] += 1
    factor = k.shape[3] ** -0.5 if scale is None else float(scale)
    if path == "triton":
        from atoll.ops.kda.triton_path import kda_triton

        assert lower_bound is not None
        o, final = kda_triton(q, k, v, g, beta, A_log, dt_bias, lower_bound, factor, initial_state, boundaries, output_final_state)
    else:
        run = kda_recurrent if path == "recurrent" else kda_chunk
        o, final = run(q, k, v, g, beta, A_log, dt_bias, lower_bound, factor, initial_state, boundaries)
    return o, final if output_final_state else None
