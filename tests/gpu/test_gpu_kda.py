"""KDA's kernels on a card: RMS limits against float64, causality and packing to the bit, 64-bit offsets, graphs, compiled code.

What the interpreter can hold is in tests/ops/test_kda_*.py, which run on a card too where there is one.
"""

import itertools

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: no device is visible to torch")

from gpu.card import ratio, room  # noqa: E402

from atoll.ops import kernel_report, strict  # noqa: E402
from atoll.ops.kda import kda  # noqa: E402
from atoll.ops.kda.chunk import kda_chunk  # noqa: E402
from atoll.ops.kda.triton_path import kda_triton  # noqa: E402

NAMES = ("o", "final", "q", "k", "v", "g", "beta", "A_log", "dt_bias", "state")
LIMITS = {
    torch.bfloat16: dict(zip(NAMES, (0.005, 0.005, 0.008, 0.008, 0.008, 0.02, 0.02, 0.02, 0.02, 0.008), strict=True)),
    torch.float32: dict.fromkeys(NAMES, 2e-5),
}
BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
PACKED = [0, 1, 1, 18, 85, 300, 364, 500]


def inputs(shape, dtype, regime="random", documents=0, seed=1):
    """q, k, v, g, beta, A_log, dt_bias and, for `documents`, the initial states."""
    torch.manual_seed(seed)
    batch, length, heads, width, value = shape
    q, k, v, g = (torch.randn(batch, length, heads, d, device="cuda") for d in (width, width, value, width))
    beta = torch.randn(batch, length, heads, device="cuda")
    if regime in ("open", "shut", "saturated"):
        g = {"open": torch.full_like(g, 50.0), "shut": torch.full_like(g, -50.0), "saturated": g.sign() * 50}[regime]
    if regime in ("identical", "correlated"):
        k = torch.ones_like(k) + (0.3 * k if regime == "correlated" else 0)
        g, beta = g - 4.0, beta + 1.0
    if regime == "near zero":
        q, k = q * 1e-3, k * 1e-3
    rest = [0.3 * torch.randn(heads, device="cuda"), torch.randn(heads, width, device="cuda") - 1.0]
    states = [torch.randn(documents, heads, width, value, device="cuda")] if documents else []
    return [*(x.to(dtype) for x in (q, k, v, g, beta)), *rest, *states]


def run(function, tensors, edges=None, dtype=None, **options):
    """Outputs, final states and all gradients, by name; arithmetic in `dtype` when given."""
    leaves = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in tensors]
    state = leaves[7] if len(leaves) > 7 else None
    o, final = function(*leaves[:7], -5.0, leaves[0].shape[-1] ** -0.5, state, edges, **options)
    torch.manual_seed(2)
    ups = [torch.randn(x.shape, device="cuda").bfloat16().to(x) for x in (o, final)]
    grads = torch.autograd.grad((o, final), leaves, ups)
    return dict(zip(NAMES, (o.detach(), final.detach(), *grads), strict=False))


def check(got, expected, dtype):
    """A gradient that saturated gates make all but vanish is measured against that of q."""
    size = expected["q"].square().mean().sqrt()
    for name, value in expected.items():
        wrong = ratio(got[name], value)
        if name in ("g", "A_log", "dt_bias") and value.square().mean().sqrt() < 1e-3 * size:
            wrong = float((got[name].double() - value).square().mean().sqrt() / size)
        assert wrong <= LIMITS[dtype][name], f"{name} is off by {wrong:.1e}"


def same(a, b, but=()):
    for name in a:
        assert name in but or torch.equal(a[name], b[name]), name


@BOTH
@pytest.mark.parametrize("regime", ["random", "open", "shut", "saturated", "identical", "correlated", "near zero"])
def test_against_float64(regime, dtype):
    tensors = inputs((1, 500, 3, 128, 128), dtype, regime, len(PACKED) - 1)
    got = run(kda_triton, tensors, PACKED)
    check(got, run(kda_chunk, tensors, PACKED, torch.float64), dtype)
    same(got, run(kda_triton, tensors, PACKED))


