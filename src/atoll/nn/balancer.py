"""One balancing step for all layers of a model: pool their counts in one integer all-reduce, solve, put the biases in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from atoll.config import ConfigError
from atoll.nn.latent_moe import LatentMoE
from atoll.nn.layer_balance import Tally, put
from atoll.ops.routing import QuantileMargins, QuantileMean

Reduce = Callable[[Tensor], Any] | Any


class Balancer:
    """Keeps the experts of every `LatentMoE` in a module level. Call `step()` once after each optimizer step, on every rank.

    Synchronous (the default): what a step counted sets the bias of the next. With `BalanceConfig.asynchronous` the sum over ranks runs
    beside the next step's forward and backward pass, and its bias is used from the step after that one. It is put in place by the
    next call of `step()` and by nothing else, however early or late the sum arrives on a rank; so between two calls every rank routes
    with one bias, made of the same steps' counts, equal to the bit.

    Args:
        module: a model, or its layers.
        reduce: sums over ranks: a process group, or a function that adds up one integer tensor in place and may return a handle with
            `wait()`. It must span what shards tokens (data, context, and expert ranks that hold tokens of their own) and nothing that
            repeats them (tensor ranks). None: one process has all tokens.
    """

    def __init__(self, module: nn.Module | Iterable[nn.Module], reduce: Reduce | None = None) -> None:
        inside = module.modules() if isinstance(module, nn.Module) else module
        self.layers = [m for m in inside if isinstance(m, LatentMoE)]
        self.numbers = list(range(len(self.layers)))  # of a larger model of which these are some of the layers, their places there
        self.reduce = reduce
        kinds = {layer.balance.config.asynchronous for layer in self.layers}
        if len(kinds) > 1:
            raise ConfigError("balance.asynchronous: differs between layers; one value for all layers of a balancer is expected")
        self.asynchronous = kinds == {True}
        self._pending: tuple[_Pool, Tensor | None] | None = None

    @torch.no_grad()
    def step(self, skip: Tensor | None = None, reduce: Reduce | None = None) -> dict[str, list[Any]]:
        """Update every layer's bias from what was counted since the last call; forget the counts.

        skip: a scalar; above 0, nothing that this step counted is used (the optimizer skipped it too). reduce: in place of the
        balancer's own. Returns the load of each layer in which something was counted, see `load_report`: of all ranks, or, when
        asynchronous, of this one.
        """
        reduce = self.reduce if reduce is None else reduce
        self.settle()
        for layer in self.layers:
            if self.asynchronous:
                put(layer.gate.e_score_correction_bias, layer.balance.pending, layer.balance.due == 0)
                layer.balance.due.zero_()
        if reduce is not None:  # a rank without a token adds its zeros: the collective has one shape everywhere
            for layer in self.layers:
                layer.balance.open(layer.gate.e_score_correction_bias)
        pool = _Pool([layer.balance.take() for layer in self.layers])
        if self.asynchronous:
            report = load_report(pool.counted())
            pool.begin(reduce)
            self._pending = pool, None if skip is None else skip.clone()
            return report
        pool.begin(reduce)
        pool.end()
        for layer, tally in zip(self.layers, pool.tallies, strict=True):
            if tally is None:
                continue
            if layer.balance.config.kind == "aux":
                layer.balance.set_share(tally, skip)
            new = layer.balance.solve(tally, bias := layer.gate.e_score_correction_bias)
            if new is not None:
                put(bias, new, skip)
        return load_report(pool.counted())

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for a sum that is under way and solve it; the bias takes its place at the next `step()`, no sooner."""
        if self._pending is None:
            return
        (pool, skip), self._pending = self._pending, None
        pool.end()
        for layer, tally in zip(self.layers, pool.tallies, strict=True):
            new = None if tally is None else layer.balance.solve(tally, layer.gate.e_score_correction_bias)
            if new is not None:
                layer.balance.pending.copy_(new)
                layer.balance.due.fill_(1)
                if skip is not None:
                    layer.balance.due.mul_(skip <= 0)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the model's state_dict, by name: between steps nothing, but for "aux" and asynchronous rules; in
        the middle of a step also what was counted so far. Waits for a sum under way."""
        self.settle()
        return {f"{i}.{name}": t for i, layer in zip(self.numbers, self.layers, strict=True) for name, t in layer.balance.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave; the layers have their biases of then."""
        self._pending = None
        for i, layer in zip(self.numbers, self.layers, strict=True):
            own = {name.partition(".")[2]: t for name, t in state.items() if name.partition(".")[0] == str(i)}
            layer.balance.load_state(own, layer.gate.e_score_correction_bias)


