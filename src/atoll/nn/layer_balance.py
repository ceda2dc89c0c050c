"""What one layer of experts counts in training, and the rule that makes its next bias of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.config import BalanceConfig
from atoll.ops.routing import QuantileHistogram, QuantileMargins, QuantileMean, balance_loss, sign_bias, within_capacity

Estimator = QuantileHistogram | QuantileMargins | QuantileMean


class Tally:
    """Counts of one layer since its last balancing step, over all micro-batches.

    load int64 [E]: tokens that chose each expert, dropped or not. lost int64 [2]: choices dropped, tokens left with the shared experts
    alone. loss float64 [2]: the auxiliary loss times its tokens, and the tokens. estimator: of quantile rules.
    """

    def __init__(self, experts: int, estimator: Estimator | None, device: torch.device) -> None:
        self.load = torch.zeros(experts, dtype=torch.int64, device=device)
        self.lost = torch.zeros(2, dtype=torch.int64, device=device)
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)
        self.estimator = estimator

    def counts(self) -> list[Tensor]:
        """The integer tensors that ranks add up."""
        own = None if self.estimator is None else self.estimator.counts
        return [self.load, self.lost] + ([] if own is None else [own])

    def state(self) -> dict[str, Tensor]:
        """All of it as tensors, live but for the margins of the exact rule."""
        found = {"load": self.load, "lost": self.lost, "loss": self.loss}
        if isinstance(self.estimator, QuantileHistogram):
            found |= {"counts": self.estimator.counts, "range": self.estimator.bias}
        elif isinstance(self.estimator, QuantileMean):
            found["counts"] = self.estimator.counts
        elif self.estimator is not None and self.estimator.required:
            found["required"] = torch.cat(self.estimator.required)
        return found

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for name in ("load", "lost", "loss"):
            getattr(self, name).copy_(state[name])
        if isinstance(self.estimator, QuantileHistogram):
            self.estimator.set_range(state["range"].to(self.load.device))
        if self.estimator is not None and self.estimator.counts is not None:
            self.estimator.counts.copy_(state["counts"])
        elif isinstance(self.estimator, QuantileMargins) and "required" in state:
            self.estimator.required = [state["required"].to(self.load.device)]


class LayerBalance(nn.Module):
    """The balancing of one layer; `nn.LatentMoE` calls it, `nn.Balancer` steps it. No part of it is in the model's state_dict.

    share [E]: of rule "aux", each expert's share of the last step's choices. pending [E], due: of an asynchronous rule, the bias that the
    next step puts in place, and whether there is one.
    """

    share: Tensor
    pending: Tensor
    due: Tensor

    def __init__(self, config: BalanceConfig, experts: int, top_k: int, *, device=None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.experts, self.top_k = config, experts, top_k
        if config.kind == "aux":
            self.register_buffer("share", torch.empty(experts, device=device, dtype=dtype), persistent=False)
        if config.asynchronous:
            self.register_buffer("pending", torch.empty(experts, device=device, dtype=dtype), persistent=False)
            self.register_buffer("due", torch.empty((), device=device, dtype=torch.int64), persistent=False)
        self.tally: Tally | None = None
        self.reset()

    def reset(self) -> None:
        """As before the first step: nothing counted, nothing pending, every expert taken to be level."""
        self.tally = None
        for name, buffer in self.named_buffers():
            buffer.fill_(1 / self.experts if name == "share" else 0)

    # -------------------------------------------------- in the forward pass

    def keep(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """Which choices [T, k] stay under the capacity, or None where there is none."""
        if not self.config.limits():
            return None
        return within_capacity(ids, self.experts, self.config.value("capacity_factor"), mask)

    def loss(self, scores: Tensor, mask: Tensor | None) -> Tensor | None:
        """The auxiliary loss of these tokens times its coefficient, or None under another rule.

        f is the share of the whole last step, on every rank and in every micro-batch the same, where Switch has the share of the batch
        itself, which is known only after its last micro-batch. So any split gives one gradient, and no collective stands in the pass.
        """
        if self.config.kind != "aux":
            return None
        return self.config.value("aux_coefficient") * balance_loss(scores, self.share, mask)

    @torch.no_grad()
    def observe(
        self, scores: Tensor, bias: Tensor, ids: Tensor, cutoff: Tensor, mask: Tensor | None, keep: Tensor | None, loss: Tensor | None
    ) -> None:
        """Count one micro-batch; shapes as in `route`, bias [E] the one it was routed with, keep [T, k], loss a scalar."""
        tally = self.open(bias)
        counted = ids if mask is None else ids[mask]
        tally.load += torch.bincount(counted.reshape(-1), minlength=self.experts)
        if keep is not None:
            lost = ~keep if mask is None else ~keep & mask[:, None]
            tally.lost += torch.stack([lost.sum(), lost.all(-1).sum()])
        if loss is not None:
            tally.loss += torch.stack([loss.double() * counted.shape[0], loss.new_tensor(counted.shape[0]).double()])
        if tally.estimator is not None:
            tally.estimator.observe(scores, cutoff, mask)

    # -------------------------------------------------- between steps

    def open(self, bias: Tensor) -> Tally:
        """The running tally, begun where there is none: its bins are then fixed by `bias` [E]."""
        if self.tally is None:
            self.tally = Tally(self.experts, self._estimator(bias), bias.device)
        return self.tally

    def _estimator(self, bias: Tensor) -> Estimator | None:
        if self.config.kind == "local_quantile":
            return QuantileMean(self.experts, self.top_k, bias.device)
        if self.config.kind != "quantile":
            return None
        if self.config.bins is None:
            return QuantileMargins(self.experts)
        histogram = QuantileHistogram(self.experts, self.config.bins, device=bias.device)
        histogram.set_range(bias)
        return histogram

    def take(self) -> Tally | None:
        """Hand over what was counted; counting begins anew."""
        tally, self.tally = self.tally, None
        return tally

    @torch.no_grad()
    def solve(self, tally: Tally, bias: Tensor) -> Tensor | None:
        """The next bias [E] from the pooled tally and the present bias [E]; None where the rule sets none."""
        if self.config.kind == "sign":
            return sign_bias(tally.load, bias, self.config.value("sign_rate"))
        new = None if tally.estimator is None else tally.estimator.solve(self.top_k)
        if new is None:
            return None
        mixed = self.config.ema * bias + (1 - self.config.ema) * new.to(bias)
        return torch.where(tally.load.sum() > 0, mixed, bias)

    @torch.no_grad()
    def set_share(self, tally: Tally, skip: Tensor | None) -> None:
        """Remember the pooled load for the next step's auxiliary loss."""
        total = tally.load.sum()
        put(self.share, torch.where(total > 0, (tally.load.double() / total.clamp(min=1)).to(self.share), self.share), skip)

    # -------------------------------------------------- saved

    def state(self) -> dict[str, Tensor]:
        """Buffers, live, and what was counted in a step that is not over."""
        return {**dict(self.named_buffers()), **({} if self.tally is None else self.tally.state())}

    def load_state(self, state: dict[str, Tensor], bias: Tensor) -> None:
        """Go on from what `state` gave, also in the middle of a step's micro-batches."""
        for name, buffer in self.named_buffers():
            buffer.copy_(state[name])
        self.tally = None
        if "load" in state:
            self.open(bias).load_state(state)


def put(target: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """target becomes `new`, unless `skip` (a scalar) is above 0; then not a bit of it changes."""
    target.copy_(new if skip is None else torch.where(skip > 0, target, new.to(target)))
