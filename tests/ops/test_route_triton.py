"""The routing kernel against its twin, bit for bit: in Triton's interpreter on any machine, on the card itself where there is one."""

import os

import pytest
import torch

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
DEVICE = "cuda" if CARD else "cpu"

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from atoll.ops import kernel_report  # noqa: E402
from atoll.ops.routing import QuantileHistogram, route  # noqa: E402
from atoll.ops.routing.route_launch import route_refusal  # noqa: E402


def material(tokens, experts, levels=2**24, seed=0):
    """Scores on `levels` levels, so that few levels tie, and a bias on coarse ones."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (tokens, experts), generator=generator) / levels
    return scores.to(DEVICE), (torch.randint(-3, 4, (experts,), generator=generator) / 16).to(DEVICE)


def assert_same(got, expected):
    assert got[0].dtype == torch.int64
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-30)
    assert torch.equal(got[2], expected[2])


@pytest.mark.parametrize("levels", [2, 7, 2**24])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(40, 12, 1), (40, 12, 11), (9, 33, 4), (20, 896, 16), (3, 1024, 32), (1, 2, 1)])
def test_same_ids_and_cutoffs_as_the_twin_ties_included(tokens, experts, k, levels):
    scores, bias = material(tokens, experts, levels, seed=k)
    assert_same(route(scores, bias, k, backend="triton"), route(scores, bias, k, backend="torch"))


def test_equal_scores_choose_the_lowest_experts():
    scores = torch.full((3, 100), 0.5, device=DEVICE)
    ids, weights, cutoff = route(scores, torch.zeros(100, device=DEVICE), 7, backend="triton")
    assert torch.equal(ids.cpu(), torch.arange(7).expand(3, 7))
    torch.testing.assert_close(weights.cpu(), torch.full((3, 7), 1 / 7))
    assert (cutoff == 0.5).all()


def test_signs_zeros_and_infinities_keep_their_order():
    row = torch.tensor([0.0, -0.0, -1.0, float("inf"), -float("inf"), 1e-40, -1e-40, 3.0, float("nan"), -2.0], device=DEVICE)
    scores, bias = row.repeat(2, 1), torch.zeros(10, device=DEVICE)
    ids = route(scores, bias, 9, backend="triton")[0]
    assert ids[0].tolist()[:3] == [8, 3, 7]
    if not CARD:  # a card may flush subnormals in the sum
        assert ids[0].tolist() == [8, 3, 7, 5, 0, 1, 6, 2, 9]
    assert torch.equal(route(scores[:, :8], bias[:8], 2, backend="triton")[0], route(scores[:, :8], bias[:8], 2, backend="torch")[0])


def test_no_score_at_all_weighs_nothing():
    _, weights, _ = route(torch.zeros(2, 8, device=DEVICE), torch.zeros(8, device=DEVICE), 3, backend="triton")
    assert (weights == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_scores_route_in_float32(dtype):
    scores, bias = material(30, 24)
    narrow = scores.to(dtype)
    got = route(narrow, bias, 3, backend="triton")
    assert got[1].dtype == got[2].dtype == torch.float32
    assert_same(got, route(narrow.float(), bias, 3, backend="torch"))


def test_noncontiguous_scores():
    scores, bias = material(24, 30)
    assert_same(route(scores.T, bias[:24], 3, backend="triton"), route(scores.T, bias[:24], 3, backend="torch"))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("experts", "bins"), [(24, 1000), (33, 7)])
def test_counts_are_those_of_the_twin(experts, bins, masked):
    scores, bias = material(200, experts)
    mask = (torch.rand(200, generator=torch.Generator().manual_seed(3)) < 0.6).to(DEVICE) if masked else None
    results = []
    for backend in ("triton", "torch"):
        histogram = QuantileHistogram(experts, bins, device=DEVICE)
        histogram.set_range(bias)
        load = torch.zeros(experts, dtype=torch.int64, device=DEVICE)
        for a, b in ((0, 70), (70, 200)):  # two micro-batches add up
            part = None if mask is None else mask[a:b]
            route(scores[a:b], bias, 4, histogram=histogram, load=load, mask=part, backend=backend)
        results.append((histogram.counts, load, histogram.solve(4)))
    for ours, twin in zip(*results, strict=True):
        assert torch.equal(ours, twin)
    real = 200 if mask is None else int(mask.sum())
    assert (results[0][0].sum(1) == real).all()
    assert int(results[0][1].sum()) == 4 * real


def test_bins_at_their_edges():
    """Required biases on multiples of the bins' width, where one rounding more would count next door."""
    experts, bins = 16, 64
    bias = torch.linspace(-0.5, 0.5, experts, device=DEVICE)
    scores = (torch.arange(40 * experts, device=DEVICE) % 65 / 64).view(40, experts)
    counts = []
    for backend in ("triton", "torch"):
        histogram = QuantileHistogram(experts, bins, device=DEVICE)
        histogram.set_range(bias)
        route(scores, bias, 3, histogram=histogram, backend=backend)
        counts.append(histogram.counts)
    assert torch.equal(*counts)


