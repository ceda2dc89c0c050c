"""Routed experts under quantisation: the fast path equals the loop, and the gradient goes straight through."""

import pytest
import torch

from atoll.ops.experts import experts_mlp, experts_mlp_reference
from atoll.ops.mxfp4 import mxfp4_fake
from atoll.ops.mxfp8 import mxfp8_fake

EXPERTS, LATENT, INNER = 12, 64, 32
BOTH = ["mxfp4", "mxfp4+mxfp8"]


def make(tokens=200, k=3, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    ids = (torch.rand(tokens, EXPERTS, generator=g) - 0.6 * torch.arange(EXPERTS) / EXPERTS).topk(k).indices
    return [
        rand(tokens, LATENT), ids, rand(tokens, k), rand(EXPERTS, INNER, LATENT), rand(EXPERTS, INNER, LATENT), rand(EXPERTS, LATENT, INNER)
    ]  # fmt: skip


def outcome(f, arguments, **options):
    out = f(*arguments, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, [a for a in arguments if a.requires_grad], grad)]


def rounded(arguments):
    """The same call with weights that have been rounded before."""
    weights = [mxfp4_fake(w).requires_grad_() for w in arguments[3:]]
    return [*arguments[:3], *weights]


@pytest.mark.parametrize("quantization", BOTH)
@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("tokens", [1, 200])
def test_equals_the_loop_in_float64(quantization, activation, tokens):
    options = {"activation": activation, "quantization": quantization}
    arguments = make(tokens)
    for ours, loop in zip(outcome(experts_mlp, arguments, **options), outcome(experts_mlp_reference, arguments, **options), strict=True):
        torch.testing.assert_close(ours, loop, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounds_weights_as_if_they_had_been_rounded_before(dtype):
    """Bit for bit, and the gradient of the unrounded weights is that of the rounded: straight through."""
    arguments = make(dtype=dtype)
    for inside, before in zip(outcome(experts_mlp, arguments, quantization="mxfp4"), outcome(experts_mlp, rounded(arguments)), strict=True):
        assert torch.equal(inside, before)


def test_rounding_changes_the_result_in_each_mode():
    arguments = make()
    plain, weights, both = (experts_mlp(*arguments, quantization=q) for q in ("none", *BOTH))
    for a, b in ((plain, weights), (weights, both)):
        assert 0.01 < (a - b).norm() / a.norm() < 0.5


def test_both_rows_that_enter_the_experts_are_rounded():
    """One expert, one token: the formula written out."""
    x, ids, weights, w1, w3, w2 = (a.detach() for a in make(1, 1))
    out = experts_mlp(x, ids, weights, w1, w3, w2, activation="silu", quantization="mxfp4+mxfp8")
    v1, v3, v2 = (mxfp4_fake(w[int(ids)]) for w in (w1, w3, w2))
    rows = mxfp8_fake(x)
    gate, up = rows @ v1.T, rows @ v3.T
    hidden = mxfp8_fake(torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(out, weights * (hidden @ v2.T), rtol=1e-13, atol=1e-13)


def test_gradients_of_rounded_rows_go_straight_through():
    """dw2 is taken with the rounded hidden rows, dw1 with the rounded x; dx is what the rounded x would get."""
    arguments = make()
    x = mxfp8_fake(arguments[0]).requires_grad_()
    mine = outcome(experts_mlp, arguments, quantization="mxfp4+mxfp8")
    theirs = outcome(experts_mlp, [x, *arguments[1:]], quantization="mxfp4+mxfp8")
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("quantization", BOTH)
def test_only_visited_experts_are_read_and_the_weights_stay_as_they_are(quantization):
    arguments = make(2)
    unvisited = [e for e in range(EXPERTS) if not (arguments[1] == e).any()]
    expected = experts_mlp(*arguments, quantization=quantization)
    for w in arguments[3:]:
        w.data[unvisited] = float("nan")
    before = [w.detach().clone() for w in arguments[3:]]
    out, dx, _, *grads = outcome(experts_mlp, arguments, quantization=quantization)
    assert torch.equal(out, expected)
    assert all(g.isfinite().all() for g in (dx, *grads))
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(arguments[3:], before, strict=True))


def test_without_gradients_the_same_output():
    arguments = make()
    with torch.no_grad():
        out = experts_mlp(*arguments, quantization="mxfp4+mxfp8")
    assert torch.equal(out, experts_mlp(*arguments, quantization="mxfp4+mxfp8"))


@pytest.mark.parametrize("quantization", BOTH)
def test_a_weight_that_is_not_finite_shows(quantization):
    arguments = make()
    expert = int(arguments[1][0, 0])
    arguments[5].data[expert, 0, 0] = float("inf")
    assert experts_mlp(*arguments, quantization=quantization)[0].isnan().any()


def test_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="quantization = 'fp4'"):
        experts_mlp(*make(3), quantization="fp4")
    x, ids, weights, w1, w3, w2 = make(3)
    with pytest.raises(ValueError, match="I = 24 must be multiples of 32"):
        experts_mlp(x, ids, weights, w1[:, :24], w3[:, :24], w2[:, :, :24], quantization="mxfp4")
