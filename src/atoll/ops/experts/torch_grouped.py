"""The experts by torch's own grouped matmul: rows sorted by expert, three `F.grouped_mm`, gradients by autograd. No wait for the host.

For GPUs where the kernels cannot run, and to measure them against. bfloat16; the sides must be multiples of 16 bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.ops.situ import situ_glu, swiglu


def grouped_refusal(x: Tensor, inner: int, quantization: str) -> str:
    """Why `F.grouped_mm` does not take this call; empty when it does."""
    if quantization != "none":
        return f"quantization = {quantization!r} has its own path"
    if x.dtype != torch.bfloat16:
        return "x is not bfloat16"
    if x.shape[1] % 8 or inner % 8:
        return f"L = {x.shape[1]} and I = {inner} are not multiples of 8"
    return ""


def torch_grouped(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, betas: tuple[float, float | None] | None
) -> Tensor:
    """As `experts_mlp`; betas: SiTU's caps, or None for SwiGLU."""
    (tokens, k), experts = ids.shape, w1.shape[0]
    if tokens == 0:
        return x + 0 * (w1.sum() + w3.sum() + w2.sum()).to(x.dtype)
    flat = ids.reshape(-1)
    sorted_ids, order = flat.sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(experts, device=ids.device), right=True).to(torch.int32)
    rows = x.index_select(0, order // k)
    gate, up = (F.grouped_mm(rows, w.mT, offs=ends) for w in (w1, w3))
    hidden = swiglu(gate, up) if betas is None else situ_glu(gate, up, *betas)
    y = F.grouped_mm(hidden, w2.mT, offs=ends)
    slot = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=ids.device))
    parts = y.index_select(0, slot).view(tokens, k, -1)
    return (parts.float() * weights.float()[..., None]).sum(1).to(x.dtype)
