"""Clipped importance sampling: the weight of a token is clipped, its gradient never dropped.

MiniMax-M1, arXiv 2506.13585, eq. 4-5:

    J = 1/N Σ_j Σ_i sg[clip(ρ, 1-below, 1+above)] A_j log π,   ρ = π / π_old,  A = (r - mean) / std,  N all tokens drawn
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.rl.objectives.base import Outcome, Sampled, baseline, truncated_weights


@dataclass(frozen=True)
class Cispo:
    """below, above: how far the weight may be from 1; the paper bounds it from above alone (below = 1). truncate: as in `Grpo`."""

    below: float = 1.0
    above: float = 3.0
    truncate: float | None = 2.0

    def __call__(self, s: Sampled) -> Outcome:
        advantage = baseline(s.reward, s.group, scaled=True)[s.row]
        ratio = (s.logp - s.old).detach().exp()
        weight = ratio.clamp(1 - self.below, 1 + self.above) * truncated_weights(s.old, s.rollout, self.truncate)
        bounded = (ratio < 1 - self.below) | (ratio > 1 + self.above)
        total = (weight * advantage * s.logp).sum() / s.tokens.sum()
        return Outcome(-total, bounded.sum(), s.logp.numel())
