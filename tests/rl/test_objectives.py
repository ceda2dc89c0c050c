"""Each objective against its formula written token by token in Python floats; gradients too; micro-batches add up to the step."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from atoll.rl.objectives import OBJECTIVES, Blueprint, Cispo, DrGrpo, Grpo, Sampled, baseline

REWARDS = [1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 0.0]
GROUPS = [0, 0, 0, 1, 1, 2, 2]
LENGTHS = [3, 5, 1, 4, 0, 2, 6]


def sampled(seed: int = 0, spread: float = 0.6) -> Sampled:
    torch.manual_seed(seed)
    row = torch.tensor([j for j, n in enumerate(LENGTHS) for _ in range(n)])
    logp, old, rollout, reference = (-1.5 + spread * torch.randn(len(row), dtype=torch.float64) for _ in range(4))
    given = (torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS), torch.tensor(LENGTHS))
    return Sampled(logp.requires_grad_(), old, rollout, row, *given, reference)


def advantages(scaled: bool) -> list[float]:
    found = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        mates = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        mean = sum(mates) / len(mates)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in mates) / len(mates))
        found.append((reward - mean) / (deviation + 1e-6) if scaled else reward - mean)
    return found


def weight(old: float, rollout: float, limit: float | None) -> float:
    return 1.0 if limit is None else min(math.exp(old - rollout), limit)


def by_hand(objective, s: Sampled) -> tuple[float, list[float], int]:
    """Loss, its gradient with respect to each log-probability, and clipped tokens, one token at a time."""
    loss, gradient, clipped = 0.0, [], 0
    every = sum(LENGTHS)
    for i in range(len(s.row)):
        j = int(s.row[i])
        new, old, rollout, reference = (float(t[i]) for t in (s.logp.detach(), s.old, s.rollout, s.reference))
        if isinstance(objective, Blueprint):
            a, log_ratio = advantages(False)[j], new - rollout
            inside = -objective.below <= log_ratio <= objective.above
            gain = (math.exp(log_ratio) * a if inside else 0.0) - objective.tau * log_ratio**2
            slope = (math.exp(log_ratio) * a if inside else 0.0) - 2 * objective.tau * log_ratio
            share, clipped = 1 / every, clipped + (not inside)
        elif isinstance(objective, Cispo):
            a, ratio = advantages(True)[j], math.exp(new - old)
            w = min(max(ratio, 1 - objective.below), 1 + objective.above) * weight(old, rollout, objective.truncate)
            gain, slope, share = w * a * new, w * a, 1 / every
            clipped += not 1 - objective.below <= ratio <= 1 + objective.above
        else:
            a, ratio = advantages(isinstance(objective, Grpo))[j], math.exp(new - old)
            low, high = 1 - objective.clip, 1 + objective.clip
            w = weight(old, rollout, objective.truncate)
            held = (ratio > high and a > 0) or (ratio < low and a < 0)
            gain = w * min(ratio * a, min(max(ratio, low), high) * a)
            slope = 0.0 if held else w * ratio * a
            clipped += held
            if isinstance(objective, Grpo):
                gain -= objective.beta * (math.exp(reference - new) - (reference - new) - 1)
                slope -= objective.beta * (1 - math.exp(reference - new))
                share = 1 / LENGTHS[j] / sum(n > 0 for n in LENGTHS)
            else:
                share = 1 / objective.length / len(REWARDS)
        loss, gradient = loss - gain * share, [*gradient, -slope * share]
    return loss, gradient, clipped


CASES = [
    Blueprint(),
    Blueprint(below=0.2, above=0.1, tau=0.3),
    Grpo(),
    Grpo(clip=0.1, beta=0.05, truncate=1.1),
    Grpo(truncate=None),
    DrGrpo(length=9),
    DrGrpo(length=9, clip=0.05, truncate=1.0),
    Cispo(),
    Cispo(below=0.1, above=0.2, truncate=None),
]


@pytest.mark.parametrize("objective", CASES, ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_equals_its_formula_token_by_token(objective, seed):
    s = sampled(seed)
    out = objective(s)
    loss, gradient, clipped = by_hand(objective, s)
    (found,) = torch.autograd.grad(out.loss, s.logp)
    assert float(out.loss.detach()) == pytest.approx(loss, abs=1e-12)
    assert found.tolist() == pytest.approx(gradient, abs=1e-12)
    assert (int(out.clipped), out.counted) == (clipped, len(s.row))


@pytest.mark.parametrize("objective", CASES, ids=repr)
def test_micro_batches_add_up(objective):
    s = sampled()
    order = torch.tensor(random.Random(0).sample(range(len(s.row)), len(s.row)))
    parts = []
    for chunk in order.split(6):
        picked = {name: getattr(s, name)[chunk] for name in ("logp", "old", "rollout", "row", "reference")}
        parts.append(objective(dataclasses.replace(s, **picked)).loss)
    torch.testing.assert_close(sum(parts), objective(s).loss, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_they_are_the_policy_gradient(name):
    """Where new, old and sampler agree, the gradient is the advantage over the objective's own count."""
    s = sampled(spread=0.0)
    objective = OBJECTIVES[name](**({"length": 9} if name == "dr_grpo" else {}))
    (found,) = torch.autograd.grad(objective(s).loss, s.logp)
    scaled = name in ("grpo", "cispo")
    count = {"dr_grpo": torch.full((7,), 9.0 * 7), "grpo": torch.tensor(LENGTHS) * 6.0}.get(name, torch.full((7,), float(sum(LENGTHS))))
    expected = -(torch.tensor(advantages(scaled), dtype=torch.float64) / count)[s.row]
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    assert int(objective(s).clipped) == 0


def test_a_group_of_equal_rewards_teaches_nothing():
    reward, group = torch.tensor([1.0, 1.0, 0.3], dtype=torch.float64), torch.tensor([0, 0, 1])
    assert not baseline(reward, group).any()
    assert not baseline(reward, group, scaled=True).any()


def test_the_window_drops_a_token_whatever_its_advantage():
    s = sampled()
    far = dataclasses.replace(s, logp=(s.rollout + 1.0).requires_grad_())
    (found,) = torch.autograd.grad(Blueprint(tau=0.0)(far).loss, far.logp)
    assert not found.any()
    (held,) = torch.autograd.grad(Blueprint(tau=0.1)(far).loss, far.logp)
    assert bool((held > 0).all()), "the squared term still draws the policy back"


def test_a_ratio_past_every_number_leaves_the_others_gradients_alone():
    s = sampled()
    logp = s.logp.detach().clone()
    logp[3] = s.rollout[3] + 1000.0
    s = dataclasses.replace(s, logp=logp.requires_grad_())
    (found,) = torch.autograd.grad(Blueprint()(s).loss, s.logp)
    assert bool(torch.isfinite(found).all())


def test_a_reference_is_asked_for():
    with pytest.raises(ValueError, match="reference policy"):
        Grpo(beta=0.1)(dataclasses.replace(sampled(), reference=None))
