"""GRPO done right: no division by a group's deviation, which favours questions that are too easy or too hard, and none by a trajectory's
own length, which favours long wrong answers.

Liu et al., arXiv 2503.20783, §3.2:

    J = 1/R Σ_j 1/L Σ_i min(ρ A_j, clip(ρ, 1-ε, 1+ε) A_j),   A = r - mean,  L one constant for all trajectories
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.rl.objectives.base import Outcome, Sampled, baseline, truncated_weights
from atoll.rl.objectives.grpo import clipped_gain


@dataclass(frozen=True)
class DrGrpo:
    """clip: ε. length: L, the most tokens that a trajectory may draw. truncate: as in `Grpo`."""

    length: int
    clip: float = 0.2
    truncate: float | None = 2.0

    def __call__(self, s: Sampled) -> Outcome:
        advantage = baseline(s.reward, s.group)[s.row]
        gain, held = clipped_gain(s, advantage, self.clip, self.clip)
        gain = truncated_weights(s.old, s.rollout, self.truncate) * gain
        return Outcome(-gain.sum() / (self.length * s.reward.numel()), held.sum(), s.logp.numel())
