"""Norms over the last dimension: RMSNorm, gated RMSNorm, L2. Statistics in at least float32; backward written by hand to save passes.

On a GPU one kernel each way (`norm_launch.py`); the functions below are their twins, for any device and float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.dispatch import use_triton
from atoll.ops.norm_launch import norm, norm_refusal


def _wide(x: Tensor) -> Tensor:
    """`x` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    # vector_norm reads x once and writes no square of it
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def _normalise_backward(x: Tensor, rstd: Tensor, dnormed: Tensor, count: int) -> Tensor:
    """Gradient of x * rstd when rstd = (sum x² / count + eps)^-1/2: rstd * (d − x̂ <d, x̂> / count). Overwrites nothing."""
    inner = (dnormed * x).sum(-1, keepdim=True).mul_(rstd.pow(3).mul_(-1.0 / count))
    return torch.addcmul(dnormed * rstd, x, inner)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        rstd = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, rstd)
        # the release casts to the input's dtype before it multiplies by the weight
        return ((wide * rstd).to(x.dtype) * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,) = grad_outputs
        x, weight, rstd = ctx.saved_tensors
        wide, dy = _wide(x), _wide(dy)
        dweight = _rows(dy * wide).mul_(_rows(rstd)).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        dx = _normalise_backward(wide, rstd, dy * weight, x.shape[-1]).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, dweight, None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        rstd = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, gate, rstd)
        return (wide * rstd).mul_(weight).mul_(torch.sigmoid(_wide(gate))).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,) = grad_outputs
        x, weight, gate, rstd = ctx.saved_tensors
        wide, sigmoid = _wide(x), torch.sigmoid(_wide(gate))
        normed = wide * rstd
        upstream = _wide(dy) * sigmoid  # gradient of weight * normed
        partial = upstream * normed
        dweight = _rows(partial).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        dgate = partial.mul_(weight).mul_(1 - sigmoid).to(gate.dtype) if ctx.needs_input_grad[2] else None
        dx = _normalise_backward(wide, rstd, upstream.mul_(weight), x.shape[-1]).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, dweight, dgate, None


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd)
        return (wide * rstd).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,) = grad_outputs
        x, rstd = ctx.saved_tensors
        return _normalise_backward(_wide(x), rstd, _wide(dy), 1).to(x.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, backend: str = "auto") -> Tensor:
    """`weight * (x * rsqrt(mean(x²) + eps))` over the last dimension, cast to x's dtype before the weight.

    Args:
        x: [..., D], any floating dtype; statistics in float32 (float64 for float64).
        weight: [D], starts at one.
        eps: added to the mean of the squares.
        backend: "auto", "triton" or "torch".

    Returns:
        [..., D] in x's dtype. Zhang and Sennrich, arXiv 1910.07467, eq. 4.
    """
    if use_triton("rms_norm", backend, x.is_cuda, norm_refusal(x, weight) if x.is_cuda or backend == "triton" else ""):
        return norm(x, weight, None, eps, True)
    return _RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float = 1e-5, *, backend: str = "auto") -> Tensor:
    """`weight * x * rsqrt(mean(x²) + eps) * sigmoid(gate)`, float32 inside (Kimi Linear, arXiv 2510.26692, eq. 10).

    Args:
        x: [..., D]; mean over the last dimension (one head).
        weight: [D].
        gate: raw logits, x's shape.
        backend: "auto", "triton" or "torch".

    Returns:
        [..., D] in x's dtype.
    """
    if use_triton("gated_rms_norm", backend, x.is_cuda, norm_refusal(x, weight, gate) if x.is_cuda or backend == "triton" else ""):
        return norm(x, weight, gate, eps, True)
    return _GatedRMSNorm.apply(x, weight, gate, eps)  # pyright: ignore[reportReturnType]


def l2_norm(x: Tensor, eps: float = 1e-6, *, backend: str = "auto") -> Tensor:
    """`x / sqrt(sum(x²) + eps)` over the last dimension: [..., D] in, same shape and dtype out. eps joins the sum, not the mean."""
    if use_triton("l2_norm", backend, x.is_cuda, norm_refusal(x) if x.is_cuda or backend == "triton" else ""):
        return norm(x, None, None, eps, False)
    return _L2Norm.apply(x, eps)  # pyright: ignore[reportReturnType]
