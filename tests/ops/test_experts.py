import pytest
import torch

from atoll.ops.experts import experts_mlp, experts_mlp_reference
from atoll.ops.experts.layout import build

EXPERTS, LATENT, INNER = 24, 8, 6


def make(ids, dtype=torch.float64, experts=EXPERTS, latent=LATENT, inner=INNER, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    x, weights = rand(ids.shape[0], latent), rand(*ids.shape)
    return [x, ids, weights, rand(experts, inner, latent), rand(experts, inner, latent), rand(experts, latent, inner)]


def different(tokens, k, experts=EXPERTS, skew=0.0, seed=0):
    """ids [tokens, k], all different in a row; `skew` makes low numbers more likely."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(tokens, experts, generator=generator) - skew * torch.arange(experts) / experts).topk(k).indices


def outcome(f, arguments, **options):
    out = f(*arguments, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, [a for a in arguments if a.requires_grad], grad)]


def hot(tokens):
    ids = different(tokens, 3)
    ids[:, 0] = EXPERTS - 1
    ids[:, 1:] = ids[:, 1:] % (EXPERTS - 2)
    ids[:, 2] = torch.where(ids[:, 2] == ids[:, 1], (ids[:, 1] + 1) % (EXPERTS - 2), ids[:, 2])
    return ids


CASES = {
    **{f"{rows} rows an expert": torch.arange(EXPERTS).repeat(rows).view(-1, 1) for rows in (1, 8, 64, 146, 585)},
    "balanced": different(500, 4),
    "skewed": different(500, 4, skew=1.5),
    "empty experts": different(300, 2, experts=7),
    "one hot expert": hot(400),
    "all tokens on one expert": torch.full((300, 1), 5),
    "one token": different(1, 4),
    "three tokens": different(3, 4),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("activation", ["situ", "silu"])
def test_equals_the_loop_in_float64(case, activation):
    arguments = make(CASES[case])
    for ours, loop in zip(
        outcome(experts_mlp, arguments, activation=activation),
        outcome(experts_mlp_reference, arguments, activation=activation),
        strict=True,
    ):
        torch.testing.assert_close(ours, loop, rtol=1e-11, atol=1e-11)


def test_no_token_gives_no_row_and_zero_gradients():
    out, dx, _, *grads = outcome(experts_mlp, make(torch.zeros(0, 4, dtype=torch.int64)))
    assert out.shape == dx.shape == (0, LATENT)
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_narrow_dtypes_near_float64(dtype, error):
    ids = different(300, 4, skew=0.5)
    narrow = make(ids, dtype)
    exact = [a.detach().double().requires_grad_() if a.requires_grad else a for a in narrow]
    for ours, true in zip(outcome(experts_mlp, narrow), outcome(experts_mlp, exact), strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - true).norm() < error * true.norm()


def test_uncapped_linear_half_and_other_caps():
    arguments = make(different(50, 4))
    for options in ({"linear_beta": None}, {"beta": 1.5, "linear_beta": 3.0}):
        for ours, loop in zip(
            outcome(experts_mlp, arguments, **options), outcome(experts_mlp_reference, arguments, **options), strict=True
        ):
            torch.testing.assert_close(ours, loop, rtol=1e-11, atol=1e-11)


def test_gradcheck():
    x, ids, weights, *w = make(different(7, 2, experts=5), experts=5, latent=3, inner=2)
    assert torch.autograd.gradcheck(lambda *a: experts_mlp(a[0], ids, *a[1:]), (x, weights, *w))


def test_frozen_inputs_get_no_gradient_and_the_others_the_same():
    arguments = make(different(60, 4))
    full = outcome(experts_mlp, arguments)
    frozen = [a.detach() if i in (2, 3, 5) else a for i, a in enumerate(arguments)]
    out, dx, dw3 = outcome(experts_mlp, frozen)
    for ours, whole in ((out, full[0]), (dx, full[1]), (dw3, full[4])):
        torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)


def test_a_second_backward_pass_gives_the_same():
    arguments = make(different(60, 4))
    out = experts_mlp(*arguments)
    leaves = [a for a in arguments if a.requires_grad]
    first = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.square().sum(), leaves), first, strict=True))


def test_without_gradients_the_same_output_and_nothing_kept():
    arguments = make(different(60, 4))
    with torch.no_grad():
        out = experts_mlp(*arguments)
    assert out.grad_fn is None
    assert torch.equal(out, experts_mlp(*arguments))


def test_only_visited_experts_weights_are_read():
    arguments = make(different(2, 4))
    unvisited = [e for e in range(EXPERTS) if not (arguments[1] == e).any()]
    expected = experts_mlp(*arguments)
    for w in arguments[3:]:
        w.data[unvisited] = float("nan")
    out, dx, _, *grads = outcome(experts_mlp, arguments)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert dx.isfinite().all()
    for grad in grads:
        assert (grad[unvisited] == 0).all()
        assert grad.isfinite().all()


def test_bitwise_causal_with_the_routing_forced():
    """Other x and weights from token t on change no bit before t (float32, as trained)."""
    arguments = make(different(700, 4, skew=0.5), torch.float32)
    out = experts_mlp(*arguments)
    for t in (1, 350, 699):
        changed = list(arguments)
        changed[0], changed[2] = (torch.cat([a[:t], torch.randn_like(a[t:])]) for a in (arguments[0], arguments[2]))
        later = experts_mlp(*changed)
        assert torch.equal(later[:t], out[:t])
        assert not torch.equal(later[t:], out[t:])


def test_same_bits_on_every_run_on_two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        arguments = make(different(1500, 4, skew=0.5), torch.float32)
        first = outcome(experts_mlp, arguments)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(outcome(experts_mlp, arguments), first, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
def test_layout_places_every_assignment_once_in_its_experts_rows(case):
    ids = CASES[case]
    layout = build(ids, EXPERTS)
    owner = torch.cat([t.experts.repeat_interleave(t.capacity) for t in layout.tiles] or [torch.zeros(0, dtype=torch.int64)])
    assert torch.equal(owner.index_select(0, layout.slot.view(-1)), ids.reshape(-1))
    assert layout.slot.unique().numel() == ids.numel()
    filled = layout.assignment < ids.numel()
    assert torch.equal(layout.assignment.index_select(0, layout.slot.view(-1)), torch.arange(ids.numel()))
    assert torch.equal(layout.token[filled], layout.assignment[filled] // ids.shape[1])
    assert layout.rows <= 1.1 * ids.numel() + 256 * len(layout.tiles)


def test_refuses_what_cannot_be():
    x, ids, weights, w1, w3, w2 = make(different(5, 2))
    with pytest.raises(ValueError, match="ids must lie in"):
        experts_mlp(x, ids + EXPERTS, weights, w1, w3, w2)
    with pytest.raises(ValueError, match="w2"):
        experts_mlp(x, ids, weights, w1, w3, w2.mT)
    with pytest.raises(ValueError, match="one dtype"):
        experts_mlp(x.float(), ids, weights, w1, w3, w2)
    with pytest.raises(ValueError, match="activation"):
        experts_mlp(x, ids, weights, w1, w3, w2, activation="gelu")
    with pytest.raises(ValueError, match="ids and weights"):
        experts_mlp(x, ids, weights[:, :1], w1, w3, w2)
