import pytest
import torch

from atoll.ops.situ import situ_glu, swiglu

PAIRS = [(0.5, 0.5, 0.154788734684), (3.0, 2.0, 4.829912250594), (-2.0, 5.0, -1.087256072912), (20.0, 60.0, 98.358554218229)]


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-11), (torch.float32, 5e-7), (torch.bfloat16, 4e-3)])
def test_check_values(dtype, relative):
    gate, up, expected = (torch.tensor(v, dtype=torch.float64) for v in zip(*PAIRS, strict=True))
    out = situ_glu(gate.to(dtype), up.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=relative, atol=0)


def test_float32_is_accurate_near_zero_and_saturated():
    gate = torch.cat([torch.logspace(-30, 3, 400), -torch.logspace(-30, 1.5, 400)])
    up = gate.flip(0)
    exact = 100 * torch.tanh(gate.double() / 4) * torch.sigmoid(gate.double()) * torch.tanh(up.double() / 25)
    torch.testing.assert_close(situ_glu(gate, up).double(), exact, rtol=2e-6, atol=1e-37)


def test_bound_and_small_signal_limit():
    torch.manual_seed(0)
    gate, up = torch.randn(2, 1000, dtype=torch.float64)
    assert situ_glu(gate * 1e4, up * 1e4).abs().max() <= 100
    torch.testing.assert_close(situ_glu(gate * 1e-3, up * 1e-3), swiglu(gate * 1e-3, up * 1e-3), rtol=1e-6, atol=0)


@pytest.mark.parametrize("linear_beta", [25.0, 2.0, None])
def test_gradients(linear_beta):
    torch.manual_seed(0)
    gate, up = (torch.randn(5, 4, dtype=torch.float64) * 4).requires_grad_(), (torch.randn(5, 4, dtype=torch.float64) * 9).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: situ_glu(a, b, 4.0, linear_beta), (gate, up))
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    plain = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta))
    torch.testing.assert_close(situ_glu(gate, up, 4.0, linear_beta), plain, rtol=1e-12, atol=1e-14)


def test_bfloat16_computes_in_float32():
    torch.manual_seed(0)
    gate, up = torch.randn(2, 1000).bfloat16()
    torch.testing.assert_close(situ_glu(gate, up), situ_glu(gate.float(), up.float()).bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(swiglu(gate, up), swiglu(gate.float(), up.float()).bfloat16(), rtol=0, atol=0)


def test_refuses_unlike_inputs():
    with pytest.raises(ValueError, match="one shape and dtype"):
        situ_glu(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="one shape and dtype"):
        swiglu(torch.zeros(3), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("activation", [situ_glu, swiglu])
def test_bitwise_causal(activation):
    """Elementwise, yet vectorised: rows before t keep their bits when rows from t on change."""
    gate, up = torch.randn(2, 301, 600, generator=torch.Generator().manual_seed(0)) * 5
    out = activation(gate, up)
    for t in (1, 150, 300):
        later = activation(torch.cat([gate[:t], 1 - gate[t:]]), torch.cat([up[:t], 2 * up[t:]]))
        assert torch.equal(later[:t], out[:t])
        assert not torch.equal(later[t:], out[t:])
