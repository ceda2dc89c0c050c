"""Experts and routing on a card: the blueprint's shapes in bfloat16, 64-bit offsets, repeated bits, CUDA graphs.

What the interpreter can hold is in tests/ops/test_experts_triton.py and test_route_triton.py, which run on a card too where there is one.
"""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: no device is visible to torch")

from gpu.card import ratio, room  # noqa: E402

from atoll.ops import QuantileHistogram, experts_mlp, kernel_report, route, situ_glu  # noqa: E402
from atoll.ops.experts.fused import backward, forward  # noqa: E402
from atoll.ops.experts.plan import HOPPER, Plan, choose, sort  # noqa: E402

LIMIT = 1e-2
SITU = ("situ", 4.0, 25.0)


def different(tokens, k, experts, skew=0.0):
    torch.manual_seed(tokens)
    return (torch.rand(tokens, experts, device="cuda") + skew * torch.rand(experts, device="cuda")).topk(k).indices


def material(ids, experts, latent, inner, dtype=torch.bfloat16):
    torch.manual_seed(1)
    card = {"device": "cuda", "dtype": dtype}
    x, weights = torch.randn(ids.shape[0], latent, **card), torch.rand(ids.shape, device="cuda") / ids.shape[1]
    shapes = ((experts, inner, latent), (experts, inner, latent), (experts, latent, inner))
    return [x, ids, weights, *(torch.randn(s, **card).mul_(s[2] ** -0.5) for s in shapes)]


def exact_tokens(arguments, tokens):
    """The op on some tokens in float64, one at a time."""
    x, ids, weights, w1, w3, w2 = arguments
    rows = []
    for t in tokens:
        mine, row = ids[t], x[t].double()
        gate, up = ((w[mine].double() @ row) for w in (w1, w3))
        y = torch.einsum("kli,ki->kl", w2[mine].double(), situ_glu(gate, up))
        rows.append((weights[t].double()[:, None] * y).sum(0))
    return torch.stack(rows)


@room(75)
def test_blueprint_layer_forward_with_64_bit_offsets():
    """8192 tokens, 16 of 896, 3584 by 3072: each of the three weight tensors holds 9.9e9 numbers."""
    arguments = material(different(8192, 16, 896), 896, 3584, 3072)
    kernel_report(clear=True)
    with torch.no_grad():
        out = experts_mlp(*arguments)
        assert kernel_report(clear=True) == {"experts_mlp triton": 1}
        sample = [0, 1, 77, 4000, 8191, *range(500, 520)]
        assert ratio(out[sample], exact_tokens(arguments, sample)) < LIMIT
        assert torch.equal(out, experts_mlp(*arguments))
        for tokens in (1, 8, 64, 300):
            few = [a[:tokens].contiguous() for a in arguments[:3]] + arguments[3:]
            got = experts_mlp(*few)
            assert ratio(got, exact_tokens(few, range(min(tokens, 20)))) < LIMIT if tokens <= 20 else got.isfinite().all()
            assert ratio(got, out[:tokens]) < LIMIT


@room(60)
def test_a_shard_of_the_blueprint_layer_forward_and_backward():
    """112 experts, 1170 rows each: gradients of sampled experts and tokens against float64."""
    ids = different(8192, 16, 112)
    x, _, weights, w1, w3, w2 = arguments = material(ids, 112, 3584, 3072)
    up = torch.randn_like(x)
    out, buffer, inner = forward(x, ids, weights, w1, w3, w2, SITU, False)
    grads = backward(up, x, ids, weights, w1, w3, w2, buffer, inner, SITU, (True, True, True))
    again = backward(up, x, ids, weights, w1, w3, w2, buffer, inner, SITU, (True, True, True))
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    sample = [0, 5, 4000, 8191]
    assert ratio(out[sample], exact_tokens(arguments, sample)) < LIMIT
    for expert in (0, 111):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        leaves = [t.double().requires_grad_() for t in (x[token], weights[token, choice], w1[expert], w3[expert], w2[expert])]
        rows, mixture, v1, v3, v2 = leaves
        y = situ_glu(rows @ v1.T, rows @ v3.T) @ v2.T * mixture[:, None]
        _, d_mixture, *dw = torch.autograd.grad(y, leaves, up[token].double())
        assert ratio(grads[1][token, choice], d_mixture) < LIMIT
        for ours, theirs in zip(grads[2:], dw, strict=True):
            assert ratio(ours[expert], theirs) < LIMIT
    row = x[sample].double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for i, t in enumerate(sample):
        mine = ids[t]
        hidden = situ_glu(w1[mine].double() @ row[i], w3[mine].double() @ row[i])
        y = torch.einsum("kli,ki->kl", w2[mine].double(), hidden)
        total = total + ((weights[t].double()[:, None] * y).sum(0) * up[t].double()).sum()
    assert ratio(grads[0][sample], torch.autograd.grad(total, row)[0]) < LIMIT


