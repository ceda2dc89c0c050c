"""The pipeline axis: the layers are cut into stages, a process holds one of them or several, and micro-batches pass through.

At a cut the running sum of the current block passes on, and of the bank of finished blocks those that the next process has not seen: each
keeps, for a micro-batch, the blocks that came to it or were finished on it, for its later stages. For N tokens of width D, P processes with
V stages each send, forward and again backward,

    N D · Σ over stages s = 1 … P V - 1 of (1 + entry(s) - known(s)),    known(s) = exit(s - P), and 0 in the first round,

numbers in all (`pipeline_order.Stage`). With n whole blocks a stage that is at most N D · (P (P - 1) n / 2 + (V - 1) P² n + P - 1): the
formula of arXiv 2603.15031 §4.1, and the embedding, a source of its own, in the first round.

Gradients of blocks go the same way back. A process notes what its stages owe a block (`_Flight.owed`). The stage to which a block was sent
pays all of it back to the process that sent it; the stage that finished the block starts its own backward pass from it. So one sum arrives
at a block's owner, once. Every stage reads leaves of its own, detached from what came, so no pass runs through another's graph.

Why `torch.distributed.pipelining` does not drive it: its stages have inputs and outputs of one static shape each, for the neighbour alone,
while here a message depends on what the receiver holds, and later stages add gradients to what an earlier one received; its schedules cut
one batch along its tensors, while each micro-batch has its own number of documents, and each evaluation its own number of tokens; it has
one loss, at the end, while every stage has its auxiliary balancing loss. The order of work is its own (`pipeline_order.order`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from atoll.nn.block_residual import Stream
from atoll.parallel.pipeline_order import Action, Stage, order
from atoll.parallel.pipeline_wire import Wire, stacked


@dataclass
class _Flight:
    """A micro-batch on its way: the finished blocks that this process holds, by number, and what later stages owe them."""

    blocks: dict[int, Tensor] = field(default_factory=dict)
    owed: dict[int, Tensor] = field(default_factory=dict)

    def owe(self, block: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.owed[block] = self.owed[block] + gradient if block in self.owed else gradient

    def pay(self, block: int) -> Tensor:
        """All that is owed to a block; it is asked for once."""
        owed = self.owed.pop(block, None)
        return torch.zeros_like(self.blocks[block]) if owed is None else owed


@dataclass
class _Pass:
    """A chunk's forward pass that waits for its backward pass: the leaves it read, what it made for others, and losses of its own."""

    prefix: Tensor | None
    leaves: dict[int, Tensor]
    stream: Stream | None
    losses: list[Tensor]


