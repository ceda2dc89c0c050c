"""KDA, chunked and token by token: golden vectors, equality in float64, causality to the bit, states, packing, refusals."""

import importlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from atoll.ops.kda import kda, kernel_report, log_decay
from atoll.ops.kda.chunk import kda_chunk
from atoll.ops.kda.chunk_forward import tile_inverse

GOLDEN = Path(__file__).parents[1] / "golden" / "kda"
CASES = sorted(p.stem for p in GOLDEN.glob("*.safetensors") if p.stem[:3] in ("lb_", "sp_"))
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def read(name):
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        meta = file.metadata()
        data = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    heads = data["A_log"].shape[0]
    for key in ("dt_bias", "ddt_bias"):
        if key in data:
            data[key] = data[key].view(heads, -1)
    return data, None if meta["gate"] == "softplus" else float(meta["lower_bound"])


def relative(a, b):
    return (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)


@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("name", CASES)
def test_golden(name, dtype, backend):
    data, bound = read(name)
    inputs = {key: data[key].to(dtype).requires_grad_() for key in INPUTS if key in data}
    o, final = kda(**inputs, lower_bound=bound, output_final_state=True, cu_seqlens=data.get("cu_seqlens"), backend=backend)
    limit = 1e-5 if dtype == torch.float32 else 2e-7  # most outputs are stored in float32
    assert relative(o, data["o"]) < limit
    assert relative(final, data["final_state"]) < limit
    if "do" not in data:
        return
    loss = (o * data["do"].to(dtype)).sum()
    if "dht" in data:
        loss = loss + (final * data["dht"].to(dtype)).sum()
    gradients = torch.autograd.grad(loss, list(inputs.values()))
    for key, gradient in zip(inputs, gradients, strict=True):
        expected = data[f"d{key}"]
        close = relative(gradient, expected) < 2 * limit
        assert close or (gradient.double() - expected.double()).abs().max() < 1e-5 * limit / 1e-5, key


def test_golden_gate():
    with safe_open(GOLDEN / "gate_vectors.safetensors", "pt") as file:
        data = {key: file.get_tensor(key).double() for key in file.keys()}  # noqa: SIM118
    heads = data["g"].shape[1]
    for kind, bound in (("lower_bound", -5.0), ("softplus", None)):
        inputs = [data["g"], data["A_log"], data["dt_bias"].view(heads, -1)]
        inputs = [x.clone().requires_grad_() for x in inputs]
        y = log_decay(*inputs, bound)
        torch.testing.assert_close(y, data[f"{kind}.y"], rtol=1e-12, atol=1e-14)
        gradients = torch.autograd.grad(y, inputs, data["dy"])
        for key, gradient in zip(("dg", "dA_log", "ddt_bias"), gradients, strict=True):
            torch.testing.assert_close(gradient, data[f"{kind}.{key}"].view_as(gradient), rtol=1e-10, atol=1e-12)


def random_inputs(batch, length, heads=2, width=8, value=12, dtype=torch.float64, gates="random", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    shape = (batch, length, heads)
    gate = normal(*shape, width)
    if gates == "high":
        gate = torch.full_like(gate, 50.0)
    elif gates == "low":
        gate = torch.full_like(gate, -50.0)
    elif gates == "mixed":
        gate = gate.sign() * 50
    return {
        "q": normal(*shape, width), "k": normal(*shape, width), "v": normal(*shape, value), "g": gate, "beta": 2 * normal(*shape),
        "A_log": 0.3 * normal(heads), "dt_bias": normal(heads, width),
    }  # fmt: skip


def outputs_and_gradients(inputs, edges=None, state=None, run=kda, bound=-5.0, **options):
    inputs = {key: value.clone().requires_grad_() for key, value in inputs.items()}
    if state is not None:
        inputs["initial_state"] = state.clone().requires_grad_()
    cu = None if edges is None else torch.tensor(edges)
    o, final = run(**inputs, lower_bound=bound, output_final_state=True, cu_seqlens=cu, **options)
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (o, final)]
    loss = (o * weights[0]).sum() + (final * weights[1]).sum()
    return [o.detach(), final.detach(), *torch.autograd.grad(loss, list(inputs.values()))]


def assert_equal_paths(inputs, edges=None, state=None, bound=-5.0):
    expected = outputs_and_gradients(inputs, edges, state, backend="recurrent", bound=bound)
    got = outputs_and_gradients(inputs, edges, state, backend="chunk", bound=bound)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 200])
def test_chunk_equals_recurrence(length):
    gates = ("random", "high", "low", "mixed")[length % 4]
    inputs = random_inputs(1, length, gates=gates, seed=length)
    state = torch.randn(1, 2, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) if length % 2 else None
    assert_equal_paths(inputs, state=state)


