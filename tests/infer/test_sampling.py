"""From logits to tokens: the shapes of the distributions, and draws that follow them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import UserError
from atoll.infer.sampling import check, distribution, draw, keep_top_k, keep_top_p, penalise

rows = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40).map(lambda x: torch.tensor(x).unsqueeze(0))


@settings(max_examples=60, deadline=None)
@given(rows, st.integers(1, 50))
def test_top_k_keeps_exactly_the_largest(logits, k):
    kept = keep_top_k(logits, k)
    alive = torch.isfinite(kept)
    assert int(alive.sum()) == min(k, logits.shape[-1])
    assert torch.equal(kept[alive], logits[alive])
    if not alive.all():
        assert kept[alive].min() >= logits[~alive].max()


@settings(max_examples=60, deadline=None)
@given(rows, st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass(logits, p):
    probs = logits.softmax(-1)
    kept = torch.sort(probs[torch.isfinite(keep_top_p(logits, p))], descending=True).values
    assert len(kept) >= 1
    assert float(kept.sum()) >= p - 1e-5
    assert float(kept[:-1].sum()) < p + 1e-5  # one token fewer would not reach it


def test_the_least_top_p_keeps_the_likeliest_token():
    kept = keep_top_p(torch.tensor([1.0, 3.0, 2.0]), 1e-300)  # no float32 is above 0 and as small
    assert kept.tolist() == [-torch.inf, 3.0, -torch.inf]


@pytest.mark.parametrize("factor", [1e-300, 1e-45, 1e-38, 1e300])
def test_any_repetition_penalty_leaves_a_distribution_without_what_is_masked(factor):
    logits = penalise(torch.tensor([3.0, -2.0, 1.0, 2.0]), torch.tensor([True, True, False, True]), torch.zeros(4), factor)
    probs = distribution(logits.masked_fill(torch.tensor([False, False, False, True]), -torch.inf))
    assert probs.sum() == 1
    assert probs[3] == 0


def test_top_k_of_equal_logits_keeps_the_lower_ids():
    assert torch.isfinite(keep_top_k(torch.zeros(1, 5), 2)).tolist() == [[True, True, False, False, False]]


def test_temperature_zero_is_the_argmax():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    probs = distribution(logits, temperature=0)
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    assert torch.equal(probs.sum(-1), torch.ones(7))
    assert int((probs > 0).sum()) == 7


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_temperature_divides_the_logits(temperature):
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = (logits / temperature).exp() / (logits / temperature).exp().sum(-1, keepdim=True)
    assert torch.allclose(distribution(logits, temperature), expected, atol=1e-12)


def test_low_precision_logits_are_widened():
    assert distribution(torch.zeros(1, 3, dtype=torch.bfloat16)).dtype == torch.float32
    assert distribution(torch.zeros(1, 3, dtype=torch.float64)).dtype == torch.float64


def test_top_k_comes_before_top_p():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # of the two kept by top-k, the first holds 4/7 = 0.571 of the mass: enough for p = 0.5, not enough for p = 0.6
    assert distribution(logits, top_k=2, top_p=0.5).gt(0).sum() == 1
    assert distribution(logits, top_k=2, top_p=0.6).gt(0).sum() == 2


def test_draws_follow_the_distribution():
    """Pearson's chi-square with 9 degrees of freedom; 27.88 is its 0.1 % point."""
    numbers = torch.Generator().manual_seed(5)
    probs = distribution(torch.randn(1, 10, generator=numbers))
    count = 20_000
    ids = draw(probs.expand(count, -1), torch.rand(count, generator=numbers))
    expected = probs[0].double() * count
    chi = ((torch.bincount(ids, minlength=10) - expected) ** 2 / expected).sum()
    assert float(chi) < 27.88


def test_draws_stay_on_possible_tokens_at_both_ends():
    probs = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0]])
    for uniform, id in ((0.0, 2), (0.2999, 2), (0.3001, 4), (1 - 2**-53, 4), (1.0, 4)):
        assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).item() == id


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "name"),
    [
        (-1, 1, None, "temperature"),
        (float("nan"), 1, None, "temperature"),
        (1, 0, None, "top_p"),
        (1, 1.1, None, "top_p"),
        (1, 1, 0, "top_k"),
    ],
)
def test_impossible_settings_are_refused(temperature, top_p, top_k, name):
    with pytest.raises(UserError, match=f"^{name} = "):
        check(temperature, top_p, top_k)
