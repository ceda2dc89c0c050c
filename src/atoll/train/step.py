"""One optimizer step: micro-batches, backward, guard, clip, update, balance. No host sync in it but the model's own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.config import UserError
from atoll.data.loader import IGNORED, Batch, Rows, batch_of
from atoll.optim import ModelOptimizer
from atoll.parallel.ranks import ALONE, Ranks
from atoll.train.guard import Guard
from atoll.train.segments import Segments, Weights, accumulate_rows


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
    return row_batches(sampler, range(first, first + count), size)


def row_batches(sampler: Rows, rows: Sequence[int], size: int | None) -> list[Batch]:
    """The sequences of these global indices, `size` a batch (None: all in one)."""
    size = min(size or len(rows), len(rows))
    return [batch_of(sampler, rows[i : i + size]) for i in range(0, len(rows), size)]


@dataclass(frozen=True)
class Piece:
    """What this process computes of a micro-batch, on the device: the model's arguments, a context for both of its passes, and the weight
    in the step's loss of its own loss and of its auxiliary one."""

    input_ids: Tensor
    call: dict[str, Any]
    within: Callable[[], contextlib.AbstractContextManager[Any]]
    share: float
    balance_share: float


def accumulate(
    model: nn.Module,
    batches: Sequence[Batch],
    routing: Sequence[Any] | None = None,
    ranks: Ranks = ALONE,
    context: Any = None,
    segments: Segments | None = None,
    pipeline: Any = None,
    counts: bool = True,
) -> tuple[Tensor, int]:
    """Gradients of the mean loss over all targets of `batches`, added to what is there.

    Each micro-batch is weighted by its share of the whole step's targets, so that another split gives the same gradients; an auxiliary
    balancing loss, by its share of the tokens it is a mean over. `routing` forces the experts, one entry a micro-batch; `segments`
    computes each row a segment at a time; both without `pipeline`. `counts`: whether this process is the one, of those of `ranks` that
    read the same tokens, whose numbers count. Returns the loss (float64 scalar, on the device, without the auxiliary one) and the
    targets, both of all `ranks`; a cut model's gradients are summed over them, a whole one's are those of its own batches.
    """
    device = next(model.parameters()).device
    pieces, whole = _pieces(model, batches, ranks, context, segments or pipeline, counts)
    loss = torch.zeros((), dtype=torch.float64, device=device)

    def objectives(out: Any, piece: Piece) -> list[Tensor]:
        shares = [] if out.loss is None else [out.loss * piece.share]
        for share in shares:
            loss.add_(share.detach())
        return shares if out.balance_loss is None else [*shares, out.balance_loss * piece.balance_share]

    if pipeline is not None:
        assert routing is None
        assert segments is None
        pipeline.run(pieces, objectives)
    for i, piece in enumerate(pieces if pipeline is None else ()):
        if segments is not None:
            loss += accumulate_rows(model, piece.input_ids, piece.call["labels"], piece.call["cu_seqlens"], segments, whole)
            continue
        forced = {} if routing is None else {"routing": routing[i]}
        with piece.within():
            torch.autograd.backward(objectives(model(piece.input_ids, **piece.call, **forced), piece))
    ranks.sum_(loss if counts else loss.zero_())
    return loss, whole.targets


def _pieces(model: Any, batches: Sequence[Batch], ranks: Ranks, context: Any, cut: Any, counts: bool) -> tuple[list[Piece], Weights]:
    """The pieces of a step, and what the losses of all `ranks` are divided by. `cut`: what else computes rows in parts."""
    pieces = [_piece(b, context) for b in batches]
    targets = [int((labels != IGNORED).sum()) for _, labels, _, _ in pieces]
    tokens = [int((ids != model.config.pad_token_id).sum()) for ids, _, _, _ in pieces]
    whole = Weights(*ranks.totals([sum(targets) * counts, sum(tokens) * counts]))
    made, device = [], next(model.parameters()).device
    for batch, (*tensors, options), count, number in zip(batches, pieces, targets, tokens, strict=True):
        ids, labels, bounds = (t.to(device, non_blocking=True) for t in tensors)
        within = contextlib.nullcontext if context is None else functools.partial(context.taking, batch.cu_seqlens.tolist())
        shown = _pictures(batch, device, context or cut)
        call = {"labels": labels, "cu_seqlens": bounds, **options, **shown}
        made.append(Piece(ids, call, within, count / max(1, whole.targets), number / max(1, whole.tokens)))
    return made, whole


def _piece(batch: Batch, context: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """What this process computes of a batch: ids, labels, bounds, and how the model is to take them."""
    if context is None:
        return batch.input_ids, batch.labels, batch.cu_seqlens, {}
    from atoll.model import next_tokens

    share = context.share_of(batch.cu_seqlens.tolist())
    targets = next_tokens(batch.labels, batch.cu_seqlens)
    at = slice(share.start, share.stop)
    return batch.input_ids[:, at], targets[:, at], torch.tensor(share.bounds), {"shifted": True}


def _pictures(batch: Batch, device: torch.device, cut: Any) -> dict[str, Tensor]:
    """The model's arguments of a batch with pictures; grids stay on the CPU, where they are read.

    Raises `UserError` where its rows are `cut`.
    """
    if batch.pixel_values is None or batch.grid_thws is None:
        return {}
    if cut is not None:
        raise UserError("stages: segment, or parallel: context, with images: rows with images are computed whole; leave it out")
    return {"pixel_values": batch.pixel_values.to(device, non_blocking=True), "grid_thws": batch.grid_thws}


def train_step(
    model: Any,
    optimizer: ModelOptimizer,
    guard: Guard,
    batches: Sequence[Batch],
    lr: float,
    ranks: Ranks = ALONE,
    segments: Segments | None = None,
) -> StepResult:
    """One step on `batches`, this process's part of it, at `lr` times the peak learning rates; `segments` as in `accumulate`.

    A step that the guard refuses leaves weights, optimizer state and router biases as they were, bit for bit.
    """
    model.train()
    optimizer.zero_grad()
    context = optimizer.context
    loss, targets = accumulate(model, batches, None, ranks, context, segments, optimizer.pipeline, optimizer.counts)
    ranks.from_main_(loss)  # as the norm is: every process takes or skips the step
    norm = optimizer.clip()
    skip = guard.judge(loss, norm)
    optimizer.step(lr, skip)
    balance = model.balance_step(ranks.group, skip)
    mine = sum(b.num_bytes for b in batches) if optimizer.counts and (context is None or context.rank == 0) else 0
    num_bytes = ranks.totals([mine])[0]
    numbers = torch.stack([loss, norm.double(), skip.double(), guard.in_a_row.double()])
    return StepResult(numbers, targets, num_bytes, balance)
