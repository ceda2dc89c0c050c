"""MXFP4 folders: read by tensor presence, written back byte for byte, refused in one line, and the list of what is quantised."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hub.golden import ATOL, GOLDEN, arrays, decode, distance, model
from safetensors.torch import load_file, save_file

from atoll.config import ModelConfig, UserError
from atoll.hub import export, packed, quantized
from atoll.hub.layout import pack, slots, unpack
from atoll.hub.load import load_into, read_config
from atoll.model import Model, load
from atoll.ops import mxfp4_dequantize, mxfp4_quantize
from atoll.ops.mxfp4 import mxfp4_fake
from atoll.plan import render
from atoll.plan import report as plan_report

FOLDER = "k3_tiny_mxfp4"
SMALL = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, kda_num_heads=2, kda_head_dim=8,
    q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=48,
    num_experts=6, num_experts_per_token=2, moe_intermediate_size=32, routed_expert_hidden_size=64, quantization="mxfp4",
)  # fmt: skip
FLAT = {
    "residual": "plain", "routed_expert_hidden_size": None, "hidden_act": "silu", "gate_lower_bound": None,
    "use_full_rank_gate": False, "mla_use_output_gate": False, "latent_moe_use_norm": False, "q_lora_rank": None,
}  # fmt: skip
W1 = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"
BOTH = ["mxfp4", "mxfp4+mxfp8"]


def build(dtype: torch.dtype = torch.float32, **change) -> Model:
    torch.manual_seed(3)
    m = Model(dataclasses.replace(SMALL, **change), dtype=dtype)
    with torch.no_grad():
        for tensor in m.parameters():
            tensor.copy_(torch.randn(tensor.shape))
    return m


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def edit(folder: Path, change) -> Path:
    """The tensors of a folder, changed in place by `change`."""
    tensors = stored(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(call) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------- the golden folder


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=str)
def golden(request):
    return model(FOLDER, request.param)


def test_golden_logits(golden):
    io = arrays(FOLDER, "io")
    assert golden.config.quantization == "mxfp4"
    with torch.no_grad():
        assert distance(golden(io["input_ids"]).logits, io["logits"]) < ATOL
        _, rest = decode(golden, io["input_ids"][:, :12], 1, 11)
    assert distance(rest, io["logits"][:, 1:12]) < ATOL


def test_golden_divergence():
    """KL to the reference over every position, as for the other golden models."""
    io = arrays(FOLDER, "io")
    with torch.no_grad():
        mine = model(FOLDER, torch.float32)(io["input_ids"]).logits.double().log_softmax(-1)
    theirs = io["logits"].double().log_softmax(-1)
    assert (theirs.exp() * (theirs - mine)).sum(-1).max() < 1e-6


def test_golden_weights_are_exact(golden):
    io = arrays(FOLDER, "io")
    e = golden.language_model.model.layers[1].block_sparse_moe.experts
    names = [n for n in io if n.startswith("dequant.")]
    assert len(names) == 3
    for name in names:
        matrix = name.removesuffix(".weight").rsplit(".", 1)[1]
        assert torch.equal(getattr(e, matrix)[0], io[name].to(e.w1.dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_golden_tensors_are_written_back_byte_for_byte(tmp_path, dtype):
    export.save(load(GOLDEN / FOLDER, dtype=dtype), tmp_path / "out", dtype=torch.bfloat16)
    before, after = stored(GOLDEN / FOLDER), stored(tmp_path / "out")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


def test_the_released_content_is_written():
    mine = json.loads(json.dumps(packed.to_json(SMALL)))
    released = json.loads((GOLDEN / FOLDER / "config.json").read_text())["text_config"]["quantization_config"]
    assert mine == {"quantization_config": released}


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("change", [{}, FLAT], ids=["k3", "flat"])
@pytest.mark.parametrize("quantization", BOTH)
@pytest.mark.parametrize("shard_bytes", [5e9, 3_000], ids=["single", "sharded"])
def test_save_load_save_is_the_same_bytes(tmp_path, dtype, change, quantization, shard_bytes):
    m = build(dtype, quantization=quantization, **change)
    export.save(m, tmp_path / "a", shard_bytes=shard_bytes)
    again = load(tmp_path / "a", dtype=dtype)
    assert again.config.quantization == quantization
    export.save(again, tmp_path / "b", shard_bytes=shard_bytes)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    ids = torch.arange(3, 23).view(1, 20)
    with torch.no_grad():
        assert torch.equal(m(ids).logits, again(ids).logits)


def foreign(seed: int):
    """Change a folder's experts to bytes of another tool: scales larger than needed, scaled zeros, negative zeros."""

    def change(tensors):
        g = torch.Generator().manual_seed(seed)
        for name in [n for n in tensors if n.endswith("weight_packed")]:
            nibble = torch.randint(0, 4, tensors[name].shape, generator=g)
            sign = torch.randint(0, 2, tensors[name].shape, generator=g) * 0x88
            tensors[name] = (nibble | nibble.flip(-1) << 4 | sign).to(torch.uint8)
            tensors[name][0] = 0x80
            scale = name.replace("_packed", "_scale")
            tensors[scale] = torch.randint(0, 250, tensors[scale].shape, generator=g).to(torch.uint8)

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shard_bytes", [5e9, 3_000], ids=["single", "sharded"])
def test_scales_of_another_rule_come_back_byte_for_byte(tmp_path, dtype, shard_bytes):
    export.save(build(dtype), tmp_path / "a")
    before = stored(edit(tmp_path / "a", foreign(1)))
    canonical = mxfp4_quantize(mxfp4_dequantize(before[f"{W1}_packed"], before[f"{W1}_scale"]))
    assert not torch.equal(canonical[1], before[f"{W1}_scale"])  # without the kept scales it would not come back
    m = load(tmp_path / "a", dtype=dtype)
    export.save(m, tmp_path / "b", shard_bytes=shard_bytes)
    if shard_bytes == 5e9:
        assert files(tmp_path / "a") == files(tmp_path / "b")
    after = {k: v for f in (tmp_path / "b").glob("*.safetensors") for k, v in load_file(f).items()}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n].view(torch.uint8), before[n].view(torch.uint8)) for n in before)