@BOTH
@pytest.mark.parametrize(("width", "value"), [(32, 32), (64, 64), (32, 128), (128, 64), (256, 256), (256, 64), (64, 256)])
def test_every_setting(width, value, dtype):
    tensors = inputs((2, 300, 5, width, value), dtype, documents=2)
    got = run(kda_triton, tensors)
    check(got, run(kda_chunk, tensors, None, torch.float64), dtype)
    same(got, run(kda_triton, tensors))


@BOTH
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_segments(where, width, dtype):
    """Two heads: documents of 5000 and 1499 tokens are cut, one of a single token and one of none are not."""
    edges = [0, 5000, 5001, 5001, 6500]
    tensors = inputs((1, 6500, 2, width, width), dtype, documents=4)
    got = run(kda_triton, tensors, torch.tensor(edges, device=where))
    check(got, run(kda_chunk, tensors, edges, torch.float64), dtype)
    same(got, run(kda_triton, tensors, torch.tensor(edges, device=where)))
    same(got, run(kda_triton, tensors, edges), but=("A_log", "dt_bias"))  # sums over more slots where the host does not know how many


@room(60)
@BOTH
@pytest.mark.parametrize("regime", ["random", "correlated"])
def test_64k_tokens_against_a_reference_in_pieces(regime, dtype):
    """The reference hands its float64 state from piece to piece, backward too."""
    tensors = inputs((1, 65536, 4, 128, 128), dtype, regime, 1)

    def pieces(q, k, v, g, beta, A_log, bias, bound, scale, state, edges):
        outs = []
        for a in range(0, 65536, 4096):
            part = [x[:, a : a + 4096] for x in (q, k, v, g, beta)]
            o, state = kda_chunk(*part, A_log, bias, bound, scale, state, None)
            outs.append(o)
        return torch.cat(outs, 1), state

    check(run(kda_triton, tensors), run(pieces, tensors, None, torch.float64), dtype)


@room(112)
def test_beyond_32_bit_offsets():
    """More than 174,762 tokens of 96 heads: documents across the whole range equal themselves alone, gradients too."""
    edges = [0, 90000, 90200, 176000, 176100, 179990, 180000]
    tensors = inputs((1, edges[-1], 96, 128, 128), torch.bfloat16)
    leaves = [x.requires_grad_() for x in tensors]
    o, _ = kda_triton(*leaves, -5.0, 0.1, None, edges, False)
    grads = torch.autograd.grad(o, leaves, torch.ones_like(o))
    for a, b in ((90000, 90200), (176000, 176100), (179990, 180000)):
        part = [x[:, a:b].detach().contiguous().requires_grad_() if x.dim() > 2 else x for x in leaves]
        alone, _ = kda_triton(*part, -5.0, 0.1, None, None, False)
        assert torch.equal(o[:, a:b], alone)
        for x, y in zip(grads[:5], torch.autograd.grad(alone, part[:5], torch.ones_like(alone)), strict=True):
            assert torch.equal(x[:, a:b], y)


def test_more_documents_than_a_grid_is_high():
    edges = torch.arange(70001, device="cuda")
    tensors = inputs((1, 70000, 1, 32, 32), torch.float32)
    got = run(kda_triton, tensors, edges)
    rows = [x[0, :, None] if x.dim() > 2 else x for x in tensors]  # each token a row of its own
    expected = run(kda_chunk, rows, None, torch.float64)
    assert ratio(got["o"][0], expected["o"][:, 0]) < 2e-5
    assert ratio(got["final"], expected["final"]) < 2e-5


