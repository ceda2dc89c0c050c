"""MXFP4 against programs nobody here wrote: compressed-tensors packs the same bytes and unpacks ours, mlx-lm computes with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hub.golden import GOLDEN
from safetensors.torch import load_file

from atoll.config import ModelConfig
from atoll.hub import export
from atoll.model import Model, load
from atoll.ops import mxfp4_dequantize, mxfp4_quantize
from atoll.ops.mxfp4 import mxfp4_fake

SMALL = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, kda_num_heads=2, kda_head_dim=32,
    q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=48,
    num_experts=6, num_experts_per_token=2, moe_intermediate_size=32, routed_expert_hidden_size=64, quantization="mxfp4",
)  # fmt: skip


# ---------------------------------------------------------------- the codec


@pytest.fixture(scope="module")
def scheme():
    from compressed_tensors.quantization import QuantizationConfig

    from atoll.hub.packed import to_json

    return QuantizationConfig.model_validate(to_json(SMALL)["quantization_config"]).config_groups["group_0"]


def theirs(w: torch.Tensor, scheme) -> dict[str, torch.Tensor]:
    """Scale by its observer's rule, then its compressor."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    groups = w.unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    return MXFP4PackedCompressor.compress({"weight": w, "weight_scale": scale}, scheme)


def unpacked(packed: torch.Tensor, scale: torch.Tensor, scheme) -> torch.Tensor:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor

    return MXFP4PackedCompressor.decompress({"weight_packed": packed, "weight_scale": scale}, scheme)["weight"]


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)[None] * torch.tensor([[1.0], [-1.0], [0.5], [2.0]])
    cases = {
        "random": randn(64, 96),
        "every size": randn(200, 64) * torch.exp2(torch.arange(-100, 100).float())[:, None],
        "ties": ties,
        "near the rule's edge": torch.cat([torch.full((40, 1), 1.75) + torch.arange(-20, 20)[:, None] * 2.0**-7, randn(40, 31) * 0.3], 1),
        "zero": torch.zeros(4, 64),
        "one value in a zero group": torch.eye(32) * 3.3,
        "subnormal": randn(64, 64) * 2.0**-132,
        "scarcely above zero": torch.full((1, 32), 1e-40) * torch.arange(32),
        "huge": randn(64, 64).clamp(-1.7, 1.7) * 2.0**126,
        "up to the last that its rule can take": torch.full((1, 32), 1.74) * 2.0**127,
    }
    return {name: torch.where(w.to(dtype) == 0, 0.0, w.to(dtype)) for name, w in cases.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", inputs(torch.float32))
def test_same_bytes_as_compressed_tensors(case, dtype, scheme):
    w = inputs(dtype)[case]
    mine, peer = mxfp4_quantize(w), theirs(w, scheme)
    assert torch.equal(mine[1], peer["weight_scale"])
    assert torch.equal(mine[0], peer["weight_packed"])
    assert torch.equal(mxfp4_dequantize(*mine, torch.bfloat16), unpacked(*mine, scheme))


def test_float16_in_the_range_that_its_own_scales_have(scheme):
    """compressed-tensors keeps a float16 tensor's scales in float16, where 2^-127 does not exist."""
    w = inputs(torch.float16)["random"]
    mine, peer = mxfp4_quantize(w), theirs(w, scheme)
    assert torch.equal(mine[0], peer["weight_packed"])
    assert torch.equal(mine[1], peer["weight_scale"])


def test_every_byte_under_many_scales_is_unpacked_alike(scheme):
    packed = torch.arange(256, dtype=torch.uint8).repeat(16).view(256, 16)
    for s in (0, 1, 2, 100, 127, 200, 251, 252):
        scale = torch.full((256, 1), s, dtype=torch.uint8)
        assert torch.equal(mxfp4_dequantize(packed, scale, torch.bfloat16), unpacked(packed, scale, scheme)), s


def test_known_differences(scheme):
    """An exact -0.0 loses its sign there; NaN and what is over 1.75 * 2^127 give zeros there, and here an error and the largest value."""
    w = torch.ones(1, 32)
    w[0, 3] = -0.0
    mine, peer = mxfp4_quantize(w)[0], theirs(w, scheme)["weight_packed"]
    assert (mine != peer).nonzero().tolist() == [[0, 1]]
    assert int(mine[0, 1]) == int(peer[0, 1]) | 0x80
    bad = torch.full((1, 32), float("nan"))
    assert (theirs(bad, scheme)["weight_packed"] == 0).all()
    with pytest.raises(ValueError, match="NaN"):
        mxfp4_quantize(bad)
    top = torch.full((1, 32), 1.8) * 2.0**127
    assert (theirs(top, scheme)["weight_packed"] == 0).all()
    assert (mxfp4_dequantize(*mxfp4_quantize(top)) == 6 * 2.0**125).all()


# ---------------------------------------------------------------- whole folders


def build(**change) -> Model:
    torch.manual_seed(3)
    m = Model(dataclasses.replace(SMALL, initializer_range=0.15, **change)).eval()
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "_res_proj" in name:
                p.normal_(std=0.5)
    return m


@pytest.mark.parametrize("shard_bytes", [5e9, 30_000], ids=["single", "sharded"])
def test_compressed_tensors_unpacks_our_folder(tmp_path, shard_bytes):
    """Its own converter reads our config.json, finds what is packed and writes a plain folder, which loads here with the same values."""
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    m = build()
    export.save(m, tmp_path / "packed", shard_bytes=shard_bytes)
    converter = CompressedTensorsDequantizer(str(tmp_path / "packed"), dtype=torch.float32)
    convert_checkpoint(str(tmp_path / "packed"), str(tmp_path / "plain"), converter, max_workers=1, device="cpu")
    text = json.loads((tmp_path / "plain" / "config.json").read_text())["text_config"]
    assert text["quantization_config"]  # left there by the converter, over plain tensors: what loads must go by the tensors
    plain = load(tmp_path / "plain")
    assert plain.config.quantization == "none"
    mine = dict(m.named_parameters())
    for name, p in plain.named_parameters():
        expected = mxfp4_fake(mine[name]) if ".block_sparse_moe.experts." in name else mine[name]
        assert torch.equal(p, expected), name
    ids = torch.arange(3, 43).view(1, 40)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, m(ids).logits)