def test_kept_scales_survive_state_dicts_and_yield_to_changed_weights(tmp_path):
    export.save(build(), tmp_path / "a")
    before = stored(edit(tmp_path / "a", foreign(2)))
    other = Model(read_config(tmp_path / "a"))
    other.load_state_dict(load(tmp_path / "a").state_dict())
    layer = other.language_model.model.layers[1].block_sparse_moe.experts
    with torch.no_grad():
        layer.w1[0] *= 1.1
    export.save(other, tmp_path / "b")
    after = stored(tmp_path / "b")
    moved = {n for n in before if not torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8))}
    assert moved == {f"{W1}_packed", f"{W1}_scale"}
    assert torch.equal(mxfp4_dequantize(after[f"{W1}_packed"], after[f"{W1}_scale"]), mxfp4_dequantize(*mxfp4_quantize(layer.w1[0])))


def test_each_matrix_is_quantised_once_for_both_of_its_tensors(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(packed, "mxfp4_quantize", lambda *a, **k: calls.append(0) or mxfp4_quantize(*a, **k))
    export.save(build(), tmp_path / "a", shard_bytes=3_000)
    assert len(calls) == 2 * 6 * 3
    export.save(build(), tmp_path / "b")
    assert len(calls) == 2 * 2 * 6 * 3


@pytest.mark.parametrize("seed", [None, 5], ids=["ours", "foreign"])
def test_bytes_pass_from_folder_to_folder_without_the_model(tmp_path, seed):
    """Slots of a model on the meta device, given memory one at a time: nothing is decoded, everything comes through, a NaN does not."""
    export.save(build(), tmp_path / "a")
    before = stored(edit(tmp_path / "a", foreign(seed)) if seed else tmp_path / "a")
    for slot in slots(Model(read_config(tmp_path / "a"), device="meta")):
        held = dataclasses.replace(slot, tensor=torch.empty(slot.tensor.shape, dtype=slot.dtype))
        assert unpack(held, before[slot.name]) is None
        assert torch.equal(pack(held), before[slot.name]), slot.name
        if slot.name.endswith("_scale"):
            bad = before[slot.name].clone()
            bad[0, 0] = 255
            assert "NaN" in str(unpack(held, bad))


# ---------------------------------------------------------------- tensors decide


@pytest.fixture
def folder(tmp_path):
    export.save(build(), tmp_path / "a")
    return tmp_path / "a"


def settings(folder: Path, change) -> Path:
    path = folder / "config.json"
    tree = json.loads(path.read_text())
    change(tree["text_config"])
    path.write_text(json.dumps(tree))
    return folder


def test_packed_tensors_without_a_word_in_the_config(folder):
    before = load(folder)
    again = load(settings(folder, lambda text: text.pop("quantization_config")))
    assert again.config.quantization == "mxfp4"
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), again.parameters(), strict=True))