@BOTH
@pytest.mark.parametrize("heads", [4, 96])
def test_causal_to_the_bit(heads, dtype):
    """Outputs before the cut, and gradients of a loss on them, whatever comes after it."""
    first, second = inputs((1, 200, heads, 128, 128), dtype), inputs((1, 200, heads, 128, 128), dtype, "saturated", seed=7)

    def prefix(tensors, cut):
        leaves = [x.detach().requires_grad_() for x in tensors]
        o = kda_triton(*leaves, -5.0, 0.1, None, None, False)[0][:, :cut]
        return o.detach(), torch.autograd.grad(o.float().square().sum(), leaves[:5])

    for cut in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 199):
        mixed = [torch.cat((x[:, :cut], y[:, cut:]), 1) if x.dim() > 2 else x for x, y in zip(first, second, strict=True)]
        (o, grads), (other, others) = prefix(first, cut), prefix(mixed, cut)
        assert torch.equal(o, other)
        for x, y in zip(grads, others, strict=True):
            assert torch.equal(x[:, :cut], y[:, :cut])
            assert not y[:, cut:].any()


@BOTH
@pytest.mark.parametrize("segment", [0, 1, None])
def test_packed_equals_separate_to_the_bit(segment, dtype):
    """Within a class: the same settings and cuts. None is the rule, which cuts no document of this size."""
    edges = [0, 250, 250, 390, 400]
    tensors = inputs((1, 400, 4, 128, 128), dtype, documents=4)

    def values(tensors, edges):
        leaves = [x.detach().requires_grad_() for x in tensors]
        o, final = kda_triton(*leaves[:7], -5.0, 0.1, leaves[7], edges, segment=segment)
        return o, final, *torch.autograd.grad(o.float().square().sum() + final.sum(), [*leaves[:5], leaves[7]])

    for packed in (values(tensors, edges), values(tensors, torch.tensor(edges, device="cuda"))):
        for n, (a, b) in enumerate(itertools.pairwise(edges)):
            if a == b:
                assert torch.equal(packed[1][n], tensors[7][n])
                continue
            part = [x[:, a:b] if x.dim() > 2 else x for x in tensors[:7]]
            alone = values([*part, tensors[7][n : n + 1]], None)
            for i in (0, 2, 3, 4, 5, 6):
                assert torch.equal(packed[i][:, a:b], alone[i])
            assert torch.equal(packed[1][n], alone[1][0])
            assert torch.equal(packed[7][n], alone[7][0])


@BOTH
@pytest.mark.parametrize("segment", [0, 1])
def test_nan_stays_in_its_document(segment, dtype):
    edges = [0, 100, 400, 400, 500]
    tensors = inputs((1, 500, 4, 128, 128), dtype, documents=4)
    clean = run(kda_triton, tensors, edges, segment=segment)
    for i in range(5):
        dirty = [x.clone() for x in tensors]
        dirty[i][:, 250] = float("nan")
        got = run(kda_triton, dirty, edges, segment=segment)
        assert got["o"][:, 250:400].isnan().any()
        for name in ("o", "q", "k", "v", "g", "beta"):
            assert torch.equal(got[name][:, :100], clean[name][:, :100])
            assert torch.equal(got[name][:, 400:], clean[name][:, 400:])
        for name in ("final", "state"):
            assert torch.equal(got[name][[0, 2, 3]], clean[name][[0, 2, 3]])


@BOTH
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4])
def test_finite_for_any_finite_input(size, dtype):
    for regime in ("open", "shut", "saturated"):
        tensors = inputs((1, 300, 3, 128, 128), dtype, regime)
        tensors = [x * size if i in (0, 1, 2, 4) else x * 1e4 if i == 3 else x for i, x in enumerate(tensors)]
        for name, value in run(kda_triton, tensors).items():
            assert value.isfinite().all(), name


def test_many_launches_give_the_same_bits():
    tensors = inputs((1, 3000, 24, 128, 128), torch.bfloat16, documents=3)
    edges = torch.tensor([0, 1000, 1900, 3000], device="cuda")
    first = run(kda_triton, tensors, edges)
    for _ in range(20):
        same(first, run(kda_triton, tensors, edges))