def test_chunk_equals_recurrence_for_every_length_to_200():
    # one packed call holds the first 200 lengths' worth of prefixes: every document length from 0 to 200 appears
    lengths = list(range(201))
    edges = torch.tensor([0, *lengths]).cumsum(0).tolist()
    inputs = random_inputs(1, edges[-1], heads=1, width=4, value=4)
    o, final = kda(**inputs, cu_seqlens=torch.tensor(edges), output_final_state=True, backend="chunk")
    # the recurrence on all documents at once, the shorter ones filled up
    longest = lengths[-1]
    token = torch.tensor(edges[:-1])[:, None] + torch.arange(longest)
    token = torch.minimum(token, (torch.tensor(edges[1:]) - 1)[:, None].clamp_min(0))
    filled = {key: value[0][token] if value.dim() > 2 else value for key, value in inputs.items()}
    expected, _ = kda(**filled, backend="recurrent")
    for n, length in enumerate(lengths):
        torch.testing.assert_close(o[0, edges[n] : edges[n + 1]], expected[n, :length], rtol=1e-10, atol=1e-10)
    assert torch.equal(final[0], torch.zeros_like(final[0]))


@pytest.mark.parametrize("gates", ["random", "high", "low", "mixed"])
@pytest.mark.parametrize("bound", [-5.0, -0.5, None])
def test_packed_with_states_all_gradients(gates, bound):
    edges = [0, 0, 1, 17, 17, 70, 119, 120]
    state = torch.randn(7, 2, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert_equal_paths(random_inputs(1, 120, gates=gates), edges, state, bound)
    assert_equal_paths(random_inputs(1, 120, gates=gates), edges, None, bound)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_every_chunk_size(size, bound):
    inputs, edges = random_inputs(1, 150, seed=4), [0, 3, 100, 150]
    state = torch.randn(3, 2, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def run(output_final_state, cu_seqlens, lower_bound, initial_state, **inputs):
        return kda_chunk(*inputs.values(), lower_bound, 8**-0.5, initial_state, cu_seqlens.tolist(), size=size)

    expected = outputs_and_gradients(inputs, edges, state, backend="recurrent", bound=bound)
    for a, b in zip(outputs_and_gradients(inputs, edges, state, run=run, bound=bound), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_correlated_and_identical_keys_at_slow_decay():
    inputs = random_inputs(1, 100, width=16, value=16, dtype=torch.float32)
    inputs["g"].fill_(-12.0)
    for noise in (0.0, 0.1):
        inputs["k"] = torch.ones_like(inputs["k"]) + noise * inputs["k"]
        inputs["beta"].fill_(3.0)
        wide = {key: value.double() for key, value in inputs.items()}
        expected = outputs_and_gradients(wide, backend="recurrent")
        errors = [relative(a, b) for a, b in zip(outputs_and_gradients(inputs, backend="chunk"), expected, strict=True)]
        errors[7] /= 100  # A_log's gradient is a small difference of large terms here; the recurrence has 3e-5
        assert max(errors) < 1e-5, errors


def test_tile_inverse():
    scores = torch.randn(5, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tril(-1)
    eye = torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(tile_inverse(scores) @ (eye + scores), eye.expand(5, -1, -1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("cut", [1, 15, 16, 40, 63, 77])
def test_later_inputs_change_no_earlier_output_bit(bound, width, cut):
    inputs = random_inputs(1, 78, heads=2, width=width, value=32, dtype=torch.float32)
    other = random_inputs(1, 78, heads=2, width=width, value=32, dtype=torch.float32, gates="mixed", seed=5)
    before, _ = kda(**inputs, lower_bound=bound, backend="chunk")
    for name in ("q", "k", "v", "g", "beta"):
        changed = dict(inputs)
        changed[name] = torch.cat((inputs[name][:, :cut], other[name][:, cut:]), 1)
        after, _ = kda(**changed, lower_bound=bound, backend="chunk")
        assert torch.equal(after[:, :cut], before[:, :cut]), name


def test_gradients_of_a_prefix_loss_ignore_later_inputs_to_the_bit():
    inputs, other = (random_inputs(1, 70, width=32, value=32, dtype=torch.float32, seed=s) for s in (0, 1))
    cut = 41

    def gradients(inputs):
        inputs = {key: value.clone().requires_grad_() for key, value in inputs.items()}
        kda(**inputs, backend="chunk")[0][:, :cut].square().sum().backward()
        return {key: value.grad for key, value in inputs.items()}

    mixed = {k: torch.cat((v[:, :cut], other[k][:, cut:]), 1) if v.dim() > 2 else v for k, v in inputs.items()}
    first, second = gradients(inputs), gradients(mixed)
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(first[name][:, :cut], second[name][:, :cut]), name
        assert not second[name][:, cut:].any()


@pytest.mark.parametrize("width", [32, 64, 128])
def test_split_prefill_and_packed_equal_whole_to_the_bit(width):
    inputs = random_inputs(1, 200, heads=2, width=width, value=32, dtype=torch.float32)
    whole, final = kda(**inputs, output_final_state=True, backend="chunk")

    def part(a, b):
        return {key: value[:, a:b] if value.dim() > 2 else value for key, value in inputs.items()}

    head, state = kda(**part(0, 128), output_final_state=True, backend="chunk")
    tail, last = kda(**part(128, 200), initial_state=state, output_final_state=True, backend="chunk")
    assert torch.equal(torch.cat((head, tail), 1), whole)
    assert torch.equal(last, final)
    packed, ends = kda(**inputs, cu_seqlens=torch.tensor([0, 128, 128, 200]), output_final_state=True, backend="chunk")
    alone, end = kda(**part(128, 200), output_final_state=True, backend="chunk")
    assert torch.equal(packed[:, :128], head)
    assert torch.equal(packed[:, 128:], alone)
    assert torch.equal(ends, torch.cat((state, torch.zeros_like(state), end)))


def test_nan_stays_in_its_document():
    inputs = random_inputs(1, 60, width=16, dtype=torch.float32)
    edges = [0, 21, 40, 60]
    clean = outputs_and_gradients(inputs, edges, backend="chunk")
    for name in ("q", "k", "v", "g", "beta"):
        dirty = dict(inputs)
        dirty[name] = inputs[name].clone()
        dirty[name][:, 25] = float("nan")
        got = outputs_and_gradients(dirty, edges, backend="chunk")
        for a, b in zip(got[2:7], clean[2:7], strict=True):
            assert torch.equal(a[:, :21], b[:, :21])
            assert torch.equal(a[:, 40:], b[:, 40:])


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4])
@pytest.mark.parametrize("gates", ["high", "low", "mixed"])
def test_finite_for_any_finite_input(size, gates):
    inputs = random_inputs(1, 90, width=32, value=32, dtype=torch.float32, gates=gates)
    for name in ("q", "k", "v", "beta"):
        inputs[name] = inputs[name] * size
    inputs["g"] = inputs["g"] * 1e4
    for x in outputs_and_gradients(inputs, backend="chunk"):
        assert torch.isfinite(x).all()


def test_bfloat16_computes_in_float32():
    inputs = random_inputs(2, 50, width=32, value=32, dtype=torch.bfloat16)
    wide = {key: value.float() for key, value in inputs.items()}
    got, expected = outputs_and_gradients(inputs, backend="chunk"), outputs_and_gradients(wide, backend="recurrent")
    assert got[0].dtype == torch.bfloat16
    assert got[1].dtype == torch.float32
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < 0.005


def test_runs_are_bit_identical_on_two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inputs = random_inputs(1, 700, heads=4, width=32, value=32, dtype=torch.float32)
        first, *others = [outputs_and_gradients(inputs, [0, 9, 400, 700], backend="chunk") for _ in range(3)]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_recomputed_backward_is_the_kept_one(monkeypatch):
    inputs = random_inputs(1, 100, width=64)
    kept = outputs_and_gradients(inputs, backend="chunk")
    monkeypatch.setattr(importlib.import_module("atoll.ops.kda.chunk"), "_KEEP_ELEMENTS", 0)  # the name atoll.ops.kda is the function
    for a, b in zip(outputs_and_gradients(inputs, backend="chunk"), kept, strict=True):
        assert torch.equal(a, b)


def test_empty_input_and_report():
    kernel_report(clear=True)
    inputs = random_inputs(1, 0)
    state = torch.randn(2, 2, 8, 12)
    o, final = kda(**inputs, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor([0, 0, 0]), backend="chunk")
    assert o.shape == (1, 0, 2, 12)
    assert torch.equal(final, state.double())
    kda(**random_inputs(1, 20))
    assert kernel_report() == {"chunk": 2}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": torch.zeros(1, 4, 2, 7)}, "q has shape"),
        ({"beta": torch.zeros(1, 4, 3)}, "beta has shape"),
        ({"dt_bias": torch.zeros(16)}, "dt_bias has shape"),
        ({"initial_state": torch.zeros(2, 2, 8, 12)}, "initial_state"),
        ({"lower_bound": 5.0}, "lower_bound = 5.0"),
        ({"lower_bound": -9.0, "backend": "chunk"}, "lower_bound = -9.0"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "cu_seqlens must rise"),
        ({"backend": "cuda"}, "backend = 'cuda'"),
    ],
)
def test_wrong_arguments_are_refused(change, word):
    with pytest.raises(ValueError, match=word):
        kda(**{**random_inputs(1, 4), **change})


def test_batch_with_boundaries_is_refused():
    with pytest.raises(ValueError, match="batch of 1"):
        kda(**random_inputs(2, 4), cu_seqlens=torch.tensor([0, 4]))