class _Pool:
    """The tallies of all layers, summed over ranks by one collective."""

    def __init__(self, tallies: list[Tally | None]) -> None:
        self.tallies = tallies
        self.flat: Tensor | None = None
        self.handle: Any = None

    def counted(self) -> list[Tally]:
        return [tally for tally in self.tallies if tally is not None]

    def begin(self, reduce: Reduce | None) -> None:
        """Start the sum. Counts travel as int32, which holds any step below 2^31 tokens; fixed-point sums as int64."""
        if reduce is None or not self.tallies:
            return
        estimators = [tally.estimator for tally in self.counted()]
        if any(isinstance(e, QuantileMargins) for e in estimators):
            raise ConfigError("balance.bins = None: all margins of all ranks cannot be pooled by adding; give a number of bins, as 1000")
        dtype = torch.int64 if any(isinstance(e, QuantileMean) for e in estimators) else torch.int32
        self.flat = torch.cat([t.reshape(-1).to(dtype) for tally in self.counted() for t in tally.counts()])
        if callable(reduce):
            self.handle = reduce(self.flat)
        else:
            self.handle = torch.distributed.all_reduce(self.flat, group=reduce, async_op=True)

    def end(self) -> None:
        """Wait for the sum and put it into the tallies."""
        if self.flat is None:
            return
        if hasattr(self.handle, "wait"):
            self.handle.wait()
        places = [t for tally in self.counted() for t in tally.counts()]
        for place, part in zip(places, self.flat.split([t.numel() for t in places]), strict=True):
            place.copy_(part.view_as(place))
        self.flat = None


SPREAD = (0.0, 0.1, 0.5, 0.9, 1.0)  # shares of the experts, from the idlest


def load_report(tallies: list[Tally]) -> dict[str, list[Any]]:
    """The load of each layer, lists with one entry a layer; one wait for the device whatever their number.

    max_vio: largest load over mean load, less 1. dead: share of experts without a token. max_load, mean_load: tokens. spread: load over
    the mean of the idlest expert, at a tenth, half and nine tenths of them, and of the busiest. dropped: share of choices dropped. bare:
    tokens left with the shared experts alone. balance_loss: of rule "aux", on this rank.
    """
    names = ("max_vio", "dead", "max_load", "mean_load", "dropped", "bare", "balance_loss")
    if not tallies:
        return {name: [] for name in (*names, "spread")}
    load = torch.stack([t.load for t in tallies]).double().sort(1).values
    lost = torch.stack([t.lost for t in tallies]).double()
    loss = torch.stack([t.loss for t in tallies])
    mean = load.mean(1).clamp(min=1e-9)
    at = [round(q * (load.shape[1] - 1)) for q in SPREAD]
    numbers = [
        load[:, -1] / mean - 1,
        (load == 0).double().mean(1),
        load[:, -1],
        load.mean(1),
        lost[:, 0] / load.sum(1).clamp(min=1),
        lost[:, 1],
        loss[:, 0] / loss[:, 1].clamp(min=1),
    ]
    table = torch.cat([torch.stack(numbers), (load[:, at] / mean[:, None]).T]).tolist()
    return {**dict(zip(names, table, strict=False)), "spread": [list(layer) for layer in zip(*table[len(names) :], strict=True)]}
