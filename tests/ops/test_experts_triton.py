"""The experts' kernels against the loop in float64: in Triton's interpreter on any machine, on the card itself where there is one."""

import os

import pytest
import torch

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
DEVICE = "cuda" if CARD else "cpu"

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from atoll.ops import kernel_report  # noqa: E402
from atoll.ops.experts import experts_mlp, experts_mlp_reference  # noqa: E402
from atoll.ops.experts.fused import backward, experts_refusal, forward  # noqa: E402
from atoll.ops.experts.plan import HOPPER, Config, Plan, choose, sort, tiles  # noqa: E402

EXPERTS, LATENT, INNER = 7, 24, 20
LIMIT = 3e-6
SITU, NONE = ("situ", 4.0, 25.0), ("none", 1.0, 1.0)
NAMES = ("out", "x", "weights", "w1", "w3", "w2")

# token tiles in two parts, rests of every class, weights in two halves: the settings of the blueprint's shape, scaled down
SMALL = Config(64, 2, (16, 32, 32), (0, 0, 16), 64, 16, 2, 4, 32, 32, 16, 2, 4, group=2, grad_group=2)


def different(tokens, k, experts=EXPERTS, skew=0.0, seed=0):
    """ids [tokens, k], all different in a row; `skew` makes low numbers more likely."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(tokens, experts, generator=generator) - skew * torch.arange(experts) / experts).topk(k).indices


def material(ids, experts=EXPERTS, latent=LATENT, inner=INNER, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape, size=1.0):
        return (size * torch.randn(*shape, generator=generator)).to(DEVICE)

    w = [rand(experts, *s, size=0.3) for s in ((inner, latent), (inner, latent), (latent, inner))]
    return [rand(ids.shape[0], latent), ids.to(DEVICE), rand(*ids.shape), *w]


def outcome(f, arguments, dtype=torch.float32, **options):
    """Output and the gradients of x, weights, w1, w3, w2."""
    leaves = [a if not a.is_floating_point() else a.detach().to(dtype, copy=True).requires_grad_() for a in arguments]
    out = f(*leaves, **options)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE, dtype)
    return [out.detach(), *torch.autograd.grad(out, [a for a in leaves if a.requires_grad], up)]


def close(got, expected, limit=LIMIT):
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert a.shape == b.shape, name
        assert a.isfinite().all(), name
        assert (a.double() - b).norm() <= limit * b.norm() + 1e-12, name


def hot(tokens):
    """All tokens on expert 3, the second choice spread over the others, of which expert 0 gets none."""
    ids = torch.full((tokens, 2), 3)
    ids[:, 1] = torch.tensor([1, 2, 4, 5, 6]).repeat(tokens)[:tokens]
    return ids


CASES = {
    **{f"{rows} rows an expert": torch.arange(experts).repeat(rows).view(-1, 1) for rows, experts in ((1, 7), (8, 7), (64, 2), (146, 2))},
    "balanced": different(60, 3),
    "skewed": different(90, 3, skew=1.5),
    "empty experts": different(40, 2, experts=4),
    "one hot expert": hot(130),
    "all tokens on one expert": torch.full((300, 1), 5),
    "one token": different(1, 4),
    "every expert": different(9, 7),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_loop_in_float64(case):
    arguments = material(CASES[case])
    got = outcome(experts_mlp, arguments, backend="triton")
    close(got, outcome(experts_mlp_reference, arguments, torch.float64))
    empty = [e for e in range(EXPERTS) if not (CASES[case] == e).any()]
    assert all((g[empty] == 0).all() for g in got[3:])


def direct(arguments, config, act=SITU, needs=(True, True, True), keep=False):
    x, ids, weights, *w = arguments
    out, buffer, inner = forward(x, ids, weights, *w, act, keep, config)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    return [out, *backward(up, x, ids, weights, *w, buffer, inner, act, needs, config)]


@pytest.mark.parametrize(("count", "latent"), [*((n, 64) for n in (15, 16, 17, 32, 33, 48, 49, 64, 65, 144, 200)), (49, 24), (130, 24)])
def test_every_class_of_token_tiles(count, latent):
    """One expert with `count` rows, one with a single row, one with none, one after them."""
    ids = torch.tensor([0] * count + [1] + [3] * 5).view(-1, 1)
    arguments = material(ids, 4, latent, 64)
    close(direct(arguments, SMALL), outcome(experts_mlp_reference, arguments, torch.float64))


@pytest.mark.parametrize("act", ["silu", "uncapped", "situ"])
def test_activations_and_caps(act):
    arguments = material(different(30, 2))
    options = {
        "silu": {"activation": "silu"},
        "uncapped": {"beta": 1.5, "linear_beta": None},
        "situ": {"beta": 1.5, "linear_beta": 3.0},
    }[act]
    close(outcome(experts_mlp, arguments, backend="triton", **options), outcome(experts_mlp_reference, arguments, torch.float64, **options))


@pytest.mark.parametrize("size", [1e-4, 100.0])
def test_small_and_saturated_activations(size):
    arguments = material(different(30, 2))
    arguments[0] = arguments[0] * size
    close(outcome(experts_mlp, arguments, backend="triton"), outcome(experts_mlp_reference, arguments, torch.float64), 2e-5)


def test_kept_activations_give_the_gradients_of_recomputed_ones():
    arguments = material(different(18, 3))
    for config in (None, SMALL):
        for a, b in zip(direct(arguments, config), direct(arguments, config, keep=True), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(
        outcome(experts_mlp, arguments, backend="triton"), outcome(experts_mlp, arguments, backend="triton", recompute=False), strict=True
    ):
        assert torch.equal(a, b)


def test_same_bits_on_every_run():
    arguments = material(different(25, 3, skew=1.0))
    for config in (None, SMALL):
        for a, b in zip(direct(arguments, config), direct(arguments, config), strict=True):
            assert torch.equal(a, b)


def test_no_token():
    got = outcome(experts_mlp, material(torch.zeros(0, 4, dtype=torch.int64)), backend="triton")
    assert got[0].shape == got[1].shape == (0, LATENT)
    assert all((g == 0).all() for g in got)


def test_frozen_inputs_get_no_gradient_and_the_others_the_same():
    arguments = material(different(12, 2))
    full = outcome(experts_mlp, arguments, backend="triton")
    for wanted in ((0,), (2,), (3,), (5,), (0, 2, 4)):
        leaves = [a.requires_grad_(i in wanted) if a.is_floating_point() else a for i, a in enumerate(t.clone() for t in arguments)]
        out = experts_mlp(*leaves, backend="triton")
        up = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
        grads = torch.autograd.grad(out, [leaves[i] for i in wanted], up)
        for i, grad in zip(wanted, grads, strict=True):
            assert torch.equal(grad, full[i + 1 if i == 0 else i])


def test_only_visited_experts_weights_are_read():
    arguments = material(different(2, 2))
    expected = outcome(experts_mlp, arguments, backend="triton")
    unvisited = [e for e in range(EXPERTS) if not (arguments[1] == e).any()]
    for w in arguments[3:]:
        w[unvisited] = float("nan")
    for a, b in zip(outcome(experts_mlp, arguments, backend="triton"), expected, strict=True):
        assert torch.equal(a, b)


def test_a_token_does_not_depend_on_other_tokens():
    arguments = material(different(80, 3, skew=0.5))
    out = experts_mlp(*arguments, backend="triton")
    for t in (1, 40, 79):
        changed = list(arguments)
        changed[0] = torch.cat([arguments[0][:t], torch.full_like(arguments[0][t:], float("nan"))])
        later = experts_mlp(*changed, backend="triton")
        assert torch.equal(later[:t], out[:t])
        assert later[t:].isnan().all()


def test_ids_of_no_expert_add_nothing():
    arguments = material(different(40, 3))
    ids = arguments[1].clone()
    ids[::3, 1], ids[5, 0] = EXPERTS, -1
    weights = torch.where((ids >= 0) & (ids < EXPERTS), arguments[2], 0.0)
    dropped = [arguments[0], ids, *arguments[2:]]
    got = outcome(experts_mlp, dropped, backend="triton")
    expected = outcome(experts_mlp_reference, [arguments[0], arguments[1], weights, *arguments[3:]], torch.float64)
    expected[2] = torch.where(weights == 0, 0.0, expected[2])
    close(got, expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("config", [SMALL, choose(512, 64, 64, torch.float32, True)])
def test_the_sort_and_its_tiles(case, config):
    ids = CASES[case].to(DEVICE)
    plan = Plan.read(sort(ids, EXPERTS, config), ids.numel(), EXPERTS)
    flat = ids.reshape(-1)
    assert torch.equal(plan.order.long(), flat.argsort(stable=True))
    counts = torch.bincount(flat, minlength=EXPERTS)
    assert torch.equal(plan.first.long(), torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
    table = plan.table[: tiles(config, ids.numel(), EXPERTS), :6].tolist()
    expected, before = [], 0
    for expert, n in enumerate(counts.tolist()):
        whole, rest = divmod(n, config.full)
        if rest > config.widest:
            whole, rest = whole + 1, 0
        number = whole * config.halves + (rest > 0)
        expected += [[expert, int(plan.first[expert]), n, before, number, whole]] * number
        before += number
    assert table[: len(expected)] == expected
    assert all(row[0] == -1 for row in table[len(expected) :])


def test_settings_hold_every_number_of_tokens():
    for tokens in (0, 1, 31, 32, 33, 100, 129, 5000):
        for dtype in (torch.bfloat16, torch.float32):
            for width in (64, 3072):
                config = choose(tokens, width, width, dtype, True)
                assert all(n & (n - 1) == 0 for n in (*config.first, config.full, config.weights, config.depth))
                assert all(b == 0 or b & (b - 1) == 0 for b in config.second)
                assert list(config.first) == sorted(config.first)
                assert config.full // config.halves >= 32
                assert Plan.size(tokens * 8, 96) >= tokens * 8 + 2 * 97 + 8 * tiles(config, tokens * 8, 96)
    assert choose(8192, 3584, 3072, torch.bfloat16, True) == HOPPER


def test_dispatch_refusals_and_report():
    arguments = material(different(4, 2))
    kernel_report(clear=True)
    experts_mlp(*arguments, backend="triton")
    assert kernel_report(clear=True) == {"experts_mlp triton": 1}
    x, ids, weights = arguments[:3]
    assert "mxfp4" in experts_refusal(x, ids, weights, "mxfp4")
    assert "bfloat16" in experts_refusal(x.double(), ids, weights, "none")
    assert "wider" in experts_refusal(x, ids, weights.double(), "none")
    with pytest.raises(ValueError, match="neither bfloat16 nor float32"):
        experts_mlp(*(a.double() if a.is_floating_point() else a for a in arguments), backend="triton")
    with pytest.raises(ValueError, match="quantization"):
        experts_mlp(*material(different(4, 2), latent=32, inner=32), quantization="mxfp4", backend="triton")
    with pytest.raises(ValueError, match="backend = 'cuda'"):
        experts_mlp(*arguments, backend="cuda")
    with pytest.raises(ValueError, match="not bfloat16"):
        experts_mlp(*arguments, backend="grouped_mm")


def test_grouped_mm_backend():
    arguments = material(different(50, 3, experts=6), latent=32, inner=16)
    narrow = [a.bfloat16() if a.is_floating_point() else a for a in arguments]
    got = outcome(experts_mlp, narrow, torch.bfloat16, backend="grouped_mm")
    close(got, outcome(experts_mlp_reference, narrow, torch.float64), 1.5e-2)


@pytest.mark.parametrize("keep", [False, True])
def test_registration(keep):
    """torch.library's own checks of schema, fake shapes, gradients, and tracing with dynamic shapes."""
    tensors = [a.requires_grad_() if a.is_floating_point() else a for a in material(different(6, 2))]
    torch.library.opcheck(torch.ops.atoll.experts_mlp.default, (*tensors, *SITU, keep))


def test_compiles_without_a_break():
    arguments = [a.requires_grad_() if a.is_floating_point() else a for a in material(different(12, 3))]
    leaves = [a for a in arguments if a.requires_grad]

    def layer(*arguments):
        return experts_mlp(*arguments, backend="triton").square()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), layer(*arguments))
    up = torch.ones(12, LATENT, device=DEVICE)
    for a, b in zip(torch.autograd.grad(compiled(*arguments), leaves, up), torch.autograd.grad(layer(*arguments), leaves, up), strict=True):
        torch.testing.assert_close(a, b)
