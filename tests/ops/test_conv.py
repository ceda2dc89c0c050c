"""Short convolution: the golden vectors, and packed = separate, states, causality, gradients."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from atoll.ops.conv import short_conv

GOLDEN = Path(__file__).parents[1] / "golden" / "kda" / "short_conv.safetensors"


@pytest.mark.parametrize("kind", ["zero", "state"])
def test_golden(kind):
    data = load_file(GOLDEN)
    x = data["x"].double()[None].requires_grad_()
    weight = data["weight"].double().requires_grad_()
    state = data["initial_state"].double().requires_grad_() if kind == "state" else None
    y, final = short_conv(x, weight, initial_state=state, cu_seqlens=data["cu_seqlens"], output_final_state=True)
    torch.testing.assert_close(y[0], data[f"{kind}.y"], rtol=0, atol=1e-14)
    assert torch.equal(final, data[f"{kind}.final_state"])
    (y[0] * data["dy"]).sum().backward()
    torch.testing.assert_close(x.grad[0], data[f"{kind}.dx"], rtol=0, atol=1e-13)
    torch.testing.assert_close(weight.grad, data[f"{kind}.dweight"], rtol=0, atol=1e-12)
    if state is not None:
        torch.testing.assert_close(state.grad, data["state.dinitial_state"], rtol=0, atol=1e-13)


def plain(x, weight):
    padded = F.pad(x.transpose(1, 2), (weight.shape[2] - 1, 0))
    return F.silu(F.conv1d(padded, weight, groups=weight.shape[0])).transpose(1, 2)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 700])
def test_matches_torch_convolution(length):
    torch.manual_seed(0)
    x = torch.randn(2, length, 320, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(320, 1, 4, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    y, state = short_conv(x, weight)
    assert state is None
    expected = plain(x, weight)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    got = torch.autograd.grad(y, (x, weight), upstream)
    for a, b in zip(got, torch.autograd.grad(expected, (x, weight), upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_packed_is_separate_to_the_bit_and_state_carries():
    torch.manual_seed(1)
    edges = [0, 0, 1, 3, 40, 41, 41, 80]
    x, weight = torch.randn(1, 80, 32), torch.randn(32, 1, 4)
    start = torch.randn(len(edges) - 1, 3, 32)
    y, final = short_conv(x, weight, initial_state=start, cu_seqlens=torch.tensor(edges), output_final_state=True)
    for n, (a, b) in enumerate(itertools.pairwise(edges)):
        alone, after = short_conv(x[:, a:b], weight, initial_state=start[n : n + 1], output_final_state=True)
        assert torch.equal(alone, y[:, a:b])
        assert torch.equal(after[0], final[n])
    head, state = short_conv(x[:, :33], weight, output_final_state=True)
    tail, _ = short_conv(x[:, 33:], weight, initial_state=state)
    assert torch.equal(torch.cat((head, tail), 1), short_conv(x, weight)[0])


def test_final_state_gradient_reaches_the_inputs():
    torch.manual_seed(2)
    x = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 1, 4, dtype=torch.float64, requires_grad=True)
    start = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: short_conv(a[0], a[1], initial_state=a[2], output_final_state=True), (x, weight, start))


def test_causal_and_document_local_to_the_bit():
    torch.manual_seed(3)
    x, weight = torch.randn(1, 50, 8), torch.randn(8, 1, 4)
    edges = torch.tensor([0, 20, 50])
    y, _ = short_conv(x, weight, cu_seqlens=edges)
    changed = x.clone()
    changed[:, 30:] = float("nan")
    assert torch.equal(short_conv(changed, weight, cu_seqlens=edges)[0][:, :30], y[:, :30])
    changed = x.clone()
    changed[:, :20] = float("nan")
    assert torch.equal(short_conv(changed, weight, cu_seqlens=edges)[0][:, 20:], y[:, 20:])


def test_bfloat16_sums_in_float32():
    torch.manual_seed(4)
    x, weight = torch.randn(1, 40, 16).bfloat16(), torch.randn(16, 1, 4)
    y, _ = short_conv(x, weight)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, short_conv(x.float(), weight)[0].bfloat16())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weight": torch.zeros(7, 1, 4)}, "weight"),
        ({"initial_state": torch.zeros(1, 2, 8)}, "initial_state"),
        ({"x": torch.zeros(2, 3)}, "x has"),
    ],
)
def test_wrong_shapes_are_refused(change, word):
    arguments = {"x": torch.zeros(1, 3, 8), "weight": torch.zeros(8, 1, 4), **change}
    with pytest.raises(ValueError, match=word):
        short_conv(**arguments)
