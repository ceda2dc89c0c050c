"""The routed experts: each token through k gated MLPs, summed with its weights (LatentMoE, arXiv 2601.18089; Kimi K3 report, eq. 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.ops.dispatch import count, use_triton
from atoll.ops.experts.fused import experts_refusal, fused_mlp
from atoll.ops.experts.grouped import Grouped
from atoll.ops.experts.reference import experts_mlp_reference
from atoll.ops.experts.torch_grouped import grouped_refusal, torch_grouped
from atoll.ops.microscaling import GROUP

__all__ = ["experts_mlp", "experts_mlp_reference"]


def _check(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> None:
    if x.dim() != 2 or ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(f"x must be [T, L], ids and weights [T, k], not {list(x.shape)}, {list(ids.shape)}, {list(weights.shape)}")
    if w1.dim() != 3 or w3.shape != w1.shape or w2.shape != (w1.shape[0], w1.shape[2], w1.shape[1]) or w1.shape[2] != x.shape[1]:
        raise ValueError(
            f"with x [T, {x.shape[1]}]: w1, w3 must be [E, I, L] and w2 [E, L, I], not {[list(w.shape) for w in (w1, w3, w2)]}"
        )
    if not x.dtype == w1.dtype == w3.dtype == w2.dtype:
        raise ValueError(f"x and the experts' weights must have one dtype, not {x.dtype}, {w1.dtype}, {w3.dtype}, {w2.dtype}")


def _check_quantization(quantization: str, x: Tensor, w2: Tensor) -> None:
    if quantization not in ("none", "mxfp4", "mxfp4+mxfp8"):
        raise ValueError(f'quantization = {quantization!r} must be "none", "mxfp4" or "mxfp4+mxfp8"')
    if quantization != "none" and (x.shape[1] % GROUP or w2.shape[2] % GROUP):
        raise ValueError(f"with quantization = {quantization!r}: L = {x.shape[1]} and I = {w2.shape[2]} must be multiples of {GROUP}")


def experts_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    *,
    activation: str = "situ",
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
    quantization: str = "none",
    recompute: bool = True,
    backend: str = "auto",
) -> Tensor:
    """sum_j weights[t, j] * w2[e] act(w1[e] x[t], w3[e] x[t]) with e = ids[t, j].

    x [T, L]; ids int64 [T, k], the experts of a token all different; weights [T, k], any float dtype; w1, w3 [E, I, L] (gate, up);
    w2 [E, L, I] -> [T, L] in x.dtype. activation: "situ" (caps beta, linear_beta) or "silu". The activation runs in at least float32;
    an expert's output is rounded to x.dtype, then weighted and summed in at least float32, in the order of ids[t]. Gradients to x,
    weights, w1, w3, w2, once. Only visited experts' weights are read.
    quantization: "none"; "mxfp4": the weights are rounded to MXFP4 as `mxfp4_quantize` would; "mxfp4+mxfp8": the rows that enter w1, w3 and
    w2 to MXFP8 too. The gradient goes straight through: to the unrounded weights and rows as if they were the rounded ones (Bengio et al.,
    arXiv 1308.3432), which the products of the backward pass are taken with. Nothing is cached: weights that change are rounded anew.
    backend: "auto", "triton" (bfloat16, float32; see `fused.py`), "torch" (tiles of experts, any dtype and device) or "grouped_mm"
    (torch's, bfloat16). auto takes Triton on a GPU where nothing speaks against it; `kernel_report()` counts what was taken and why.
    recompute: Triton keeps inputs and the sort for the gradients and computes gate and up again; False keeps them, two numbers of
    x.dtype an assignment and inner channel, as "torch" always does.
    Same inputs, same bits, at any one number of threads. With the ids of all tokens unchanged, a token's output does not depend,
    bit for bit, on other tokens' x or weights; when other tokens change experts, the sizes of the matmuls change and may move its last bit.
    Source: Kimi K3 report, arXiv 2607.24653, eq. 11; LatentMoE, arXiv 2601.18089. Raises ValueError on shapes, dtypes or a backend that
    cannot run, and in "torch" on ids out of range; in Triton, which does not wait for them, an assignment to such an id adds nothing.
    """
    _check(x, ids, weights, w1, w3, w2)
    if activation not in ("situ", "silu"):
        raise ValueError(f'activation = {activation!r} must be "situ" or "silu"')
    _check_quantization(quantization, x, w2)
    betas = (beta, linear_beta) if activation == "situ" else None
    if backend == "grouped_mm":
        refusal = grouped_refusal(x, w1.shape[1], quantization)
        if refusal:
            raise ValueError(f"experts_mlp: backend = 'grouped_mm': {refusal}; use auto or torch")
        if not torch.compiler.is_compiling():
            count("experts_mlp grouped_mm")
        return torch_grouped(x, ids, weights, w1, w3, w2, betas)
    refusal = experts_refusal(x, ids, weights, quantization) if x.is_cuda or backend == "triton" else ""
    if use_triton("experts_mlp", backend, x.is_cuda, refusal):
        return fused_mlp(x, ids, weights, w1, w3, w2, betas, recompute)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, w1, w3, w2))
    return Grouped.apply(x, ids, weights, w1, w3, w2, betas, quantization, keep)  # type: ignore[no-any-return]
