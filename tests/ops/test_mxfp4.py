from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from atoll.ops import microscaling
from atoll.ops.mxfp4 import mxfp4_dequantize, mxfp4_fake, mxfp4_quantize

VECTORS = load_file(Path(__file__).parents[1] / "golden" / "k3_tiny_mxfp4" / "codec_vectors.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_golden_decode_is_exact(dtype):
    value = mxfp4_dequantize(VECTORS["decode.packed"], VECTORS["decode.scale"], dtype)
    assert value.dtype == dtype
    assert torch.equal(value.float(), VECTORS["decode.value"])


@pytest.mark.parametrize("rule", ["ocp_floor", "round_amax"])
def test_golden_encode_is_exact(rule):
    packed, scale = mxfp4_quantize(VECTORS["encode.input"], rule=rule)
    assert torch.equal(scale, VECTORS[f"encode.{rule}.scale"])
    assert torch.equal(packed, VECTORS[f"encode.{rule}.packed"])
    assert torch.equal(mxfp4_dequantize(packed, scale), VECTORS[f"encode.{rule}.value"])


def test_default_rule_is_compressed_tensors():
    assert torch.equal(mxfp4_quantize(VECTORS["encode.input"])[1], VECTORS["encode.round_amax.scale"])


def test_byte_of_the_specification():
    value = mxfp4_dequantize(torch.full((1, 16), 0x5B, dtype=torch.uint8), torch.tensor([[125]], dtype=torch.uint8))
    assert value[0, :2].tolist() == [-0.375, 0.75]


def test_leading_dimensions_zeros_and_extremes():
    w = torch.zeros(3, 4, 64)
    w[0, 0, 0] = 3e38
    w[0, 1, 40] = 1e-42
    w[2, 3, 63] = -6.0
    packed, scale = mxfp4_quantize(w)
    assert packed.shape == (3, 4, 32)
    assert scale.shape == (3, 4, 2)
    back = mxfp4_dequantize(packed, scale)
    assert back.isfinite().all()
    assert back[2, 3, 63] == -6.0
    assert back[0, 0, 0] > 2.5e38
    assert (back[1] == 0).all()


@given(seed=st.integers(0, 2**20), power=st.integers(-100, 100), rule=st.sampled_from(["round_amax", "ocp_floor"]))
@settings(max_examples=50, deadline=None)
def test_error_is_bounded_and_decoded_values_are_fixed_points(seed, power, rule):
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    packed, scale = mxfp4_quantize(w, rule=rule)
    back = mxfp4_dequantize(packed, scale)
    unit = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    assert ((back.double() - w.double()).abs() <= unit * (1 if rule == "round_amax" else 2)).all()
    again, same = mxfp4_quantize(back, rule="ocp_floor")
    assert torch.equal(mxfp4_dequantize(again, same), back)


RULES = ["round_amax", "ocp_floor"]


def spread(seed=0, rows=64, columns=96):
    """Rows of every size that float32 has, some of their values zero."""
    g = torch.Generator().manual_seed(seed)
    size = torch.linspace(-149, 127, rows).round()[:, None]
    w = torch.randn(rows, columns, generator=g).clamp(-1.9, 1.9).double() * torch.exp2(size.double())
    return torch.where(torch.rand(rows, columns, generator=g) < 0.1, 0.0, w).float()


def same_bits(a, b):
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def brute_force(w, scale):
    """The nearest of all 15 values by float64 distance, ties to the even code: the definition, by search."""
    unit = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    distance = ((w.double().abs() / unit).clamp(max=6)[..., None] - values).abs()
    odd = torch.arange(8) % 2
    best = (distance == distance.amin(-1, keepdim=True)).double() - 0.5 * odd
    return values[best.argmax(-1)] * unit * torch.where(w < 0, -1.0, 1.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_element_is_the_nearest_value(rule, dtype):
    w = spread().to(dtype)
    w[~w.isfinite()] = 0  # float16 cannot hold the largest
    packed, scale = mxfp4_quantize(w, rule=rule)
    assert torch.equal(mxfp4_dequantize(packed, scale, torch.float64), brute_force(w, scale))


@pytest.mark.parametrize("rule", RULES)
def test_scales_follow_the_written_rule(rule):
    """floor(log2 amax) - 2 in whole numbers of float64, cut to the range of the byte."""
    w = spread()
    amax = w.double().unflatten(-1, (-1, 32)).abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - 1 + (mantissa >= 0.875 if rule == "round_amax" else 0)
    expected = torch.where(amax > 0, exponent - 2, -127).clamp(-127, 125) + 127
    assert torch.equal(mxfp4_quantize(w, rule=rule)[1].int(), expected.int())


@pytest.mark.parametrize("rule", RULES)
def test_a_second_pass_gives_the_same_bytes_whichever_rule_came_first(rule):
    """Why a checkpoint by either rule comes back byte for byte: its values are a fixed point of the default rule."""
    first = mxfp4_quantize(spread(1), rule=rule)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        again = mxfp4_quantize(mxfp4_dequantize(*first, dtype))
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


def any_checkpoint(seed=0):
    """Bytes that no rule of ours would write: scales larger than needed, scaled zeros, negative zeros; all finite in bfloat16."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.randint(0, 253, (300, 3), generator=g)
    code = torch.randint(0, 16, (300, 96), generator=g)
    small = torch.rand(300, 1, generator=g) < 0.5
    code = torch.where(small, (code & 8) | (code & 3), code)
    code[:5] = 8
    return (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8), scale.to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kept_scales_give_any_bytes_back(dtype):
    packed, scale = any_checkpoint()
    w = mxfp4_dequantize(packed, scale, dtype)
    again = mxfp4_quantize(w, keep=scale)
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)
    fresh = mxfp4_quantize(w)
    assert not torch.equal(fresh[1], scale)
    assert same_bits(mxfp4_dequantize(*fresh, dtype), w)


def test_a_kept_scale_never_moves_a_value():
    """Where values have changed, or there is no scale (255), the rule decides; the result is the same as without `keep`."""
    packed, scale = any_checkpoint(3)
    w = mxfp4_dequantize(packed, scale) * torch.where(torch.arange(300) % 2 == 0, 1.0, 1.07)[:, None]
    kept, plain = mxfp4_quantize(w, keep=scale), mxfp4_quantize(w)
    assert same_bits(mxfp4_dequantize(*kept), mxfp4_dequantize(*plain))
    assert torch.equal(kept[1][0::2], scale[0::2])
    changed = (w[1::2] != 0).any(1)
    assert torch.equal(kept[1][1::2][changed], plain[1][1::2][changed])
    none = mxfp4_quantize(w, keep=torch.full_like(scale, 255))
    assert torch.equal(none[0], plain[0])
    assert torch.equal(none[1], plain[1])


def test_zeros_keep_their_sign_and_take_the_least_scale():
    w = torch.zeros(2, 32)
    w[1] = -0.0
    packed, scale = mxfp4_quantize(w)
    assert scale.tolist() == [[0], [0]]
    assert (packed[0] == 0).all()
    assert (packed[1] == 0x88).all()
    assert same_bits(mxfp4_dequantize(packed, scale), w)


def test_huge_values_saturate_where_float32_still_holds_them():
    w = torch.full((2, 32), torch.finfo(torch.float32).max)
    w[1] = -torch.finfo(torch.bfloat16).max
    for rule in RULES:
        packed, scale = mxfp4_quantize(w, rule=rule)
        assert scale.tolist() == [[252], [252]]
        assert mxfp4_dequantize(packed, scale)[:, 0].tolist() == [6 * 2.0**125, -6 * 2.0**125]
    packed, scale = mxfp4_quantize(torch.full((1, 32), 1e300, dtype=torch.float64))
    assert mxfp4_dequantize(packed, scale)[0, 0] == 6 * 2.0**125


def test_float64_is_rounded_once():
    """Just above a tie: by way of float32 it would fall on the tie and go to the even code below."""
    w = torch.zeros(1, 32, dtype=torch.float64)
    w[0, 0], w[0, 1] = 4.0, 2.5 + 2.0**-40
    assert mxfp4_dequantize(*mxfp4_quantize(w))[0, :2].tolist() == [4.0, 3.0]
    assert mxfp4_fake(w)[0, :2].tolist() == [4.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fake_quantisation_is_quantise_then_dequantise_bit_for_bit(dtype):
    w = spread(2).to(dtype)
    w[3, :40] = -0.0
    fake = mxfp4_fake(w)
    assert same_bits(fake, mxfp4_dequantize(*mxfp4_quantize(w), dtype))
    assert same_bits(mxfp4_fake(fake), fake)
    strided = w.T.contiguous().T
    assert same_bits(mxfp4_fake(strided), fake)
    into = w.clone()
    assert mxfp4_fake(into, out=into) is into
    assert same_bits(into, fake)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_fake_quantisation_shows_what_is_not_finite(bad):
    w = torch.ones(2, 64)
    w[1, 7] = bad
    fake = mxfp4_fake(w)
    assert fake[1, :32].isnan().all()
    assert fake[1, 32:].eq(1).all()
    assert fake[0].eq(1).all()


def test_pieces_give_what_the_whole_gives(monkeypatch):
    w = spread(4)
    whole, fake = mxfp4_quantize(w), mxfp4_fake(w)
    monkeypatch.setattr(microscaling, "_PIECE", 7)  # divides nothing
    parts = mxfp4_quantize(w)
    assert torch.equal(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])
    assert same_bits(mxfp4_fake(w), fake)
    assert same_bits(mxfp4_dequantize(*parts), mxfp4_dequantize(*whole))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_same_bytes_on_a_gpu(dtype):
    w, (_, keep) = spread(6, 300).to(dtype), any_checkpoint()
    packed, scale = mxfp4_quantize(w, keep=keep)
    theirs = mxfp4_quantize(w.cuda(), keep=keep.cuda())
    assert torch.equal(theirs[0].cpu(), packed)
    assert torch.equal(theirs[1].cpu(), scale)
    assert same_bits(mxfp4_dequantize(*theirs, dtype).cpu(), mxfp4_dequantize(packed, scale, dtype))
    assert same_bits(mxfp4_fake(w.cuda()).cpu(), mxfp4_fake(w))


def test_any_leading_shape():
    w = spread(5, 60)
    packed, scale = mxfp4_quantize(w)
    for shape in ((3, 4, 5, 96), (1, 60, 96)):
        p, s = mxfp4_quantize(w.view(shape))
        assert p.shape == (*shape[:-1], 48)
        assert s.shape == (*shape[:-1], 3)
        assert torch.equal(p.view(60, 48), packed)
        assert torch.equal(s.view(60, 3), scale)
    row, byte = mxfp4_quantize(w[0])
    assert torch.equal(row, packed[0])
    assert torch.equal(byte, scale[0])
    for empty in ((0, 64), (3, 0), (2, 0, 32)):
        p, s = mxfp4_quantize(torch.zeros(empty))
        assert mxfp4_dequantize(p, s).shape == empty


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_refuses_what_it_cannot_hold_and_names_the_place(bad, dtype):
    w = torch.ones(2, 3, 32, dtype=dtype)
    w[1, 2, 7] = bad
    with pytest.raises(ValueError, match=rf"w\[1, 2, 7\] is {bad}: NaN or infinity"):
        mxfp4_quantize(w)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: mxfp4_quantize(torch.ones(2, 33)), "last dimension of 33: a multiple of 32"),
        (lambda: mxfp4_fake(torch.ones(2, 33)), "last dimension of 33: a multiple of 32"),
        (lambda: mxfp4_quantize(torch.ones(2, 32, dtype=torch.int32)), "floating tensor"),
        (lambda: mxfp4_quantize(torch.tensor(1.0)), "floating tensor"),
        (lambda: mxfp4_quantize(torch.ones(2, 32), rule="ceil"), "rule = 'ceil'"),  # type: ignore[arg-type]
        (lambda: mxfp4_quantize(torch.ones(2, 32), keep=torch.zeros(2, 2, dtype=torch.uint8)), r"uint8 \[2, 1\] is expected"),
        (lambda: mxfp4_dequantize(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)), "do not fit"),
        (lambda: mxfp4_dequantize(torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.uint8)), "do not fit"),
        (
            lambda: mxfp4_dequantize(torch.zeros(2, 16, dtype=torch.uint8), torch.tensor([[0], [255]], dtype=torch.uint8)),
            r"scale\[1, 0\] is 255",
        ),
    ],
)
def test_wrong_calls_are_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()
