from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from atoll.ops.attn_res import attn_res, attn_res_reference, attn_res_sum, open_block, two_phase_pays

GOLDEN = Path(__file__).parents[1] / "golden" / "attn_res"


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", ["mix_r1", "mix_r2", "mix_r5", "mix_r9"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_golden_mix_and_gradients(name, dtype, error):
    golden = load_file(GOLDEN / f"{name}.safetensors")
    rows = [r.to(dtype).requires_grad_() for r in golden["rows"]]
    query, weight = golden["query"].to(dtype).requires_grad_(), golden["norm_weight"].to(dtype).requires_grad_()
    out, p = attn_res(rows, query, weight, 1e-5, return_weights=True)
    assert p.shape == golden["probs"].shape
    grads = torch.autograd.grad(out, [query, weight, *rows], golden["dout"].to(dtype))
    expected = [golden["out"], golden["probs"], golden["dquery"], golden["dnorm_weight"], *golden["drows"]]
    for ours, true in zip([out, p, *grads], expected, strict=True):
        # a zero row's gradient is divided by sqrt(eps): compare against the size of the largest
        torch.testing.assert_close(ours.double(), true.double(), rtol=error, atol=error * max(1.0, float(true.abs().max())))


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def ten_layers(t, block, eps, mix):
    """The golden schedule: layer l with l % block = 0 closes the running sum after its attention's mix is formed."""
    bank, prefix, trace = [], t["embedding"], {"attn_in": [], "mlp_in": [], "rows_attn": [], "rows_mlp": [], "prefix_after_layer": []}
    for l in range(10):
        h = mix([*bank, prefix], t["self_attention_res_proj"][l], t["self_attention_res_norm"][l]) if bank else prefix
        trace["attn_in"].append(h)
        trace["rows_attn"].append(len(bank) + 1)
        starts = l % block == 0
        if starts:
            bank.append(prefix)
        a = torch.tanh(rms(h, t["input_layernorm"][l], eps) @ t["w_attn"][l].T)
        prefix = a if starts else prefix + a
        m = mix([*bank, prefix], t["mlp_res_proj"][l], t["mlp_res_norm"][l])
        trace["mlp_in"].append(m)
        trace["rows_mlp"].append(len(bank) + 1)
        prefix = prefix + torch.tanh(rms(m, t["post_attention_layernorm"][l], eps) @ t["w_mlp"][l].T)
        trace["prefix_after_layer"].append(prefix)
    mixed = mix([*bank, prefix], t["output_attn_res_proj"], t["output_attn_res_norm"])
    trace["bank"], trace["output_mix"] = bank, mixed
    return rms(mixed, t["norm"], eps), trace


def two_phase_mix(rows, query, weight):
    """One query through both phases; with one row only, phase one alone."""
    if len(rows) == 1:
        return open_block(rows, [query], [weight]).mix(0)[0]
    return open_block(rows[:-1], [query], [weight]).mix(0, rows[-1])[0]