@pytest.mark.parametrize("shape", [(512, 512), (592, 528), (600, 520), (192, 160)])
def test_every_class_of_the_chosen_settings(shape):
    """Experts with as many rows as each class holds, one more and one less; kept and recomputed activations; empty experts."""
    config = choose(8192, *shape, torch.bfloat16, True)
    widths = [a + b for a, b in zip(config.first, config.second, strict=True)] + [config.full]
    rows = [0, 1, *(w + d for w in widths for d in (-1, 0, 1)), 0, 3 * config.full + 7, 0]
    ids = torch.tensor([e for e, n in enumerate(rows) for _ in range(n)], device="cuda")[:, None]
    ids = ids[torch.randperm(ids.shape[0], device="cuda")]
    x, _, weights, *w = arguments = material(ids, len(rows), *shape)
    up = torch.randn_like(x)
    wide = [a.double().requires_grad_() if a.is_floating_point() else a for a in arguments]
    exact = experts_mlp(*wide, backend="torch")
    expected = [exact, *torch.autograd.grad(exact, [a for a in wide if a.requires_grad], up.double())]
    for keep in (False, True):
        out, buffer, inner = forward(x, ids, weights, *w, SITU, keep, config)
        got = [out, *backward(up, x, ids, weights, *w, buffer, inner, SITU, (True, True, True), config)]
        for a, b in zip(got, expected, strict=True):
            assert ratio(a, b) < LIMIT
        for grad in got[3:]:
            assert not grad[[0, len(rows) - 1, len(rows) - 3]].any()


def test_autograd_compile_and_a_graph():
    arguments = [a.requires_grad_() if a.is_floating_point() else a for a in material(different(700, 4, 24, 1.0), 24, 512, 768)]
    leaves = [a for a in arguments if a.requires_grad]
    up = torch.randn_like(arguments[0])
    eager = torch.autograd.grad(experts_mlp(*arguments), leaves, up)
    compiled = torch.compile(experts_mlp, fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(*arguments), leaves, up), eager, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        out = experts_mlp(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = experts_mlp(*arguments)
        graph.replay()
    assert torch.equal(captured, out)


def test_sort_of_a_whole_batch():
    ids = different(8192, 16, 896, 0.3)
    plan = Plan.read(sort(ids, 896, HOPPER), ids.numel(), 896)
    assert torch.equal(plan.order.long(), ids.reshape(-1).argsort(stable=True))


@pytest.mark.parametrize("levels", [300, 2**24])
def test_routing_of_896_and_its_counts(levels):
    torch.manual_seed(0)
    scores, bias = torch.randint(0, levels, (8192, 896), device="cuda") / levels, torch.randn(896, device="cuda") / 8
    mask = torch.rand(8192, device="cuda") < 0.7
    results = []
    for backend in ("triton", "triton", "torch"):
        histogram = QuantileHistogram(896, device="cuda")
        histogram.set_range(bias)
        load = torch.zeros(896, dtype=torch.int64, device="cuda")
        ids, weights, cutoff = route(scores, bias, 16, histogram=histogram, load=load, mask=mask, backend=backend)
        results.append((ids, cutoff, histogram.counts, load, weights))
    for other in results[1:]:
        for a, b in zip(results[0][:4], other[:4], strict=True):
            assert torch.equal(a, b)
        torch.testing.assert_close(results[0][4], other[4], rtol=1e-6, atol=0)