class Pipelined(nn.Module):
    """A model of which this process holds some stages, used as the whole one: `forward` evaluates, `run` trains.

    All processes of a pipeline call its methods alike, with the same batches. `mine`: the stages here, its chunks, of `every` one;
    `stage_group`: the processes that hold the same layers; `dtype`: of the stream. The state_dict is the inner `model`'s affair.
    """

    def __init__(self, model: Any, mine: Sequence[Stage], every: Sequence[Stage], wire: Wire, stage_group: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.mine, self.every, self.wire, self.stage_group, self.dtype = list(mine), list(every), wire, stage_group, dtype
        self._flights: dict[int, _Flight] = {}
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._due: dict[Action, tuple[Tensor, Any]] = {}

    @property
    def gradient_checkpointing(self) -> bool:
        """As the model's."""
        return self.model.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.model.gradient_checkpointing = value

    def moe_layers(self) -> list[Any]:
        """Those of this process."""
        return self.model.moe_layers()

    def new_cache(self, batch: int) -> Any:
        """As the model's; the states of other processes' layers stay empty."""
        return self.model.new_cache(batch)

    # ---------------------------------------------------------------- training

    def run(self, pieces: Sequence[Any], objectives: Callable[[Any, Any], list[Tensor]]) -> None:
        """Gradients of a step's micro-batches, added to what is there.

        pieces: each with `input_ids`, the keywords of its `call`, and `within()`, a context for both of its passes. objectives: what is to
        be summed and minimised of the model's output on a piece; on each stage those it has.
        """
        self._flights = {m: _Flight() for m in range(len(pieces))}
        actions = order(self.wire.place, self.wire.size, len(self.mine), len(pieces))
        self._expect(actions[0], pieces[actions[0].micro].input_ids)
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            piece = pieces[action.micro]
            if following is not None:  # so that its message comes while this one is worked on
                self._expect(following, pieces[following.micro].input_ids)
            with piece.within():
                if action.forward:
                    self._passes[action.chunk, action.micro] = self._forward(action, piece, objectives)
                else:
                    self._backward(action)
        self.wire.settle()

    def _forward(self, action: Action, piece: Any, objectives: Callable[[Any, Any], list[Tensor]]) -> _Pass:
        stage, flight = self.mine[action.chunk], self._flights[action.micro]
        prefix, leaves, stream = None, {}, None
        if not stage.first:
            prefix = self._arrive(action, flight).requires_grad_()
            leaves = {j: flight.blocks[j].detach().requires_grad_() for j in range(stage.entry)}
            stream = Stream(tuple(leaves.values()), prefix)
        out = self.model(piece.input_ids, **piece.call, stream=stream, layers=stage.layers)
        self._leave(stage, flight, out.stream)
        return _Pass(prefix, leaves, out.stream, objectives(out, piece))

    def _backward(self, action: Action) -> None:
        stage, flight = self.mine[action.chunk], self._flights[action.micro]
        done = self._passes.pop((action.chunk, action.micro))
        roots: list[Tensor] = [*done.losses]
        gradients: list[Tensor | None] = [None] * len(roots)
        if done.stream is not None and done.stream.prefix is not None:
            rows = self._message(action)
            for j, row in zip(self.every[stage.number + 1].arriving, rows[1:], strict=True):
                flight.owe(j, row)
            finished = range(stage.entry, stage.exit)
            roots += [done.stream.prefix, *(done.stream.bank[j] for j in finished)]
            gradients += [rows[0], *(flight.pay(j) for j in finished)]
        torch.autograd.backward(roots, gradients)
        if done.prefix is not None:
            assert done.prefix.grad is not None
            for j, leaf in done.leaves.items():
                flight.owe(j, leaf.grad)
            self.wire.send(stacked([done.prefix.grad, *(flight.pay(j) for j in stage.arriving)]), ahead=False)
        for j in (*stage.arriving, *range(stage.entry, stage.exit)):
            flight.blocks.pop(j, None)

    def _expect(self, action: Action, input_ids: Tensor) -> None:
        """Make room for the message that an action on tokens `input_ids` starts from, if any."""
        stage = self.mine[action.chunk]
        if stage.first if action.forward else stage.last:
            return
        blocks = (stage if action.forward else self.every[stage.number + 1]).arriving
        shape = (1 + len(blocks), *input_ids.shape, self.config.hidden_size)
        rows = torch.empty(shape, dtype=self.dtype, device=input_ids.device)
        self._due[action] = rows, self.wire.expect(rows, ahead=action.forward)

    def _message(self, action: Action) -> Tensor:
        """The message that was expected."""
        rows, arrived = self._due.pop(action)
        arrived.wait()
        return rows

    def _arrive(self, action: Action, flight: _Flight) -> Tensor:
        """Take the message to a stage: its blocks into `flight`, and the running sum."""
        rows = self._message(action)
        flight.blocks |= dict(zip(self.mine[action.chunk].arriving, rows[1:], strict=True))
        return rows[0]

    def _leave(self, stage: Stage, flight: _Flight, stream: Stream | None) -> None:
        """Note the blocks that a stage finished, and send the next stage what it needs."""
        if stream is None or stream.prefix is None:
            return
        flight.blocks |= {j: stream.bank[j].detach() for j in range(stage.entry, stage.exit)}
        rows = [stream.prefix, *(flight.blocks[j] for j in self.every[stage.number + 1].arriving)]
        self.wire.send(stacked(rows), ahead=True)

    # ---------------------------------------------------------------- evaluation

    # FSDP makes room for weights at their first use: made in inference mode, training could not use it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Any = None,
        logits: bool | None = None,
        record: dict[str, Any] | None = None,
    ) -> Any:
        """The model's forward, without gradients: its logits and its loss on every process, and `record` whole on each."""
        flight, out, parts = _Flight(), None, []
        length = None if cache is None else cache.length + input_ids.shape[1]
        for chunk, stage in enumerate(self.mine):
            stream = None
            if not stage.first:
                self._expect(action := Action(True, chunk, 0), input_ids)
                prefix = self._arrive(action, flight)
                stream = Stream(tuple(flight.blocks[j] for j in range(stage.entry)), prefix)
            parts.append(None if record is None else {})
            call = {"labels": labels, "cu_seqlens": cu_seqlens, "cache": cache, "logits": logits, "record": parts[-1]}
            out = self.model(input_ids, **call, stream=stream, layers=stage.layers)
            self._leave(stage, flight, out.stream)
        if cache is not None:
            cache.length = length
        if record is not None:
            record |= _joined(self.wire.gather(parts))
        self._share(out, input_ids, labels is not None, logits or (logits is None and labels is None))
        self.wire.settle()
        return out

    def _share(self, out: Any, input_ids: Tensor, loss: bool, logits: bool) -> None:
        """Give every process the results that the last one has."""
        out.stream = None
        if loss:
            found = torch.zeros(2, dtype=torch.float64, device=input_ids.device)
            if out.loss is not None:
                found = torch.stack([out.loss.double(), out.num_targets.double()])
            out.loss, count = self.wire.from_last_(found)
            out.num_targets = count.long()
        if logits:
            exact = torch.promote_types(self.dtype, torch.float32)
            room = torch.empty(*input_ids.shape, self.config.vocab_size, dtype=exact, device=input_ids.device)
            out.logits = self.wire.from_last_(room if out.logits is None else out.logits.contiguous())

    # ---------------------------------------------------------------- balancing

    def balance_step(self, reduce: Any, skip: Tensor | None = None) -> dict[str, list[Any]]:
        """The model's, over the processes with the same layers in place of `reduce`; the report is of all layers, on every process."""
        report = self.model.balance_step(self.stage_group, skip)
        numbers = self.model.balancer.numbers
        found = {n: {key: rows[i] for key, rows in report.items()} for i, n in enumerate(numbers) if i < len(report["max_vio"])}
        layers = {n: row for part in self.wire.gather(found) for n, row in part.items()}
        return {key: [layers[n][key] for n in sorted(layers)] for key in report}

    def balance_state(self) -> dict[str, Tensor]:
        """Of the layers here, under the numbers they have in the whole model."""
        return self.model.balance_state()


def _joined(parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Probes of all chunks (processes, then chunks), in the order of the layers."""
    record: dict[str, Any] = {}
    for chunk in zip(*parts, strict=True):
        for part in chunk:
            for key, rows in part.items():
                record.setdefault(key, []).extend(rows)
    return record