def test_plain_tensors_under_a_quantised_config(folder):
    def unpack(tensors):
        for name in [n for n in tensors if n.endswith("_packed")]:
            value = mxfp4_dequantize(tensors.pop(name), tensors.pop(name.replace("_packed", "_scale")))
            tensors[name.removesuffix("_packed")] = value

    before = load(folder)
    again = load(edit(folder, unpack))
    assert again.config.quantization == "none"
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), again.parameters(), strict=True))


def experts(m: Model) -> dict[str, torch.Tensor]:
    return {n: p for n, p in m.named_parameters() if ".block_sparse_moe.experts." in n}


def test_a_plain_folder_begins_a_quantised_training(tmp_path):
    """As a model is first fine-tuned in MXFP4: read into float masters, scales of an earlier folder forgotten, written packed."""
    plain = build(quantization="none")
    export.save(plain, tmp_path / "plain")
    m = build(quantization="mxfp4+mxfp8")
    for scale in m.buffers():
        scale.fill_(3) if scale.dtype == torch.uint8 else None
    load_into(m, tmp_path / "plain")
    assert all(torch.equal(p, experts(plain)[n]) for n, p in experts(m).items())
    assert all((b == 255).all() for b in m.buffers() if b.dtype == torch.uint8)
    export.save(m, tmp_path / "packed")
    assert all(torch.equal(p, mxfp4_fake(experts(m)[n])) for n, p in experts(load(tmp_path / "packed")).items())


def test_a_packed_folder_is_read_by_a_model_without_quantisation(folder):
    m = build(quantization="none")
    load_into(m, folder)
    assert all(torch.equal(p, experts(m)[n]) for n, p in experts(load(folder)).items())
    export.save(m, folder)
    assert not any(t.dtype == torch.uint8 for t in stored(folder).values())


def test_matrices_the_ignore_list_forgets_are_stored_plain(folder):
    names = stored(folder)
    for part in ("routed_expert_down_proj", "routed_expert_up_proj", "gate"):
        name = f"language_model.model.layers.1.block_sparse_moe.{part}.weight"
        assert names[name].dtype == torch.float32


def test_settings_of_the_folder_are_checked_like_any(tmp_path):
    """Packed tensors whose config asks for widths that no group of 32 fits."""
    export.save(build(quantization="none", moe_intermediate_size=40), tmp_path / "a")

    def fake(tensors):
        for name in [n for n in tensors if ".experts." in n]:
            tensors[f"{name}_packed"] = torch.zeros(2, 2, dtype=torch.uint8)
            del tensors[name]

    message = refusal(lambda: load(edit(tmp_path / "a", fake)))
    assert "moe_intermediate_size = 40" in message


# ---------------------------------------------------------------- refusals

SHARED = W1.replace("experts.0.w1", "shared_experts.gate_proj")


