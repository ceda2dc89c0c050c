"""The blueprint's objective: policy gradient inside a window of log-ratios, and a squared log-ratio that holds the policy near its sampler.

Kimi K2.5, arXiv 2602.02276, eq. 1, which the Kimi K3 report (arXiv 2607.24653, §4.1) follows:

    J = 1/N Σ_j Σ_i [ 1{-below ≤ log ρ_ij ≤ above} ρ_ij (r_j - r̄) - τ (log ρ_ij)² ],   ρ = π / π_rollout

r̄ is the group's mean, N all tokens drawn in the step. The window is a mask: outside it a token has no policy gradient, whatever the
sign of its advantage. The squared term acts everywhere; it is what bears trajectories drawn by policies several versions old.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.rl.objectives.base import Outcome, Sampled, baseline


@dataclass(frozen=True)
class Blueprint:
    """below, above: the window of log-ratios, both above 0. tau: weight of the squared log-ratio."""

    below: float = 0.7
    above: float = 0.7
    tau: float = 1e-3

    def __call__(self, s: Sampled) -> Outcome:
        advantage = baseline(s.reward, s.group)[s.row]
        log_ratio = s.logp - s.rollout
        inside = (log_ratio >= -self.below) & (log_ratio <= self.above)
        ratio = log_ratio.where(inside, 0.0).exp()  # before the exponential: an infinite one would make its zero gradient NaN
        gain = (ratio * advantage).where(inside, 0.0)
        total = (gain - self.tau * log_ratio.square()).sum() / s.tokens.sum()
        return Outcome(-total, (~inside).sum(), s.logp.numel())
