"""One optimizer step: micro-batches, backward, guard, clip, update, balance. No host sync in it but the model's own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.data.loader import IGNORED, Batch, Rows, make_batch
from atoll.optim import ModelOptimizer
from atoll.parallel.ranks import ALONE, Ranks
from atoll.train.guard import Guard


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind. `numbers` stays on the device until `read`."""

    numbers: Tensor  # float64 [4]: loss, gradient norm, skip, skips in a row
    targets: int
    num_bytes: int
    balance: dict[str, Any]  # per MoE layer: max_vio, dead and what else `nn.balancer.load_report` gives

    def read(self) -> tuple[float, float, bool, int]:
        """Loss (nats a target), gradient norm before the clip, whether the step was skipped, skips in a row. Waits for the device."""
        loss, norm, skip, in_a_row = self.numbers.tolist()
        return loss, norm, bool(skip), int(in_a_row)


def micro_batches(sampler: Rows, first: int, count: int, size: int | None) -> list[Batch]:
    """The `count` sequences from global index `first` on, `size` a batch (None: all in one)."""
    size = min(size or count, count)
    return [make_batch(sampler, first + i, min(size, count - i)) for i in range(0, count, size)]


def accumulate(
    model: nn.Module,
    batches: Sequence[Batch],
    routing: Sequence[Any] | None = None,
    ranks: Ranks = ALONE,
    context: Any = None,
    repeats: int = 1,
) -> tuple[Tensor, int]:
    """Gradients of the mean loss over all targets of `batches`, added to what is there.

    Each micro-batch is weighted by its share of the whole step's targets, so that another split gives the same gradients; an auxiliary
    balancing loss, by its share of the tokens it is a mean over. `routing` forces the experts, one entry a micro-batch.
    `repeats`: so many of the `ranks` each have the same tokens, which count once.
    Returns the loss (float64 scalar, on the device, without the auxiliary one) and the targets, both of all `ranks`; a cut model's
    gradients are summed over them, a whole one's are those of its own batches.
    """
    device = next(model.parameters()).device
    pieces = [_piece(b, context) for b in batches]
    counts = [int((labels != IGNORED).sum()) for _, labels, _, _ in pieces]
    tokens = [int((ids != model.config.pad_token_id).sum()) for ids, _, _, _ in pieces]  # pyright: ignore
    targets, all_tokens = (n // repeats for n in ranks.totals([sum(counts), sum(tokens)]))
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for i, ((*tensors, options), count) in enumerate(zip(pieces, counts, strict=True)):
        ids, labels, bounds = (t.to(device, non_blocking=True) for t in tensors)
        forced = {} if routing is None else {"routing": routing[i]}
        with contextlib.nullcontext() if context is None else context.taking(batches[i].cu_seqlens.tolist()):
            out = model(ids, labels=labels, cu_seqlens=bounds, **options, **forced)
            share = out.loss * (count / max(1, targets))
            extra = 0.0 if out.balance_loss is None else out.balance_loss * (tokens[i] / max(1, all_tokens))
            (share + extra).backward()
        loss += share.detach()
    ranks.sum_(loss)
    return loss / repeats, targets


def _piece(batch: Batch, context: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """What this process computes of a batch: ids, labels, bounds, and how the model is to take them."""
    if context is None:
        return batch.input_ids, batch.labels, batch.cu_seqlens, {}
    from atoll.model import next_tokens

    share = context.share_of(batch.cu_seqlens.tolist())
    targets = next_tokens(batch.labels, batch.cu_seqlens)
    at = slice(share.start, share.stop)
    return batch.input_ids[:, at], targets[:, at], torch.tensor(share.bounds), {"shifted": True}


def train_step(
    model: Any, optimizer: ModelOptimizer, guard: Guard, batches: Sequence[Batch], lr: float, ranks: Ranks = ALONE
) -> StepResult:
    """One step on `batches`, this process's part of it, at `lr` times the peak learning rates.

    A step that the guard refuses leaves weights, optimizer state and router biases as they were, bit for bit.
    """
    model.train()
    optimizer.zero_grad()
    context = optimizer.context
    loss, targets = accumulate(model, batches, ranks=ranks, context=context, repeats=optimizer.repeats)
    ranks.from_main_(loss)  # as the norm is: every process takes or skips the step
    norm = optimizer.clip()
    skip = guard.judge(loss, norm)
    optimizer.step(lr, skip)
    balance = model.balance_step(ranks.group, skip)
    mine = sum(b.num_bytes for b in batches) if context is None or context.rank == 0 else 0
    num_bytes = ranks.totals([mine])[0] // optimizer.repeats
    numbers = torch.stack([loss, norm.double(), skip.double(), guard.in_a_row.double()])
    return StepResult(numbers, targets, num_bytes, balance)
