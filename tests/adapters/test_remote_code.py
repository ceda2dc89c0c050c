"""The code in an exported folder computes what Atoll computes: every form, padding, packing, cache, loss, gradients."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from adapters.remote_models import FORMS, build, hugging, hugging_gradients, pair, stored_gradients, tokens
from hub.golden import GOLDEN, arrays, model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from atoll.hub import export

IDS = tokens(2, 77)


def differs(a, b) -> float:
    assert a.shape == b.shape
    return float((a.detach().double() - b.detach().double()).abs().max())


@pytest.fixture(params=FORMS)
def both(request, tmp_path):
    return pair(tmp_path / "m", **FORMS[request.param])


@pytest.fixture(scope="module")
def blueprint(tmp_path_factory):
    return pair(tmp_path_factory.mktemp("remote") / "m")


def test_every_form_computes_the_same_loss_logits_and_gradients(both):
    ours, theirs = both
    mine, other = ours(IDS, labels=IDS, logits=True), theirs(IDS, labels=IDS)
    assert differs(mine.logits, other.logits) < 1e-9
    assert differs(mine.loss, other.loss) < 1e-12
    mine.loss.backward()
    other.loss.backward()
    assert all(p.grad is not None for p in theirs.parameters())
    expected, found = stored_gradients(ours), hugging_gradients(theirs)
    unused = {f"language_model.model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    assert set(found) - set(expected) <= unused  # the first layer reads the embedding alone; here its gradient is zero, there none
    for name, grad in found.items():
        assert differs(grad, expected.get(name, torch.zeros_like(grad))) < 1e-10, name


def test_every_form_decodes_as_it_reads(both):
    ours, theirs = both
    whole = ours(IDS).logits
    for split in ([40, 1, 1, 35], [1, 75, 1]):
        cache, parts = DynamicCache(config=theirs.config), []
        for piece in IDS.split(split, 1):
            parts.append(theirs(piece, cache=cache, use_cache=True).logits)
        assert differs(torch.cat(parts, 1), whole) < 1e-9
        assert cache.get_seq_length() == 77


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)], ids=["float32", "float64"])
def test_golden_checkpoint(tmp_path, dtype, tolerance):
    """The folder as Atoll writes it; router margins of this fixture are wide enough for float32."""
    io, ours = arrays("k3_tiny", "io"), model("k3_tiny", dtype)
    export.save(ours, tmp_path / "m")
    theirs = hugging(tmp_path / "m", dtype).eval()
    with torch.no_grad():
        assert differs(theirs(io["input_ids"]).logits, ours(io["input_ids"]).logits) < tolerance
        assert differs(theirs(io["input_ids"]).logits, io["logits"]) < 1e-3
        positions = torch.cat([torch.arange(n) for n in io["cu_seqlens"].diff().tolist()])[None]
        assert differs(theirs(io["input_ids_packed"], position_ids=positions).logits, io["logits_packed"]) < 1e-3


def test_the_released_folder_itself_loads():
    """A folder that brings no code, through the class of an exported one; A_log is padded to 128 there."""
    classes = hugging_classes()
    theirs, info = classes["KimiK3ForConditionalGeneration"].from_pretrained(
        GOLDEN / "k3_tiny", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    assert theirs.config.text_config.a_log_storage == 128
    io = arrays("k3_tiny", "io")
    with torch.no_grad():
        assert differs(theirs(io["input_ids"]).logits, io["logits"]) < 1e-3


@pytest.mark.parametrize("router", ["unbiased", "biased"])
def test_the_flat_form_of_kimi_linear(router):
    theirs, info = hugging_classes()["KimiLinearForCausalLM"].from_pretrained(
        GOLDEN / "kimi_linear_tiny", dtype=torch.float32, router_weights=router, output_loading_info=True
    )
    assert not any(info.values()), info
    io = arrays("kimi_linear_tiny", "io")
    expected = io["logits"] if router == "unbiased" else arrays("kimi_linear_tiny", "io_biased_router")["logits_biased_router"]
    with torch.no_grad():
        assert differs(theirs(io["input_ids"]).logits, expected) < 1e-3


def hugging_classes() -> dict:
    """The classes of the packaged files, as a module of their own."""
    from atoll.hub.remote import modeling_kimi_k3

    return vars(modeling_kimi_k3)


# ---------------------------------------------------------------- padding and packing


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", [1, 3])
def test_padding_changes_nothing(blueprint, side, rows):
    ours, theirs = blueprint
    lengths = [33, 50, 1][:rows]
    ids, mask = torch.zeros(rows, 60, dtype=torch.int64), torch.zeros(rows, 60, dtype=torch.int64)
    alone = []
    for row, n in enumerate(lengths):
        text = tokens(1, n, seed=row + 5)[0]
        place = slice(60 - n, 60) if side == "left" else slice(0, n)
        ids[row, place], mask[row, place] = text, 1
        alone.append((place, ours(text[None], labels=text[None], logits=True)))
    out = theirs(ids, attention_mask=mask, labels=ids)  # labels at padding are not counted, though they are no -100
    for row, (place, single) in enumerate(alone):
        assert differs(out.logits[row, place], single.logits[0]) < 1e-9
    count = sum(int(single.num_targets) for _, single in alone)
    total = sum(single.loss * single.num_targets for _, single in alone)
    assert abs(float(out.loss - total / max(count, 1))) < 1e-12


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_cache_goes_on_where_each_row_ended(blueprint, side):
    """Two calls that fill a cache, the second with padding of its own, then single tokens: states, windows and latents stay apart."""
    ours, theirs = blueprint
    rows = [tokens(1, 40, seed=7)[0], tokens(1, 40, seed=8)[0]]
    spans = [([0, 20], [20, 31], [31, 32], [32, 33]), ([0, 9], [9, 10], [10, 11], [11, 12])]  # tokens of each row in each call
    cache, seen = DynamicCache(config=theirs.config), torch.zeros(2, 0, dtype=torch.int64)
    for call in range(4):
        width = max(b - a for a, b in (s[call] for s in spans))
        ids, mask = torch.zeros(2, width, dtype=torch.int64), torch.zeros(2, width, dtype=torch.int64)
        places = []
        for row, (a, b) in enumerate(s[call] for s in spans):
            place = slice(width - (b - a), width) if side == "left" else slice(0, b - a)
            ids[row, place], mask[row, place] = rows[row][a:b], 1
            places.append((place, a, b))
        seen = torch.cat([seen, mask], 1)
        out = theirs(ids, attention_mask=seen, cache=cache, use_cache=True)
        for row, (place, a, b) in enumerate(places):
            expected = ours(rows[row][None, :b]).logits[0, a:b]
            assert differs(out.logits[row, place], expected) < 1e-9, (call, row)


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens_q"])
def test_packed_documents_equal_documents_alone(both, how):
    ours, theirs = both
    ends = torch.tensor([0, 1, 34, 57, 120])
    ids = tokens(1, 120)
    positions = torch.cat([torch.arange(n) for n in ends.diff().tolist()])[None]
    given = {"position_ids": positions} if how == "position_ids" else {"cu_seq_lens_q": ends.int(), "cu_seq_lens_k": ends.int()}
    out, expected = theirs(ids, labels=ids, **given), ours(ids, labels=ids, cu_seqlens=ends, logits=True)
    assert differs(out.logits, expected.logits) < 1e-9
    assert abs(float(out.loss - expected.loss)) < 1e-12
    assert out.cache is None
    for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        assert differs(out.logits[:, a:b], theirs(ids[:, a:b]).logits) < 1e-9


def test_saturated_gates_stay_finite_and_right(tmp_path):
    for n, bound in enumerate((-5.0, None)):
        ours = build(gate_lower_bound=bound)
        with torch.no_grad():
            for name, p in ours.named_parameters():
                if name.endswith("dt_bias"):
                    p.copy_(torch.where(torch.arange(p.numel()) % 2 == 0, 60.0, -60.0))
        export.save(ours.eval(), tmp_path / str(n))
        exact, single = hugging(tmp_path / str(n)), hugging(tmp_path / str(n), torch.float32)
        expected = ours(IDS, labels=IDS, logits=True)
        found = exact(IDS, labels=IDS)
        assert differs(found.logits, expected.logits) < 1e-9
        single(IDS, labels=IDS).loss.backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in single.parameters())


VECTORS = ["lb_a_packed", "lb_a_packed_zero", "lb_a_sat_hi", "lb_a_sat_lo", "lb_a_sat_mix", "lb_a_t1", "lb_a_t17", "lb_a_t200", "lb_b_t17"]


@pytest.mark.parametrize("name", [*VECTORS, "sp_a_sat_mix", "sp_a_t83"])
def test_delta_attention_on_independent_vectors(name):
    """Outputs, states and gradients that other implementations computed, documents packed and states given among them."""
    case, parts = arrays("kda", name), hugging_classes()
    batch, length = case["q"].shape[:2]
    lengths = [length] * batch if "cu_seqlens" not in case else case["cu_seqlens"].diff().tolist()
    packing = parts["Packing"]((1, batch * length), lengths, None, torch.device("cpu"))
    inputs = {key: case[key].double().requires_grad_() for key in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    state = case["initial_state"].double().requires_grad_() if "initial_state" in case else None
    flat = [inputs[key].flatten(0, 1) for key in ("q", "k", "v", "g", "beta")]
    dt_bias = inputs["dt_bias"].view(case["q"].shape[2:])
    bound = -5.0 if name.startswith("lb") else None
    out, final = parts["kda"](*flat, inputs["A_log"], dt_bias, bound, state, packing, "torch")
    assert differs(out.view(case["o"].shape), case["o"]) < 1e-6
    assert differs(final, case["final_state"]) < 1e-6
    loss = (out.view(case["do"].shape) * case["do"]).sum() + ((final * case["dht"]).sum() if state is not None else 0)
    loss.backward()
    for key, tensor in inputs.items():
        assert differs(tensor.grad, case[f"d{key}"]) < 2e-6 * max(1.0, float(case[f"d{key}"].abs().max())), key
    if state is not None:
        assert differs(state.grad, case["dinitial_state"]) < 2e-6


def test_the_grouped_kernel_is_called_as_it_means():
    """The CUDA path's one call, on a CPU: the same products and gradients as an expert at a time."""
    parts, counts = hugging_classes(), torch.tensor([3, 0, 5, 1])
    rows = torch.randn(9, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    looped = parts["grouped_linear"](rows, weight, counts)
    up = torch.randn_like(looped)
    expected = [looped, *torch.autograd.grad(looped, (rows, weight), up)]
    grouped = torch.nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    for a, b in zip(expected, [grouped, *torch.autograd.grad(grouped, (rows, weight), up)], strict=True):
        assert differs(a, b) < 0.1


# ---------------------------------------------------------------- types and devices


def test_float32_parts_stay_float32(tmp_path):
    export.save(build(torch.bfloat16), tmp_path / "m")
    theirs = hugging(tmp_path / "m", torch.bfloat16)
    kept = {name.split("layers.")[1].split(".", 1)[1] for name, t in theirs.state_dict().items() if t.dtype == torch.float32}
    mixer = {f"self_attn.{part}" for part in ("A_log", "dt_bias", "o_norm.weight", *(f"{x}_conv1d.weight" for x in "qkv"))}
    assert kept == {*mixer, "block_sparse_moe.gate.e_score_correction_bias"}
    out = theirs(IDS, labels=IDS)
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    reference = hugging(tmp_path / "m", torch.float32)(IDS, labels=IDS)
    assert abs(float(out.loss - reference.loss)) < 0.05 * float(reference.loss)


def test_autocast_leaves_gates_states_and_router_alone(tmp_path):
    _, theirs = pair(tmp_path / "m", torch.float32)
    layer, x = theirs.language_model.model.layers[1], torch.randn(40, 24)
    packing = hugging_classes()["Packing"]((1, 40), [40], None, x.device)
    inner = []
    layer.self_attn.o_norm.register_forward_hook(lambda _, args, out: inner.append(args[0]))
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            layer.self_attn(x, packing, None)
            inner.append(layer.block_sparse_moe.gate(x))
    assert [t.dtype for t in inner] == [torch.float32] * 4
    assert torch.equal(inner[1], inner[3])
    assert differs(inner[0], inner[2]) < 0.05 * float(inner[0].abs().max())  # only the projections before it were rounded


def test_atolls_op_serves_where_asked_for(blueprint):
    _, theirs = blueprint
    with torch.no_grad():
        built_in = theirs(IDS).logits
        theirs.config.text_config.kda_backend = "atoll"
        try:
            assert differs(theirs(IDS).logits, built_in) < 1e-9
            cache = DynamicCache(config=theirs.config)
            parts = [theirs(piece, cache=cache, use_cache=True).logits for piece in IDS[:, :22].split([10, 10, 1, 1], 1)]
            assert differs(torch.cat(parts, 1), built_in[:, :22]) < 1e-9
        finally:
            theirs.config.text_config.kda_backend = "auto"


def test_the_folder_needs_nothing_of_atoll(tmp_path):
    """In a process that cannot import Atoll."""
    ours, _ = pair(tmp_path / "m")
    script = f"""
import sys
sys.modules["atoll"] = None
import torch
from transformers import AutoModelForCausalLM
m = AutoModelForCausalLM.from_pretrained({str(tmp_path / "m")!r}, trust_remote_code=True, dtype=torch.float64)
print(float(m(torch.tensor({IDS.tolist()}), labels=torch.tensor({IDS.tolist()})).loss))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert abs(float(done.stdout) - float(ours(IDS, labels=IDS).loss)) < 1e-12


# ---------------------------------------------------------------- arguments


def test_loss_and_logits_as_asked_for(blueprint):
    _, theirs = blueprint
    whole = theirs(IDS, labels=IDS)
    assert differs(theirs(IDS, logits_to_keep=1).logits, whole.logits[:, -1:]) < 1e-12
    assert differs(theirs(IDS, logits_to_keep=torch.tensor([3, 8])).logits, whole.logits[:, [3, 8]]) < 1e-12
    kept = theirs(IDS, labels=IDS, logits_to_keep=2)
    assert kept.logits.shape[1] == 2
    assert abs(float(kept.loss - whole.loss)) < 1e-12
    masked = torch.where(torch.arange(77) < 40, -100, IDS)
    summed = theirs(IDS, labels=masked, num_items_in_batch=10).loss * 10
    assert abs(float(summed - theirs(IDS, labels=masked).loss * 2 * 37)) < 1e-9
    shifted = torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], 1)
    assert abs(float(theirs(IDS, shift_labels=shifted).loss - whole.loss)) < 1e-12
    theirs.config.text_config.logits_with_loss = False
    try:
        bare = theirs(IDS, labels=IDS)
        assert bare.logits is None
        assert abs(float(bare.loss - whole.loss)) < 1e-12
    finally:
        theirs.config.text_config.logits_with_loss = True
    embedded = theirs(inputs_embeds=theirs.get_input_embeddings()(IDS), past_key_values=None)
    assert differs(embedded.logits, whole.logits) == 0
    assert theirs(IDS, labels=IDS, return_dict=False)[0] == whole.loss


def test_long_rows_lose_nothing_by_the_loss_in_pieces(blueprint, monkeypatch):
    _, theirs = blueprint
    expected = theirs(IDS, labels=IDS).loss
    module = sys.modules[type(theirs).__module__]
    monkeypatch.setattr(module, "LOSS_ROWS", 10)
    assert abs(float(theirs(IDS, labels=IDS).loss - expected)) < 1e-12


def test_forced_routing_is_taken(blueprint):
    ours, theirs = blueprint
    ids = tokens(1, 20)
    routing = ours(ids).routing
    other = [(r + 1) % 6 for r in routing]
    assert differs(theirs(ids, routing=other).logits, ours(ids, routing=other).logits) < 1e-9
    assert differs(theirs(ids, routing=other).logits, theirs(ids).logits) > 1e-3
    assert differs(theirs(ids, routing=routing).logits, theirs(ids).logits) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(), "give exactly one of input_ids and inputs_embeds"),
        (lambda m: m(IDS, attention_mask=torch.ones(2, 1, 77, 77)), "attention_mask"),
        (lambda m: m(IDS, cu_seq_lens_q=torch.tensor([0, 77])), "one row"),
        (lambda m: m(IDS[:1], cu_seq_lens_q=torch.tensor([0, 70])), "rise from 0 to 77"),
        (lambda m: m(IDS[:1], cu_seq_lens_q=torch.tensor([0, 50, 40, 77])), "rise from 0 to 77"),
        (lambda m: m(IDS[:1], cu_seq_lens_q=torch.tensor([5, 77])), "rise from 0 to 77"),
        (lambda m: m(IDS[:1], position_ids=torch.arange(77)[None] % 30, use_cache=True), "cannot be cached"),
        (lambda m: m(IDS, cache=DynamicCache(), use_cache=True), "DynamicCache(config=model.config)"),
        (lambda m: m(IDS, output_hidden_states=True), "output_hidden_states"),
        (lambda m: m.tie_weights() or type(m.config)(tie_word_embeddings=True), "tie_word_embeddings"),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(blueprint, call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call(blueprint[1])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(vision_config={"vt_hidden_size": 8}), "vision_config"),
        (lambda c: c["text_config"].update(quantization_config={"format": "mxfp4-pack-quantized"}), "quantization_config"),
        (lambda c: c["text_config"].update(hidden_act="gelu"), "hidden_act"),
        (lambda c: c["text_config"].update(mla_use_nope=False), "mla_use_nope"),
        (lambda c: c["text_config"]["linear_attn_config"].update(gate_lower_bound=-9.0), "gate_lower_bound"),
    ],
)
def test_a_folder_that_cannot_be_is_refused_in_one_line(tmp_path, edit, message):
    export.save(build(), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as caught:
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "m", trust_remote_code=True), trust_remote_code=True)
    assert "\n" not in str(caught.value)
