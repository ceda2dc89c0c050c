"""Gated activations of the MLPs and experts: SiTU-GLU (Kimi K3 report, arXiv 2607.24653, eq. 12) and SwiGLU (arXiv 2002.05202).

Both save only their two inputs and recompute the rest in the backward pass. Everything inside runs in at least float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def tanh_(x: Tensor) -> Tensor:
    """tanh in place. On a CPU through expm1, half the time of tanh there, with a relative error near eps at 0 too."""
    if x.device.type != "cpu":
        return x.tanh_()
    # tanh saturates to 1 in float64 at 19.1, and exp(40) is far from overflow. clamp keeps NaN.
    e = x.clamp_(-20.0, 20.0).mul_(2.0).expm1_()
    return e.div_(e + 2.0)


def situ_values(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """The activation itself, without autograd, for inputs already in the dtype to compute in."""
    out = tanh_(gate / beta).mul_(torch.sigmoid(gate))
    if linear_beta is None:
        return out.mul_(up).mul_(beta)
    return out.mul_(tanh_(up / linear_beta)).mul_(beta * linear_beta)


def situ_backward(
    gate: Tensor, up: Tensor, beta: float, linear_beta: float | None, grad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(value, d value/d gate, d value/d up), the last two times `grad` where given."""
    s = torch.sigmoid(gate)
    t = tanh_(gate / beta)
    if linear_beta is None:
        v, dv = up, None
    else:
        u = tanh_(up / linear_beta)
        v = u * linear_beta
        dv = u.mul_(u).neg_().add_(1.0)
    g = t * s
    # d/da [beta tanh(a/beta) sigmoid(a)] = s (1 - t²) + beta t s (1 - s) = s (1 + t (beta (1 - s) - t))
    d_gate = s.mul(-beta).add_(beta).sub_(t).mul_(t).add_(1.0).mul_(s).mul_(v)
    d_up = g.mul_(beta)
    value = d_up * v
    if dv is not None:
        d_up = d_up.mul_(dv)
    if grad is not None:
        d_gate.mul_(grad)
        d_up.mul_(grad)
    return value, d_gate, d_up


def swiglu_values(gate: Tensor, up: Tensor) -> Tensor:
    return torch.sigmoid(gate).mul_(gate).mul_(up)


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As `situ_backward`, for silu(gate) * up."""
    s = torch.sigmoid(gate)
    d_up = s * gate
    value = d_up * up
    d_gate = s.neg().add_(1.0).mul_(gate).add_(1.0).mul_(s).mul_(up)
    if grad is not None:
        d_gate.mul_(grad)
        d_up.mul_(grad)
    return value, d_gate, d_up


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32, or float64 where the input is."""
    return torch.promote_types(dtype, torch.float32)


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        dtype = wide(gate.dtype)
        return situ_values(gate.to(dtype), up.to(dtype), beta, linear_beta).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        gate, up = ctx.saved_tensors
        dtype = wide(gate.dtype)
        _, d_gate, d_up = situ_backward(gate.to(dtype), up.to(dtype), *ctx.betas, grad=grad.to(dtype))
        return d_gate.to(gate.dtype), d_up.to(up.dtype), None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        dtype = wide(gate.dtype)
        return swiglu_values(gate.to(dtype), up.to(dtype)).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        gate, up = ctx.saved_tensors
        dtype = wide(gate.dtype)
        _, d_gate, d_up = swiglu_backward(gate.to(dtype), up.to(dtype), grad.to(dtype))
        return d_gate.to(gate.dtype), d_up.to(up.dtype)


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must have one shape and dtype")


def situ_glu(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float | None = 25.0) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta): bounded by beta * linear_beta, SwiGLU to first order at 0.

    gate, up: any one shape, one dtype; the result has both. `linear_beta=None` leaves `up` uncapped. Differentiable once.
    Source: Kimi K3 report, arXiv 2607.24653, eq. 12 and appendix B. Raises ValueError when shapes or dtypes differ.
    """
    _check(gate, up)
    return _Situ.apply(gate, up, beta, linear_beta)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; shapes and dtypes as in `situ_glu`. Source: GLU variants, arXiv 2002.05202."""
    _check(gate, up)
    return _Swiglu.apply(gate, up)  # type: ignore[no-any-return]