def rename(old, new):
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{W1}_scale"), [f"tensor {W1}_scale is missing"]),
        (lambda t: t.pop(f"{W1}_packed"), [f"tensor {W1}_packed is missing"]),
        (lambda t: t.__setitem__(W1, torch.zeros(32, 64)), [f"tensor {W1}_packed", f"tensor {W1} ", "both"]),
        (lambda t: t.__setitem__(f"{W1}_zero", torch.zeros(1)), [f"tensor {W1}_zero is not part"]),
        (lambda t: (rename(f"{W1}_packed", W1)(t), t.pop(f"{W1}_scale")), [f"tensor {W1}_packed is missing"]),
        (rename(SHARED, f"{SHARED}_packed"), [f"tensor {SHARED}_packed is quantised", "only routed experts"]),
        (
            lambda t: t.__setitem__(f"{W1}_packed", t[f"{W1}_packed"][:, :16].clone()),
            [f"tensor {W1}_packed has shape [32, 16]", "[32, 32]"],
        ),
        (lambda t: t.__setitem__(f"{W1}_scale", t[f"{W1}_scale"].T.contiguous()), [f"tensor {W1}_scale has shape [2, 32]", "[32, 2]"]),
        (lambda t: t.__setitem__(f"{W1}_packed", t[f"{W1}_packed"].float()), [f"tensor {W1}_packed is stored as F32", "U8"]),
        (lambda t: t.__setitem__(f"{W1}_scale", t[f"{W1}_scale"].to(torch.bfloat16)), [f"tensor {W1}_scale is stored as BF16", "U8"]),
        (lambda t: t[f"{W1}_scale"].__setitem__((3, 1), 255), [f"tensor {W1}_scale", "255"]),
        (lambda t: (t[f"{W1}_scale"].fill_(254), t[f"{W1}_packed"].fill_(0x77)), [f"tensor {W1}_packed", "beyond torch.float32"]),
    ],
)
def test_a_wrong_folder_is_one_line_that_names_the_tensor(folder, change, says):
    message = refusal(lambda: load(edit(folder, change)))
    assert all(word in message for word in says), message


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_mxfp4_cannot_hold_is_named_and_nothing_is_written(tmp_path, bad):
    m = build()
    with torch.no_grad():
        m.language_model.model.layers[1].block_sparse_moe.experts.w1[0, 5, 9] = bad
    message = refusal(lambda: export.save(m, tmp_path / "a"))
    assert W1 in message
    assert f"w[5, 9] is {bad}" in message
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the list


@pytest.mark.parametrize("change", [{}, FLAT, {"first_k_dense_replace": 2}], ids=["k3", "flat", "dense"])
def test_the_list_is_exactly_what_a_folder_holds_quantised(tmp_path, change):
    config = dataclasses.replace(SMALL, **change)
    listed = json.loads(json.dumps(quantized.report(config)))
    export.save(build(torch.bfloat16, **change), tmp_path / "a")
    held = stored(tmp_path / "a")
    names = {row["name"].format(e) for row in listed["tensors"] for e in range(row["experts"])}
    assert names == {n.removesuffix(".weight_packed") for n, t in held.items() if t.dtype == torch.uint8 and n.endswith("_packed")}
    assert len(names) == listed["matrices"]
    assert listed["bytes_after"] == sum(t.nbytes for t in held.values() if t.dtype == torch.uint8)
    export.save(build(torch.bfloat16, **change, quantization="none"), tmp_path / "plain")
    plain = stored(tmp_path / "plain")
    assert listed["bytes_before"] == sum(plain[f"{name}.weight"].nbytes for name in names)
    for row in listed["tensors"]:
        assert row["shape"] == list(plain[row["name"].format(0) + ".weight"].shape)


def test_the_plan_shows_the_list_where_something_is_quantised():
    plan = json.loads(json.dumps(plan_report(SMALL)))
    assert plan["quantized"] == quantized.report(SMALL)
    assert plan["built"]["agrees"]
    text = render(plan)
    assert "language_model.model.layers.1-2.block_sparse_moe.experts.0-5.w2" in text
    assert max(map(len, text.splitlines())) <= 100
    none = plan_report(dataclasses.replace(SMALL, quantization="none"))
    assert "quantized" not in none
    assert {k: v for k, v in plan.items() if k != "quantized"} == none
    assert (
        plan["weight_bytes"]["mxfp4"]
        == plan["weight_bytes"]["bfloat16"] - plan["quantized"]["bytes_before"] + plan["quantized"]["bytes_after"]
    )


def test_nothing_is_listed_without_quantisation():
    listed = quantized.report(dataclasses.replace(SMALL, quantization="none"))
    assert (listed["tensors"], listed["matrices"], listed["bytes_before"], listed["bytes_after"]) == ([], 0, 0, 0)
