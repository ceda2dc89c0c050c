from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from atoll.ops.mxfp4 import mxfp4_dequantize, mxfp4_quantize

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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_refuses_what_it_cannot_say(bad):
    w = torch.ones(2, 32)
    w[1, 7] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        mxfp4_quantize(w)


def test_refuses_shapes_rules_and_nan_scales():
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4_quantize(torch.ones(2, 33))
    with pytest.raises(ValueError, match="rule"):
        mxfp4_quantize(torch.ones(2, 32), rule="ceil")  # type: ignore[arg-type]
    packed, scale = mxfp4_quantize(torch.ones(2, 32))
    with pytest.raises(ValueError, match="do not fit"):
        mxfp4_dequantize(packed[:, :8], scale)
    with pytest.raises(ValueError, match="255"):
        mxfp4_dequantize(packed, torch.full_like(scale, 255))