@pytest.mark.parametrize("name", ["schedule_bs3", "schedule_bs4"])
@pytest.mark.parametrize("mix", [attn_res, two_phase_mix])
def test_golden_schedule_of_ten_layers(name, mix):
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        block, eps = int(file.metadata()["block_size"]), float(file.metadata()["eps"])
    golden = load_file(GOLDEN / f"{name}.safetensors")
    inputs = {k[2:]: golden[k[2:]].double().requires_grad_() for k in golden if k.startswith("d.")}
    out, trace = ten_layers(inputs, block, eps, mix)
    torch.testing.assert_close(out, golden["out"], rtol=0, atol=1e-10)
    for key, value in trace.items():
        value = torch.tensor(value) if key.startswith("rows") else torch.stack(list(value))
        torch.testing.assert_close(value, golden[f"trace.{key}"], rtol=0, atol=1e-10)
    grads = torch.autograd.grad(out, list(inputs.values()), golden["dout"].double(), allow_unused=True)
    for key, grad in zip(inputs, grads, strict=True):
        grad = torch.zeros_like(inputs[key]) if grad is None else grad
        torch.testing.assert_close(grad.float(), golden[f"d.{key}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (2, 5, 8)])
def test_equals_the_formula_and_gradcheck(shape):
    sources = [rand(*shape, 6, seed=s).requires_grad_() for s in range(3)]
    query, weight = rand(6, seed=8).requires_grad_(), rand(6, seed=9).requires_grad_()
    torch.testing.assert_close(attn_res(sources, query, weight), attn_res_reference(sources, query, weight), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda q, w, *s: attn_res(s, q, w), (query, weight, *sources))


def test_zero_query_is_the_average_and_its_gradient_is_not_zero():
    sources = [rand(4, 8, seed=s, dtype=torch.float32) for s in range(5)]
    query = torch.zeros(8, requires_grad=True)
    out, p = attn_res(sources, query, torch.ones(8), return_weights=True)
    torch.testing.assert_close(out, torch.stack(sources).mean(0))
    assert (p == 0.2).all()
    out.square().sum().backward()
    assert query.grad is not None
    assert (query.grad != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_in_float32_and_returns_the_sources_dtype(dtype):
    sources = [rand(50, 16, seed=s, dtype=dtype) for s in range(4)]
    query, weight = rand(16, seed=8, dtype=torch.float32), rand(16, seed=9, dtype=torch.float32)
    out = attn_res(sources, query, weight)
    assert out.dtype == dtype
    exact = attn_res_reference([s.double() for s in sources], query, weight)
    assert (out.double() - exact).abs().max() < {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]


def test_two_phases_of_a_whole_block_equal_one_pass():
    sources = [rand(2, 7, 16, seed=s, dtype=torch.float32) * 10 ** (s - 1.0) for s in range(3)]
    queries, weights = rand(6, 16, seed=8, dtype=torch.float32), rand(6, 16, seed=9, dtype=torch.float32)
    block = open_block(sources, queries.unbind(), weights.unbind())
    first, none = block.mix(0)
    assert none is None
    torch.testing.assert_close(first, attn_res(sources, queries[0], weights[0]), rtol=1e-6, atol=1e-6)
    partial = torch.zeros(2, 7, 16)
    for i in range(1, 6):
        step = rand(2, 7, 16, seed=20 + i, dtype=torch.float32)
        merged, total = block.mix(i, partial, delta=step)
        partial = partial + step
        assert torch.equal(total, partial)
        torch.testing.assert_close(merged, attn_res([*sources, partial], queries[i], weights[i]), rtol=1e-6, atol=1e-6)


def run_block(block, prefix, steps, out_norm):
    """Mixes of a whole block, each step added to the running sum, every second mix normed."""
    outs = []
    for i, step in enumerate([None, *steps]):
        out, prefix = block.mix(i, prefix if i else None, delta=step if i > 1 else None, out_norm=out_norm if i % 2 else None)
        prefix = steps[0] if i == 0 else prefix
        outs.append(out)
    return torch.stack(outs)


@pytest.mark.parametrize("closed", [False, True])
def test_gradcheck_of_a_block(closed):
    """Also with the means gone before the gradients come, and a query and a step that two mixes share."""
    sources = [rand(4, 6, seed=s).requires_grad_() for s in range(3)]
    queries, weights = ([rand(6, seed=s + k).requires_grad_() for s in range(4)] for k in (10, 20))
    steps, out_norm = [rand(4, 6, seed=30 + s).requires_grad_() for s in range(3)], rand(6, seed=40).requires_grad_()

    def mixes(*leaves):
        block = open_block(leaves[:3], leaves[3:7], leaves[7:11])
        outs = run_block(block, None, leaves[11:14], leaves[14])
        again = block.mix(1, leaves[11])[0]
        if closed:
            block.close()
        return outs, again

    assert torch.autograd.gradcheck(mixes, (*sources, *queries, *weights, *steps, out_norm))


def test_means_live_while_the_block_runs_and_while_its_gradients_are_made():
    sources = [rand(4, 6, seed=s).requires_grad_() for s in range(3)]
    queries, weights = ([rand(6, seed=s + k) for s in range(3)] for k in (10, 20))
    block = open_block(sources, queries, weights)
    out = sum(block.mix(i, rand(4, 6, seed=30))[0].sum() for i in range(3))
    block.close()
    assert block.means is None
    assert block.phase.held is None
    made = []
    compute = block.phase.compute
    block.phase.compute = lambda: made.append(1) or compute()
    out.backward()
    assert len(made) == 1
    assert block.phase.held is None


@pytest.mark.parametrize("parts", [("delta",), ("out_norm",), ("delta", "out_norm")])
def test_gradcheck_of_what_is_fused(parts):
    sources = [rand(5, 6, seed=s).requires_grad_() for s in range(3)]
    vectors = [rand(6, seed=s).requires_grad_() for s in (8, 9, 10)]
    delta = rand(5, 6, seed=11).requires_grad_()

    def fused(query, weight, out_norm, delta, *sources):
        given = {name: {"delta": delta, "out_norm": out_norm}[name] for name in parts}
        return attn_res_sum(sources, query, weight, **given)

    def apart(query, weight, out_norm, delta, *sources):
        last = sources[-1] + delta if "delta" in parts else sources[-1]
        out = attn_res_reference([*sources[:-1], last], query, weight)
        return rms(out, out_norm, 1e-5) if "out_norm" in parts else out, last

    for a, b in zip(fused(*vectors, delta, *sources), apart(*vectors, delta, *sources), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(fused, (*vectors, delta, *sources))


@pytest.mark.parametrize("sources", [1, 2, 64])
@pytest.mark.parametrize("kind", ["norms from 1e-4 to 1e4", "identical", "zero query", "a zero source"])
def test_hard_sources(kind, sources):
    """Values and gradients, by the formula in float64."""
    rows = [rand(7, 12, seed=s) for s in range(sources)]
    query = rand(12, seed=90) * 0.3
    if kind == "norms from 1e-4 to 1e4":
        rows = [r * 10 ** (8 * i / max(1, sources - 1) - 4.0) for i, r in enumerate(rows)]
    if kind == "identical":
        rows = [rows[0].clone() for _ in rows]
    if kind == "a zero source":
        rows[0] = torch.zeros_like(rows[0])
    query = query * 0 if kind == "zero query" else query
    leaves = [t.requires_grad_() for t in (query, rand(12, seed=91), *rows)]
    up = rand(7, 12, seed=92)
    outcomes = []
    for f in (attn_res_reference, attn_res, lambda s, q, w: two_phase_mix(s, q, w)):
        out = f(leaves[2:], *leaves[:2])
        outcomes.append([out, *torch.autograd.grad(out, leaves, up)])
    for other in outcomes[1:]:
        for a, b in zip(other, outcomes[0], strict=True):
            assert torch.isfinite(a).all()
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12 * max(1.0, float(b.detach().abs().max())))


def test_two_phases_pay_by_bytes():
    """A block of the blueprint, 24 queries: from three finished sources on, five with float32 means; never for one query alone."""
    for training in (False, True):
        assert not two_phase_pays(1, 24, 2, 2, training=training)
        assert two_phase_pays(3, 24, 2, 2, training=training)
        assert not any(two_phase_pays(r, 1, 2, 2, training=training) for r in range(1, 10))
    assert [r for r in range(1, 9) if not two_phase_pays(r, 24, 2, 4, training=False)] == [1, 2, 3, 4]


def test_no_tokens():
    sources, vectors = [torch.zeros(0, 8, requires_grad=True) for _ in range(3)], [rand(8, seed=s, dtype=torch.float32) for s in (1, 2)]
    query, weight = (v.requires_grad_() for v in vectors)
    for out in (attn_res(sources, query, weight), two_phase_mix(sources, query, weight)):
        grads = torch.autograd.grad(out.sum(), [query, *sources])
        assert out.shape == (0, 8)
        assert not grads[0].any()


def test_bitwise_causal():
    sources = [rand(1, 301, 128, seed=s, dtype=torch.float32) for s in range(4)]
    query, weight = rand(128, seed=8, dtype=torch.float32), rand(128, seed=9, dtype=torch.float32)
    out = attn_res(sources, query, weight)
    for t in (1, 63, 300):
        changed = [torch.cat([s[:, :t], 3 * s[:, t:] + 1], 1) for s in sources]
        later = attn_res(changed, query, weight)
        assert torch.equal(later[:, :t], out[:, :t])
        assert not torch.equal(later[:, t:], out[:, t:])


def test_same_bits_on_every_run_on_two_threads():
    sources = [rand(4000, 64, seed=s, dtype=torch.float32).requires_grad_() for s in range(4)]
    query, weight = (rand(64, seed=s, dtype=torch.float32).requires_grad_() for s in (8, 9))

    def outcome():
        out = attn_res(sources, query, weight)
        return [out, *torch.autograd.grad(out.square().sum(), [query, weight, *sources])]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = outcome()
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(outcome(), first, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_refuses_what_does_not_fit():
    x, v = torch.zeros(3, 4), torch.zeros(4)
    for sources, query, weight in (([], v, v), ([x, x[:2]], v, v), ([x, x.double()], v, v), ([x], v[:3], v[:3]), ([x], v, v[:3])):
        with pytest.raises(ValueError, match="must"):
            attn_res(sources, query, weight)
        with pytest.raises(ValueError, match="must"):
            open_block(sources, [query], [weight])
    with pytest.raises(ValueError, match="must"):
        attn_res_sum([x], v, v, delta=x[:2])
    with pytest.raises(ValueError, match="must"):
        attn_res([x], v, v, out_norm=v[:3])
    with pytest.raises(ValueError, match="as many"):
        open_block([x], [v, v], [v])
    with pytest.raises(ValueError, match="must"):
        open_block([x], [v], [v]).mix(0, x[:2])
