"""Norms against their formulas, values and gradients."""

import pytest
import torch

from atoll.ops.norm import gated_rms_norm, l2_norm, rms_norm


def formula_rms(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def compare(ours, formula, *inputs):
    inputs = [x.requires_grad_() for x in inputs]
    got, expected = ours(*inputs), formula(*inputs)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    upstream = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1e-4, 1.0, 30.0])
def test_float64_values_and_gradients(size):
    torch.manual_seed(0)
    x, gate = (torch.randn(3, 5, 16, dtype=torch.float64) * size for _ in range(2))
    weight = torch.randn(16, dtype=torch.float64)
    compare(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: formula_rms(x, w, 1e-5), x.clone(), weight.clone())
    compare(
        lambda x, w, g: gated_rms_norm(x, w, g, 1e-5),
        lambda x, w, g: formula_rms(x, w, 1e-5) * torch.sigmoid(g),
        x.clone(), weight.clone(), gate.clone(),
    )  # fmt: skip
    compare(l2_norm, lambda x: x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6), x.clone())


def test_zero_rows_are_finite():
    x = torch.zeros(2, 8, requires_grad=True)
    (rms_norm(x, torch.ones(8), 1e-5).sum() + l2_norm(x).sum()).backward()
    assert torch.isfinite(x.grad).all()


def test_bfloat16_keeps_dtype_and_float32_statistics():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64).bfloat16(), torch.rand(64).bfloat16()
    expected = weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, rtol=0.01, atol=0.01)
    assert rms_norm(x, weight, 1e-5).dtype == torch.bfloat16
    assert gated_rms_norm(x, weight.float(), x, 1e-5).dtype == torch.bfloat16
    assert l2_norm(x).dtype == torch.bfloat16
