"""Gated activations of the MLPs and experts: SiTU-GLU (Kimi K3 report, arXiv 2607.24653, eq. 12) and SwiGLU (arXiv 2002.05202).

Both keep only their two inputs and recompute the rest in the backward pass. Everything inside runs in at least float32. On a CPU
these passes cost as much time as the matmuls around them, so they work in given buffers, a cache-sized piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Betas = tuple[float, float | None] | None  # SiTU's caps of the gate and of the linear half, or None for SwiGLU

_PIECE = 2**18  # elements worked on at once on a CPU


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32, or float64 where the input is."""
    return torch.promote_types(dtype, torch.float32)


def _tanh(x: Tensor, inner: float, outer: float, out: Tensor, spare: Tensor) -> Tensor:
    """outer * tanh(x / inner) into `out`, which may be x. expm1 takes half of tanh's time on a CPU, and is as exact near 0."""
    # tanh is 1 in float64 from 19.1 on, and exp(40) is far from overflow. clamp keeps NaN.
    e = torch.mul(x, 2.0 / inner, out=out).clamp_(-40.0, 40.0).expm1_()
    return e.div_(torch.add(e.new_full((), 2.0 / outer), e, alpha=1.0 / outer, out=spare))


def glu_forward(gate: Tensor, up: Tensor, betas: Betas, out: Tensor, up_out: Tensor, spare: Tensor) -> Tensor:
    """The activation into `out`; `up_out` (may be `up`) and `spare` are overwritten."""
    if betas is None:
        return torch.sigmoid(gate, out=out).mul_(gate).mul_(up)
    beta, linear = betas
    _tanh(gate, beta, beta if linear is None else beta * linear, out, spare).mul_(torch.sigmoid(gate, out=spare))
    return out.mul_(up if linear is None else _tanh(up, linear, 1.0, up_out, spare))


def glu_backward(
    gate: Tensor, up: Tensor, betas: Betas, buffers: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """(h, a, b, hc, ac): the value is hc * h, its derivatives to gate and up are ac * a and ac * b; all live in `buffers`.

    With t = tanh(gate/beta), s = sigmoid(gate), g = t s, u = linear/beta tanh(up/linear): the value is beta² g u, the derivatives
    beta u (s + g (beta - beta s - t)) and beta g (1 - (beta/linear)² u²). The constants are left to the caller, who has cheaper
    places to multiply them in.
    """
    s, g, h, t, u = buffers
    torch.sigmoid(gate, out=s)
    if betas is None:  # value up gate s, derivatives up (s + gate s (1 - s)) and gate s
        torch.mul(gate, s, out=g)
        torch.mul(g, up, out=h)
        torch.sub(s, 1.0, out=t)
        return h, torch.addcmul(s, g, t, value=-1.0, out=s).mul_(up), g, 1.0, 1.0
    beta, linear = betas
    _tanh(gate, beta, 1.0, t, h)
    torch.div(up, beta, out=u) if linear is None else _tanh(up, linear, linear / beta, u, h)
    torch.mul(t, s, out=g)
    torch.mul(g, u, out=h)
    torch.add(t, s, alpha=beta, out=t).sub_(beta)
    torch.addcmul(s, g, t, value=-1.0, out=s).mul_(u)
    if linear is not None:
        g.mul_(torch.addcmul(u.new_ones(()), u, u, value=-((beta / linear) ** 2), out=t))
    return h, s, g, beta * beta, beta


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, flat, in pieces that stay in a CPU's cache; whole elsewhere."""
    flat = [t.view(-1) for t in tensors]
    size = _PIECE if tensors[0].device.type == "cpu" else max(1, flat[0].numel())
    for start in range(0, flat[0].numel(), size):
        yield tuple(t[start : start + size] for t in flat)


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, betas: Betas) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.betas = betas
        out, dtype = torch.empty_like(gate), wide(gate.dtype)
        scratch: tuple[Tensor, ...] = ()
        for a, b, o in _pieces(gate, up, out):
            if not scratch or scratch[0].numel() != a.numel():
                scratch = tuple(torch.empty_like(a, dtype=dtype) for _ in range(3))
            o.copy_(glu_forward(a.to(dtype), b.to(dtype), ctx.betas, *scratch))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        d_gate, d_up, dtype = torch.empty_like(gate), torch.empty_like(up), wide(gate.dtype)
        scratch: tuple[Tensor, ...] = ()
        for a, b, grad, da, db in _pieces(gate, up, grads[0].contiguous(), d_gate, d_up):
            if not scratch or scratch[0].numel() != a.numel():
                scratch = tuple(torch.empty_like(a, dtype=dtype) for _ in range(5))
            s, g, h, t, u = scratch
            _, to_gate, to_up, _, scale = glu_backward(a.to(dtype), b.to(dtype), ctx.betas, (s, g, h, t, u))
            torch.mul(grad, scale, out=h)
            da.copy_(to_gate.mul_(h))
            db.copy_(to_up.mul_(h))
        return d_gate, d_up, None


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must have one shape and dtype")


def situ_glu(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float | None = 25.0) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta): bounded by beta * linear_beta, SwiGLU to first order at 0.

    gate, up: any one shape, one dtype; the result has both. `linear_beta=None` leaves `up` uncapped. Differentiable once.
    Source: Kimi K3 report, arXiv 2607.24653, eq. 12 and appendix B. Raises ValueError when shapes or dtypes differ.
    """
    _check(gate, up)
    return _Glu.apply(gate, up, (beta, linear_beta))  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; shapes and dtypes as in `situ_glu`. Source: GLU variants, arXiv 2002.05202."""
    _check(gate, up)
    return _Glu.apply(gate, up, None)  # type: ignore[no-any-return]