def test_gradient_of_the_weights_is_the_twins():
    grads = []
    for backend in ("triton", "torch"):
        scores, bias = material(20, 12)
        _, weights, _ = route(scores.requires_grad_(), bias, 3, backend=backend)
        (grad,) = torch.autograd.grad(weights, scores, torch.arange(60.0, device=DEVICE).view(20, 3))
        grads.append(grad)
    torch.testing.assert_close(*grads)


def test_no_token():
    ids, weights, cutoff = route(torch.zeros(0, 8, device=DEVICE), torch.zeros(8, device=DEVICE), 2, backend="triton")
    assert ids.shape == weights.shape == (0, 2)
    assert cutoff.shape == (0,)


def test_dispatch_and_refusals():
    scores, bias = material(4, 12)
    kernel_report(clear=True)
    route(scores, bias, 2, backend="triton")
    assert kernel_report(clear=True) == {"route triton": 1}
    assert "float32" in route_refusal(scores.double(), 2)
    assert "1024" in route_refusal(torch.zeros(1, 1025), 2)
    with pytest.raises(ValueError, match="wider than float32"):
        route(scores.double(), bias, 2, backend="triton")
    with pytest.raises(ValueError, match="mask"):
        route(scores, bias, 2, mask=torch.ones(3, dtype=torch.bool, device=DEVICE))
    with pytest.raises(ValueError, match="int64"):
        route(scores, bias, 2, load=torch.zeros(12, device=DEVICE), backend="triton")


def test_registration():
    """torch.library's own checks of schema, fake shapes and tracing with dynamic shapes."""
    scores, bias = material(5, 12)
    torch.library.opcheck(torch.ops.atoll.route.default, (scores, bias, 3))
    histogram = QuantileHistogram(12, 9, device=DEVICE)
    load, mask = torch.zeros(12, dtype=torch.int64, device=DEVICE), torch.ones(5, dtype=torch.bool, device=DEVICE)
    given = (scores, bias, 3, histogram.counts, histogram.low, histogram.width, load, mask)
    torch.library.opcheck(torch.ops.atoll.route_counted.default, given)


def test_compiles_without_a_break():
    scores, bias = material(20, 12)
    histogram, other = (QuantileHistogram(12, 9, device=DEVICE) for _ in range(2))
    load, mask = torch.zeros(12, dtype=torch.int64, device=DEVICE), torch.arange(20, device=DEVICE) < 15

    def step(scores, histogram):
        ids, weights, cutoff = route(scores, bias, 3, histogram=histogram, load=load, mask=mask, backend="triton")
        return ids, weights * 2, cutoff

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    scores.requires_grad_()
    for ours, eager in zip(compiled(scores, histogram), step(scores, other), strict=True):
        torch.testing.assert_close(ours, eager)
    assert torch.equal(histogram.counts, other.counts)
    assert int(load.sum()) == 2 * 15 * 3
