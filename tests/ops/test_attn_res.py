from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from atoll.ops.attn_res import attn_res, attn_res_reference, finished_sources, merge_partial

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
        return finished_sources(rows, query[None], weight[None]).of(0).mean()
    return merge_partial(finished_sources(rows[:-1], query[None], weight[None]).of(0), rows[-1], query, weight)


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
    first = finished_sources(sources, queries, weights)
    torch.testing.assert_close(first.mean()[0], attn_res(sources, queries[0], weights[0]), rtol=1e-6, atol=1e-6)
    partial = torch.zeros(2, 7, 16)
    for i in range(1, 6):
        partial = partial + rand(2, 7, 16, seed=20 + i, dtype=torch.float32)
        merged = merge_partial(first.of(i), partial, queries[i], weights[i])
        torch.testing.assert_close(merged, attn_res([*sources, partial], queries[i], weights[i]), rtol=1e-6, atol=1e-6)


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
