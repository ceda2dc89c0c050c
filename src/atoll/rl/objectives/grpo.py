"""Group relative policy optimisation: clipped ratios, rewards scaled within their group, every trajectory weighing the same.

DeepSeekMath, arXiv 2402.03300, eq. 3:

    J = 1/R Σ_j 1/|o_j| Σ_i [ min(ρ A_j, clip(ρ, 1-ε, 1+ε) A_j) - β KL(π, π_ref) ],   ρ = π / π_old,  A = (r - mean) / std
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.rl.objectives.base import Outcome, Sampled, baseline, low_variance_kl, truncated_weights


def clipped_gain(s: Sampled, advantage: Tensor, below: float, above: float) -> tuple[Tensor, Tensor]:
    """min(ρ A, clip(ρ, 1-below, 1+above) A) of each token, and where the clip holds the gradient at 0."""
    ratio = (s.logp - s.old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - below, 1 + above) * advantage)
    held = ((ratio > 1 + above) & (advantage > 0)) | ((ratio < 1 - below) & (advantage < 0))
    return gain, held


@dataclass(frozen=True)
class Grpo:
    """clip: ε. beta: weight of the KL to a reference policy, which must then be held. truncate: largest importance weight of the trainer's
    policy over the sampler's; None leaves it out."""

    clip: float = 0.2
    beta: float = 0.0
    truncate: float | None = 2.0

    def __call__(self, s: Sampled) -> Outcome:
        advantage = baseline(s.reward, s.group, scaled=True)[s.row]
        gain, held = clipped_gain(s, advantage, self.clip, self.clip)
        gain = truncated_weights(s.old, s.rollout, self.truncate) * gain
        if self.beta:
            if s.reference is None:
                raise ValueError("beta above 0: the log-probabilities of a reference policy are needed")
            gain = gain - self.beta * low_variance_kl(s.logp, s.reference)
        each = 1 / s.tokens.to(gain.dtype).clamp(min=1)
        drew = (s.tokens > 0).sum().clamp(min=1)
        return Outcome(-(gain * each[s.row]).sum() / drew, held.sum(), s.logp.numel())
