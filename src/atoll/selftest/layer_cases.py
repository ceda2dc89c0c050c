"""Checks of what stands around delta attention: the short convolution and the norms, against their formulas."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.ops.conv import short_conv
from atoll.ops.norm import gated_rms_norm, l2_norm, rms_norm
from atoll.selftest.case import Case, Trial, Values

_LIMITS = {torch.bfloat16: {"y": 5e-3, "": 8e-3}, torch.float32: {"y": 1e-5, "": 2e-5}, torch.float64: {"": 1e-10}}


def _trial(
    run: Callable[..., Tensor], formula: Callable[..., Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device
):
    """Values and gradients of `run` on tensors of `dtype` and of `formula` on the same in float64."""
    draw = torch.Generator().manual_seed(5)
    tensors = [torch.randn(s, generator=draw).to(device, dtype) for s in shapes]

    def values(function: Callable[..., Tensor], kind: torch.dtype) -> Values:
        leaves = [x.to(kind).detach().requires_grad_() for x in tensors]
        y = function(*leaves)
        up = torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16).to(y)
        return {"y": y.detach(), **{f"d{i}": x for i, x in enumerate(torch.autograd.grad(y, leaves, up))}}

    return Trial(lambda: values(run, dtype), lambda: values(formula, torch.float64), _LIMITS[dtype])


def _convolved(x: Tensor, weight: Tensor, edges: list[int]) -> Tensor:
    """Each document by torch's own convolution, behind zeros."""
    taps = weight.shape[2]
    parts = [F.pad(x[:, a:b].mT, (taps - 1, 0)) for a, b in pairwise(edges) if b > a]
    return F.silu(torch.cat([F.conv1d(p, weight, groups=weight.shape[0]) for p in parts], 2).mT)


def _conv(length: int, channels: int, dtype: torch.dtype, backend: str) -> Case:
    edges = [0, length // 3, length // 3, length // 3 + 1, length]

    def build(device: torch.device) -> Trial:
        cuts = torch.tensor(edges, device=device)
        return _trial(
            lambda x, w: short_conv(x, w, cu_seqlens=cuts, backend=backend)[0],
            lambda x, w: _convolved(x, w, edges),
            [(1, length, channels), (channels, 1, 4)],
            dtype,
            device,
        )

    return Case("short_conv", f"{length} x {channels}", str(dtype)[6:], build)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _norms(rows: int, width: int, dtype: torch.dtype, backend: str) -> list[Case]:
    x, w = (rows, width), (width,)
    kinds: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
        "rms_norm": (lambda x, w: rms_norm(x, w, backend=backend), _rms, [x, w]),
        "gated_rms_norm": (lambda x, w, g: gated_rms_norm(x, w, g, backend=backend), lambda x, w, g: _rms(x, w) * g.sigmoid(), [x, w, x]),
        "l2_norm": (lambda x: l2_norm(x, backend=backend), lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), [x]),
    }

    def case(name: str) -> Case:
        run, formula, shapes = kinds[name]
        return Case(name, f"{rows} x {width}", str(dtype)[6:], lambda device: _trial(run, formula, shapes, dtype, device))

    return [case(name) for name in kinds]


def cases(card: bool) -> list[Case]:
    """On a card the kernels at the blueprint's widths, on a CPU their twins."""
    if not card:
        return [_conv(40, 24, torch.float64, "torch"), *_norms(30, 20, torch.float64, "torch")]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        found += [_conv(3000, 96 * 128, dtype, "triton"), *_norms(2000, 7168, dtype, "triton"), *_norms(9000, 128, dtype, "triton")[1:]]
    return found
