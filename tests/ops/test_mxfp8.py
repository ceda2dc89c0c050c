"""MXFP8 against torch's own casts to float8_e4m3fn and against a search over all values of the format."""

import pytest
import torch

from atoll.ops import microscaling
from atoll.ops.mxfp8 import mxfp8_dequantize, mxfp8_fake, mxfp8_quantize

EVERY = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
EVERY = EVERY[EVERY.isfinite()]


def spread(dtype=torch.float32, rows=64, columns=96):
    """Rows of every size that float32 has, some of their values zero."""
    g = torch.Generator().manual_seed(0)
    size = torch.linspace(-149, 127, rows).round()[:, None]
    x = torch.randn(rows, columns, generator=g).clamp(-1.9, 1.9).double() * torch.exp2(size.double())
    return torch.where(torch.rand(rows, columns, generator=g) < 0.1, 0.0, x).float().to(dtype)


def scales(x):
    """OCP v1.0 §6.3 in whole numbers: floor(log2 amax) - 8, as a byte."""
    amax = x.double().unflatten(-1, (-1, 32)).abs().amax(-1)
    exponent = torch.frexp(amax)[1] - 1 - 8
    return (torch.where(amax > 0, exponent, -127).clamp(-127, 119) + 127).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scale_and_elements_follow_the_specification(dtype):
    x = spread(dtype)
    elements, scale = mxfp8_quantize(x)
    assert torch.equal(scale, scales(x))
    unit = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    cast = (x.double() / unit).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    assert torch.equal(elements.view(torch.uint8), cast.view(torch.uint8))


def test_every_element_is_a_nearest_value():
    x = spread()
    elements, scale = mxfp8_quantize(x)
    unit = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    y = (x.double() / unit).clamp(-448, 448)
    best = (y[..., None] - EVERY).abs().amin(-1)
    assert torch.equal((y - elements.double()).abs(), best)


def test_relative_error_of_a_normal_element_is_a_sixteenth_at_most():
    x = torch.rand(50, 64) + 0.5
    back = mxfp8_dequantize(*mxfp8_quantize(x))
    assert ((back - x).abs() <= x / 16).all()
    assert (back != x).any()


def test_the_largest_saturates_at_448():
    x = torch.ones(1, 32)
    x[0, 0] = 1.99
    elements, scale = mxfp8_quantize(x)
    assert (elements.float()[0, 0], int(scale)) == (448.0, 119)
    assert mxfp8_dequantize(elements, scale)[0, 0] == 1.75


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fake_quantisation_is_quantise_then_dequantise(dtype):
    x = spread(dtype)
    x[~x.isfinite()] = 0
    fake, back = mxfp8_fake(x), mxfp8_dequantize(*mxfp8_quantize(x), dtype)
    assert fake.dtype == dtype
    assert torch.equal(fake, back)
    assert torch.equal(fake.signbit(), back.signbit())
    assert torch.equal(mxfp8_fake(x.T.contiguous().T), fake)
    assert mxfp8_fake(x, out=x) is x
    assert torch.equal(x, fake)


def test_rounded_values_are_a_fixed_point():
    fake = mxfp8_fake(spread())
    assert torch.equal(mxfp8_fake(fake), fake)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bytes_on_a_gpu(dtype):
    x = spread(dtype)
    (elements, scale), theirs = mxfp8_quantize(x), mxfp8_quantize(x.cuda())
    assert torch.equal(theirs[0].cpu().view(torch.uint8), elements.view(torch.uint8))
    assert torch.equal(theirs[1].cpu(), scale)
    assert torch.equal(mxfp8_fake(x.cuda()).cpu(), mxfp8_fake(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_its_group_alone(bad):
    x = torch.ones(2, 64)
    x[1, 7] = bad
    for back in (mxfp8_fake(x), mxfp8_dequantize(*mxfp8_quantize(x))):
        assert back[1, :32].isnan().all()
        assert back[1, 32:].eq(1).all()
        assert back[0].eq(1).all()


def test_pieces_give_what_the_whole_gives(monkeypatch):
    x = spread()
    (elements, scale), fake = mxfp8_quantize(x), mxfp8_fake(x)
    monkeypatch.setattr(microscaling, "_PIECE", 7)
    parts = mxfp8_quantize(x)
    assert torch.equal(parts[0].view(torch.uint8), elements.view(torch.uint8))
    assert torch.equal(parts[1], scale)
    assert torch.equal(mxfp8_fake(x), fake)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: mxfp8_quantize(torch.ones(2, 40)), "last dimension of 40: a multiple of 32"),
        (lambda: mxfp8_fake(torch.ones(2, 40)), "last dimension of 40: a multiple of 32"),
        (lambda: mxfp8_fake(torch.ones(2, 32, dtype=torch.int64)), "floating tensor"),
        (lambda: mxfp8_dequantize(torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.uint8)), "do not fit"),
        (lambda: mxfp8_dequantize(torch.ones(2, 32).to(torch.float8_e4m3fn), torch.zeros(2, 2, dtype=torch.uint8)), "do not fit"),
    ],
)
def test_wrong_calls_are_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()
