"""The rules that quantile balancing is compared with, and its estimators under every split of a step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.ops.routing import (
    QuantileHistogram,
    QuantileMargins,
    QuantileMean,
    balance_loss,
    quantile_bias,
    route,
    sign_bias,
    within_capacity,
)


def draw(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- sign rule ---------------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**20), experts=st.integers(2, 40), rate=st.floats(1e-5, 0.1))
@settings(max_examples=60, deadline=None)
def test_the_sign_rule_lowers_the_overloaded_and_lifts_the_idle(seed, experts, rate):
    load = torch.randint(0, 50, (experts,), generator=torch.Generator().manual_seed(seed))
    bias = draw(seed, experts)
    moved = sign_bias(load, bias, rate) - bias
    mean = load.double().mean()
    assert (moved[load > mean] < 0).all()
    assert (moved[load < mean] > 0).all()
    assert (moved[load == mean] == 0).all()
    assert torch.allclose(moved.abs()[load != mean], torch.tensor(rate, dtype=torch.float64), rtol=1e-6)


def test_the_sign_rule_does_nothing_without_tokens():
    bias = torch.tensor([0.3, -0.1])
    assert torch.equal(sign_bias(torch.zeros(2, dtype=torch.int64), bias, 0.1), bias)


# --- auxiliary loss ----------------------------------------------------------------------------------------------------------------


def by_hand(scores, share, rows):
    """E sum_j f_j P_j in Python's floats."""
    experts, total = scores.shape[1], 0.0
    for row in rows:
        values = scores[row].tolist()
        total += sum(f * s / sum(values) for f, s in zip(share.tolist(), values, strict=True))
    return experts * total / len(rows)


def test_the_auxiliary_loss_by_hand_with_padding():
    scores, share = draw(0, 7, 5), torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, False, True, True])
    assert float(balance_loss(scores, share)) == pytest.approx(by_hand(scores, share, range(7)), rel=1e-12)
    assert float(balance_loss(scores, share, mask)) == pytest.approx(by_hand(scores, share, [0, 2, 3, 5, 6]), rel=1e-12)
    assert float(balance_loss(scores, share, torch.zeros(7, dtype=torch.bool))) == 0
    assert float(balance_loss(scores, torch.full((5,), 0.2, dtype=torch.float64))) == pytest.approx(1, rel=1e-12)


def test_the_auxiliary_loss_pulls_the_overloaded_expert_down():
    scores = draw(1, 64, 8).requires_grad_()
    share = torch.full((8,), 0.05, dtype=torch.float64)
    share[3] = 0.65
    assert torch.autograd.gradcheck(lambda s: balance_loss(s, share), (scores,))
    balance_loss(scores, share).backward()
    gradient = scores.grad
    assert (gradient[:, 3] > 0).all(), "a step down the gradient lowers it"
    assert (gradient[:, [0, 1, 2, 4, 5, 6, 7]] < 0).all()


# --- capacity ----------------------------------------------------------------------------------------------------------------------


def room_by_hand(ids, experts, factor, mask):
    rows = ids.tolist()
    counted = [i for i in range(len(rows)) if mask is None or mask[i]]
    capacity = math.ceil(factor * len(counted) * ids.shape[1] / experts)
    taken, keep = [0] * experts, [[True] * ids.shape[1] for _ in rows]
    for i in counted:
        for j, e in enumerate(rows[i]):
            keep[i][j] = taken[e] < capacity
            taken[e] += 1
    return torch.tensor(keep)


