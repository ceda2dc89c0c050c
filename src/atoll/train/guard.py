"""The guard: decides on the device, without a host sync, whether a step may touch the weights."""

from __future__ import annotations

import torch
from torch import Tensor

RATE = 0.05  # weight of the newest norm in the running mean
SETTLE = 10  # finite norms seen before a spike can be called one


class Guard:
    """Says skip when loss or gradient norm is not finite, or when the norm is over `factor` times its running mean.

    A spike enters the mean as `factor` times it at most: one spike hardly moves the limit, while norms that have risen for good
    are accepted after some twenty steps instead of never. Its state is four scalars on `device`, part of every checkpoint.
    """

    def __init__(self, factor: float | None, device: torch.device | str = "cpu") -> None:
        self.factor = factor
        self.mean = torch.zeros((), dtype=torch.float64, device=device)
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """A float32 scalar, 1 to skip the step and 0 to take it; moves the running mean on."""
        norm = norm.detach().double()
        finite = torch.isfinite(loss.detach()) & torch.isfinite(norm)
        skip = ~finite
        seen_as = norm
        if self.factor is not None:
            limit = self.mean * self.factor
            settled = self.seen >= SETTLE
            skip = skip | (settled & (norm > limit))
            seen_as = torch.where(settled, torch.minimum(norm, limit), norm)
        rate = torch.clamp(1.0 / (self.seen + 1).double(), min=RATE)
        self.mean.copy_(torch.where(finite, self.mean + (seen_as - self.mean) * rate, self.mean))
        self.seen += finite
        self.skipped += skip
        self.in_a_row.copy_((self.in_a_row + 1) * skip)
        return skip.float()

    def state(self) -> dict[str, Tensor]:
        """Its scalars by name, live."""
        return {"mean": self.mean, "seen": self.seen, "skipped": self.skipped, "in_a_row": self.in_a_row}