def mlx_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, config = load_model(folder, strict=True)
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return torch.from_numpy(np.array(model(mx.array(ids.numpy())).astype(mx.float32)))


def test_mlx_lm_computes_with_the_packed_experts(tmp_path):
    """Strict load, experts left packed (its own mxfp4 kernels), the logits those of the model that wrote the folder."""
    m, ids = build(), torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    export.save(m, tmp_path / "a")
    with torch.no_grad():
        mine = m(ids).logits
        plain = Model(dataclasses.replace(m.config, quantization="none"))
        plain.load_state_dict({n: t for n, t in m.state_dict().items() if not n.endswith("_scale")})
        unrounded = plain(ids).logits
    theirs = mlx_logits(tmp_path / "a", ids)
    assert (theirs - mine).abs().max() < 1e-4
    assert (theirs - unrounded).abs().max() > 1e-2


def test_mlx_lm_agrees_with_the_golden_logits(tmp_path):
    """The golden checkpoint, plain tensors written again in float32 (in bfloat16 near-tied experts flip), packed ones as they are."""
    io = load_file(GOLDEN / "k3_tiny_mxfp4" / "io.safetensors")
    export.save(load(GOLDEN / "k3_tiny_mxfp4"), tmp_path / "a", dtype=torch.float32)
    assert (mlx_logits(tmp_path / "a", io["input_ids"]) - io["logits"]).abs().max() < 1e-3
