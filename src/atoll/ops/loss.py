"""Cross entropy straight from hidden states, a chunk of tokens at a time: the logits of all tokens never exist together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.situ import wide

_CACHED = 2**22  # logits of a CPU chunk at most, so that the passes over them stay in cache


def _chunks(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(rows, hidden [n, D] widened, logits [n, V], labels [n]) of each run of rows. All logits share one buffer."""
    if hidden.device.type == "cpu":
        chunk = max(1, min(chunk, _CACHED // weight.shape[0]))
    buffer = weight.new_empty(min(chunk, hidden.shape[0]), weight.shape[0])
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, min(start + chunk, hidden.shape[0]))
        h = hidden[rows].to(weight.dtype)
        yield rows, h, torch.mm(h, weight.T, out=buffer[: h.shape[0]]), labels[rows]


class _CrossEntropy(torch.autograd.Function):
    """The gradients are formed while a chunk's logits are at hand, and scaled in the backward pass: no logits are computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignore: int, chunk: int, need: tuple[bool, bool]) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype
        w = weight.to(wide(weight.dtype) if hidden.dtype != torch.float64 else torch.float64)
        loss = w.new_zeros(())
        d_hidden = torch.empty_like(hidden, dtype=w.dtype) if need[0] else None
        d_weight = torch.zeros_like(w) if need[1] else None
        for rows, h, logits, label in _chunks(hidden, w, labels, chunk):
            counted = label != ignore
            label = torch.where(counted, label, 0)[:, None]
            logp = torch.log_softmax(logits, -1)
            loss -= torch.where(counted, logp.gather(1, label).squeeze(1), 0).sum()
            if d_hidden is None and d_weight is None:
                continue
            counted = counted.to(w.dtype)[:, None]
            d_logits = logp.exp_().scatter_add_(1, label, -torch.ones_like(counted)).mul_(counted)
            if d_hidden is not None:
                torch.mm(d_logits, w, out=d_hidden[rows])
            if d_weight is not None:
                d_weight.addmm_(d_logits.T, h)
        ctx.save_for_backward(*(d for d in (d_hidden, d_weight) if d is not None))
        ctx.need = need
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = iter(ctx.saved_tensors)
        out = [(next(saved) * grads[0]).to(dtype) if need else None for need, dtype in zip(ctx.need, ctx.dtypes, strict=True)]
        return *out, None, None, None, None


def _flatten(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1] or weight.dim() != 2:
        shapes = [list(u.shape) for u in (hidden, weight, labels)]
        raise ValueError(f"hidden [..., D], weight [V, D] and labels [...] do not fit {shapes}")
    return hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100, chunk: int = 2048
) -> tuple[Tensor, Tensor]:
    """(sum of -log softmax(hidden weightᵀ)[label] over the counted labels, their number).

    hidden [..., D], weight [V, D] (any float dtypes; logits and loss in at least float32), labels int64 [...], each in [0, V) or
    `ignore_index` -> scalar float32 (float64 for float64), scalar int64. The label at a position is the target of that position's
    hidden state: shifting is the caller's. chunk: tokens whose logits exist at once, at most. Deterministic; no label of another
    token moves a token's loss. Differentiable once, in hidden and weight. Raises ValueError when shapes do not fit.
    """
    rows, flat = _flatten(hidden, weight, labels)
    grad = torch.is_grad_enabled()
    need = (grad and hidden.requires_grad, grad and weight.requires_grad)
    loss = _CrossEntropy.apply(rows, weight, flat, ignore_index, chunk, need)
    return loss, (flat != ignore_index).sum()  # type: ignore[return-value]


@torch.no_grad()
def token_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 2048, *, ignore_index: int = -100) -> Tensor:
    """log softmax(hidden weightᵀ)[label] of every token, float32 [...] (float64 for float64), 0 where the label is `ignore_index`.

    Arguments as in `linear_cross_entropy`. Without gradient.
    """
    rows, flat = _flatten(hidden, weight, labels)
    w = weight.to(torch.promote_types(wide(weight.dtype), hidden.dtype))
    out = w.new_zeros(flat.shape)
    for at, _, logits, label in _chunks(rows, w, flat, chunk):
        counted = label != ignore_index
        logp = torch.log_softmax(logits, -1).gather(1, torch.where(counted, label, 0)[:, None]).squeeze(1)
        out[at] = torch.where(counted, logp, 0)
    return out.view(labels.shape)