@pytest.mark.parametrize("heads", [3, 96])
def test_boundaries_on_the_device_are_never_waited_for_and_follow_in_a_graph(heads):
    tensors = inputs((1, 6000, heads, 128, 128), torch.bfloat16, documents=3)
    leaves = [x.requires_grad_() for x in tensors]
    edges, up = torch.tensor([0, 1000, 1000, 6000], device="cuda"), torch.randn_like(tensors[2])

    def step():
        o, final = kda_triton(*leaves[:7], -5.0, 0.1, leaves[7], edges)
        return o.detach(), final.detach(), *torch.autograd.grad((o, final), leaves, (up, torch.ones_like(final)))

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for cuts in ([0, 1000, 1000, 6000], [0, 0, 5999, 6000], [0, 63, 128, 6000], [0, 6000, 6000, 6000]):
        edges.copy_(torch.tensor(cuts))
        graph.replay()
        for a, b in zip(found, step(), strict=True):
            assert torch.equal(a, b)


def test_rows_in_a_graph_outlive_the_cache_of_tables():
    tensors = inputs((2, 700, 4, 64, 64), torch.bfloat16)
    with torch.no_grad():
        expected = kda_triton(*tensors, -5.0, 0.1, None, None)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = kda_triton(*tensors, -5.0, 0.1, None, None)
        for length in range(100, 120):  # more shapes than the cache holds
            part = [x[:, :length] if x.dim() > 2 else x for x in tensors]
            kda_triton(*part, -5.0, 0.1, None, None)
        held = [torch.full((1024,), -1, device="cuda", dtype=torch.int32) for _ in range(4096)]  # into the memory of dropped tables
        graph.replay()
        del held
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("where", [None, "cpu", "cuda"])
def test_one_compiled_graph_with_gradients(where):
    tensors = inputs((1, 300, 4, 64, 64), torch.float32, documents=1 if where is None else 3)
    edges = None if where is None else torch.tensor([0, 100, 100, 300], device=where)

    def layer(edges, *leaves):
        o, final = kda(*leaves[:7], initial_state=leaves[7], output_final_state=True, cu_seqlens=edges)
        return o.square().sum() + final.square().sum()

    leaves = [x.requires_grad_() for x in tensors]
    compiled = torch.compile(layer, fullgraph=True)
    for a, b in zip(*(torch.autograd.grad(f(edges, *leaves), leaves) for f in (compiled, layer)), strict=True):
        assert ratio(a, b) < 1e-5


def test_registrations_pass_the_checks_of_torch_library():
    tensors = [x.requires_grad_() for x in inputs((1, 100, 2, 32, 32), torch.float32, documents=3)]
    for where in ("cpu", "cuda"):
        edges = torch.tensor([0, 60, 60, 100], device=where)
        torch.library.opcheck(torch.ops.atoll.kda.default, (*tensors[:7], tensors[7], edges, -5.0, 0.3, True, None, None))


def test_what_the_kernels_refuse_is_reported_or_raised():
    tensors = [x.bfloat16() for x in inputs((1, 40, 2, 64, 64), torch.float32)]
    kernel_report(clear=True)
    kda(*tensors)
    kda(*tensors, lower_bound=None)
    assert kernel_report() == {"triton": 1, "chunk (lower_bound = None is outside [-5.5, 0))": 1}
    with strict():
        kda(*tensors)
        with pytest.raises(ValueError, match="lower_bound = None"):
            kda(*tensors, lower_bound=None)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_fla_agrees(bound):
    pytest.importorskip("fla.ops.kda", reason="fla-core is not installed: pip install 'atoll[fla]'")
    tensors = inputs((1, 500, 4, 128, 128), torch.bfloat16, documents=3)
    edges = torch.tensor([0, 200, 201, 500], device="cuda")

    def path(backend, dtype=None):
        leaves = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in tensors]
        options = {"initial_state": leaves[7], "output_final_state": True, "cu_seqlens": edges}
        o, final = kda(*leaves[:7], lower_bound=bound, backend=backend, **options)
        return dict(zip(NAMES, (o, final, *torch.autograd.grad(o.double().square().sum() + final.sum(), leaves)), strict=True))

    check(path("fla"), path("chunk", torch.float64), torch.bfloat16)