@given(seed=st.integers(0, 2**20), tokens=st.integers(1, 60), experts=st.integers(2, 12), factor=st.floats(0.1, 3), padded=st.booleans())
@settings(max_examples=80, deadline=None)
def test_capacity_against_a_count_by_hand_and_blind_to_later_tokens(seed, tokens, experts, factor, padded):
    k = 1 + seed % (experts - 1)
    ids = draw(seed, tokens, experts).pow(3).argsort(1)[:, :k]
    mask = draw(seed + 1, tokens) < 0.7 if padded else None
    keep = within_capacity(ids, experts, factor, mask)
    assert torch.equal(keep, room_by_hand(ids, experts, factor, mask))
    later = ids.clone()
    later[tokens // 2 :] = draw(seed + 2, tokens, experts).argsort(1)[tokens // 2 :, :k]
    assert torch.equal(within_capacity(later, experts, factor, mask)[: tokens // 2], keep[: tokens // 2])


def test_no_expert_is_over_its_capacity():
    ids = torch.zeros(100, 1, dtype=torch.int64)
    keep = within_capacity(ids, 8, 1.25)
    assert int(keep.sum()) == math.ceil(1.25 * 100 / 8)
    assert keep[:16].all()


# --- every split of a step ---------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**20),
    ranks=st.integers(1, 3),
    micro=st.integers(1, 3),
    shards=st.integers(1, 4),
    experts=st.integers(4, 30),
    bins=st.sampled_from([10, 1000]),
)
@settings(max_examples=40, deadline=None)
def test_pooled_over_ranks_micro_batches_and_sequence_shards_the_integers_are_the_same(seed, ranks, micro, shards, experts, bins):
    """A batch of sequences, rows over ranks and micro-batches, each row over shards; padding among the tokens."""
    k, length = 1 + seed % (experts - 1), 4 * shards + seed % 3
    scores, bias = draw(seed, ranks * micro * 2, length, experts).float(), (draw(seed + 1, experts) - 0.5).float()
    mask = draw(seed + 2, ranks * micro * 2, length) < 0.9
    whole = QuantileHistogram(experts, bins)
    whole.set_range(bias)
    whole.observe(scores.flatten(0, 1), route(scores.flatten(0, 1), bias, k)[2], mask.flatten())
    pooled, load = torch.zeros_like(whole.counts), torch.zeros(experts, dtype=torch.int64)
    for rank_scores, rank_mask in zip(scores.chunk(ranks), mask.chunk(ranks), strict=True):
        for shard, shard_mask in zip(rank_scores.chunk(shards, 1), rank_mask.chunk(shards, 1), strict=True):
            local = QuantileHistogram(experts, bins)
            local.set_range(bias)
            for part, part_mask in zip(shard.chunk(micro), shard_mask.chunk(micro), strict=True):
                flat = part.flatten(0, 1)
                ids, _, cutoff = route(flat, bias, k)
                local.observe(flat, cutoff, part_mask.flatten())
                load += torch.bincount(ids[part_mask.flatten()].flatten(), minlength=experts)
            pooled += local.counts
    assert torch.equal(pooled, whole.counts)
    assert int(load.sum()) == int(mask.sum()) * k
    local.counts.copy_(pooled)
    assert torch.equal(local.solve(k), whole.solve(k))


@pytest.mark.parametrize("cut", [1, 100, 299])
def test_the_exact_rule_pools_micro_batches_too(cut):
    scores, bias = draw(0, 300, 24), draw(1, 24) - 0.5
    mask = draw(2, 300) < 0.8
    cutoff = route(scores, bias, 3)[2]
    exact = QuantileMargins(24)
    for at in (slice(cut), slice(cut, None)):
        exact.observe(scores[at], cutoff[at], mask[at])
    assert torch.equal(exact.solve(3), quantile_bias(scores, bias, 3, mask=mask))
    assert QuantileMargins(24).solve(3) is None


def test_the_mean_of_quantiles_is_not_the_quantile_of_all():
    """One micro-batch gives the exact rule; several small ones give a mean that depends on the split, whatever their order."""
    scores, bias = draw(0, 64 * 16, 32).pow(2), torch.zeros(32, dtype=torch.float64)
    pooled = quantile_bias(scores, bias, 4)

    def mean_of(parts):
        local = QuantileMean(32, 4)
        for part in parts:
            local.observe(part, route(part, bias, 4)[2])
        return local.solve(4)

    torch.testing.assert_close(mean_of([scores]), pooled, rtol=0, atol=1e-11)
    small = mean_of(scores.split(16))
    assert torch.equal(small, mean_of(reversed(scores.split(16))))
    assert float((small - pooled).abs().max()) > 1e-3
    assert QuantileMean(32, 4).solve(4) is None
    with pytest.raises(ValueError, match="k = 5"):
        QuantileMean(32, 4).solve(5)


# --- closed loops ------------------------------------------------------------------------------------------------------------------


def violation(scores, bias, k):
    load = torch.bincount(route(scores, bias, k)[0].flatten(), minlength=scores.shape[1]).double()
    return float(load.max() / load.mean() - 1)


def stream(step, offsets, m=4096):
    return torch.sigmoid(torch.randn(m, len(offsets), generator=torch.Generator().manual_seed(step)) + offsets)


@pytest.mark.parametrize("bins", [None, 1000])
def test_on_a_drifting_stream_the_load_stays_at_the_noise_floor(bins):
    """Offsets walk by 0.02 an expert and step (0.08 would double the load of some in one step): MaxVio as on a stream that stands."""
    k, experts, generator = 4, 96, torch.Generator().manual_seed(5)
    offsets = 0.5 * torch.randn(experts, generator=generator)
    bias = still = torch.zeros(experts)
    walked, floor, first = offsets.clone(), [], []
    for step in range(24):
        scores, stands = stream(step, walked), stream(1000 + step, offsets)
        first.append(violation(scores, bias, k))
        floor.append(violation(stands, still, k))
        bias, still = quantile_bias(scores, bias, k, bins=bins), quantile_bias(stands, still, k, bins=bins)
        walked += 0.02 * torch.randn(experts, generator=generator)
    assert first[0] > 3
    settled, noise = sum(first[4:]) / 20, sum(floor[4:]) / 20
    assert 0.1 < noise < 0.4
    assert settled < 1.3 * noise, (settled, noise)
    assert max(first[4:]) < 2.2 * noise
    assert float((walked - offsets).std()) > 0.05, "the stream has moved"


@pytest.mark.parametrize("bins", [None, 1000])
def test_all_tokens_on_the_same_experts_recover_in_three_steps(bins):
    k, experts = 4, 96
    bias = torch.zeros(experts)

    def hostile(step):
        scores = 0.05 + 0.1 * torch.rand(4096, experts, generator=torch.Generator().manual_seed(step))
        scores[:, :k] += 0.8
        return scores

    assert violation(hostile(0), bias, k) == experts / k - 1
    for step in range(3):
        bias = quantile_bias(hostile(step), bias, k, bins=bins)
    assert violation(hostile(3), bias, k) < 0.6
    assert (bias[:k] < -0.5).all()
