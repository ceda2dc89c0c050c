"""What objectives share: the sampled tokens of a step, group baselines, truncated importance weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampled:
    """The tokens that the policy drew, of some or all trajectories of a step, end to end.

    logp [N]: log-probability under the policy in training, with gradient. old [N]: under the policy at the step's start, as the trainer
    computes it. rollout [N]: as recorded when the token was drawn. row int64 [N]: the trajectory each token belongs to. reward [R],
    group int64 [R]: of every trajectory of the step, and which prompt it answers. tokens [R]: tokens that each trajectory drew, here or
    in another micro-batch. reference [N]: under a reference policy, where one is held.
    """

    logp: Tensor
    old: Tensor
    rollout: Tensor
    row: Tensor
    reward: Tensor
    group: Tensor
    tokens: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """loss: a scalar, of these tokens' part of the whole step's, so that micro-batches add up. clipped: tokens whose gradient the
    objective bounded or dropped; counted: tokens; both scalars without gradient."""

    loss: Tensor
    clipped: Tensor
    counted: int


class Objective(Protocol):
    """A loss to be minimised."""

    def __call__(self, s: Sampled) -> Outcome:
        """The part of the step's loss that these tokens make."""
        ...


def baseline(reward: Tensor, group: Tensor, *, scaled: bool = False) -> Tensor:
    """Advantage [R] of each trajectory: its reward less the mean of its group; `scaled`, over the group's standard deviation too.

    The deviation is the population's plus 1e-6; a group of equal rewards has no advantage at all.
    """
    groups = int(group.max()) + 1 if group.numel() else 0
    count = reward.new_zeros(groups).index_add_(0, group, torch.ones_like(reward))
    mean = reward.new_zeros(groups).index_add_(0, group, reward) / count.clamp(min=1)
    centred = reward - mean[group]
    if not scaled:
        return centred
    variance = reward.new_zeros(groups).index_add_(0, group, centred.square()) / count.clamp(min=1)
    return centred / (variance.sqrt()[group] + 1e-6)


def truncated_weights(old: Tensor, rollout: Tensor, limit: float | None) -> Tensor:
    """min(π_old / π_rollout, limit) of each token, no gradient: corrects for a sampler that is not quite the trainer's model. Without a
    limit 1. Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training", eq. 5."""
    if limit is None:
        return torch.ones_like(old)
    return (old - rollout).detach().exp().clamp(max=limit)


def low_variance_kl(logp: Tensor, reference: Tensor) -> Tensor:
    """Unbiased estimate of KL(π, π_ref) a token: π_ref/π - log(π_ref/π) - 1, never below 0. Schulman 2020; DeepSeekMath eq. 4."""
    log_ratio = reference - logp
    return log_ratio.exp() - log_ratio - 1
