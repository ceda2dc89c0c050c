"""Cross entropy over a vocabulary that is cut among processes: no logits travel, only three numbers a token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.situ import wide

CHUNK = 2048  # tokens whose logits over this process's vocabulary exist at once


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Gradients are formed while a chunk's logits are at hand, as in `ops.loss`; that of hidden states is summed once, for all tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignore: int, group: Any, need: tuple[bool, bool]) -> Tensor:
        ctx.dtypes, ctx.need = (hidden.dtype, weight.dtype), need
        w = weight.to(wide(weight.dtype) if hidden.dtype != torch.float64 else torch.float64)
        loss = w.new_zeros(())
        d_hidden = torch.empty_like(hidden, dtype=w.dtype) if need[0] else None
        d_weight = torch.zeros_like(w) if need[1] else None
        for rows, h, label in _chunks(hidden, labels, w.dtype):
            counted = label != ignore
            logits, log_sum, chosen, column, here = _scores(h, w, label, counted, group)
            loss += torch.where(counted, log_sum - chosen, 0).sum()
            if not any(need):
                continue
            d_logits = logits.sub_(log_sum[:, None]).exp_()
            d_logits.scatter_add_(1, column[:, None], -here.to(w.dtype)[:, None]).mul_(counted.to(w.dtype)[:, None])
            if d_hidden is not None:
                torch.mm(d_logits, w, out=d_hidden[rows])
            if d_weight is not None:
                d_weight.addmm_(d_logits.T, h)
        if d_hidden is not None:
            dist.all_reduce(d_hidden, group=group)
        ctx.save_for_backward(*(d for d in (d_hidden, d_weight) if d is not None))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = iter(ctx.saved_tensors)
        out = [(next(saved) * grads[0]).to(dtype) if need else None for need, dtype in zip(ctx.need, ctx.dtypes, strict=True)]
        return *out, None, None, None, None


def _chunks(hidden: Tensor, labels: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    for start in range(0, len(hidden), CHUNK):
        rows = slice(start, min(start + CHUNK, len(hidden)))
        yield rows, hidden[rows].to(dtype), labels[rows]


def _scores(h: Tensor, w: Tensor, label: Tensor, counted: Tensor, group: Any) -> tuple[Tensor, ...]:
    """Of tokens h [n, D]: logits [n, V/N] here; over the whole vocabulary the log of the sum of exponentials and the label's logit [n];
    where the label's column would be here, and whether it is [n]."""
    logits = h @ w.T
    largest = logits.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    column = label - dist.get_rank(group) * len(w)
    here = counted & (column >= 0) & (column < len(w))
    column = torch.where(here, column, 0)
    chosen = torch.where(here, logits.gather(1, column[:, None]).squeeze(1), 0)
    sums = torch.stack([(logits - largest[:, None]).exp_().sum(1), chosen])
    dist.all_reduce(sums, group=group)
    return logits, largest + sums[0].log(), sums[1], column, here


def vocabulary_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup, *, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """`ops.loss.linear_cross_entropy` of a head of which this process of `group` holds the rows weight [V/N, D], in order of rank.

    hidden [T, D] and labels int64 [T], over the whole vocabulary, are the same on every process, as are the results and the gradient of
    `hidden`; that of `weight` is of the rows held. Two small all-reduces a chunk of tokens, of maxima and of sums, in at least float32.
    """
    grad = torch.is_grad_enabled()
    need = (grad and hidden.requires_grad, grad and weight.requires_grad)
    loss = _VocabularyCrossEntropy.apply(hidden, weight, labels, ignore_index, group, need)
    return loss, (labels != ignore_index).sum()  # type: ignore[return-value]
