"""The parity tool: golden models within KL 1e-6, real near ties found and resolved, real differences not explained away."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hub.golden import GOLDEN, arrays
from safetensors.torch import save_file

from atoll.config import ModelConfig, UserError
from atoll.evals.parity import Reference, compare, judge_greedy, measure, read_reference, render
from atoll.evals.ties import Tie, near_ties, observe
from atoll.model import Model, load

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "kda_num_heads": 2, "kda_head_dim": 8,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 48,
    "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16,
}  # fmt: skip
TWINS = (2, 5)  # two experts of one layer with the same router row


def build(dtype: torch.dtype = torch.float64, **change) -> Model:
    """A small model in which a wrong expert moves the logits by about 1."""
    torch.manual_seed(7)
    m = Model(ModelConfig(**{**SMALL, **change}), dtype=torch.float64)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if p.dim() > 1:
                p.copy_((1.0 if "gate.weight" in name else 0.3) * torch.randn(p.shape))  # float32 numbers: exact in both dtypes
    return m.to(dtype).eval()


def tied(m: Model, layers: tuple[int, ...], lead: float) -> Model:
    """Twin experts in MoE layers `layers` (counted among these): the first leads the second by `lead` of biased score."""
    a, b = TWINS
    with torch.no_grad():
        for i in layers:
            gate = m.moe_layers()[i].gate
            gate.weight[b] = gate.weight[a]
            gate.e_score_correction_bias[[a, b]] = torch.tensor([lead / 2, -lead / 2], dtype=gate.e_score_correction_bias.dtype)
    return m


def tokens(rows: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def answer(m: Model, ids: torch.Tensor) -> Reference:
    with torch.no_grad():
        return Reference(ids, m(ids).logits)


# ---------------------------------------------------------------- golden models


@pytest.mark.parametrize("folder", ["k3_tiny", "kimi_linear_tiny", "k3_tiny_mxfp4"])
def test_golden_models_are_within_1e_6_of_their_references(folder):
    m = load(GOLDEN / folder, dtype=torch.float32)
    report = compare(m, read_reference(GOLDEN / folder / "io.safetensors"))
    assert report["plain"]["kl_max"] <= 1e-6
    assert report["plain"]["top1"] == 1.0
    assert report["ties"] == []  # the fixtures' margins are wide
    assert report["dtype"] == "float32"


def test_the_golden_model_with_images_is_within_1e_6_of_its_reference():
    io = arrays("k3_tiny_vl", "io")
    m = load(GOLDEN / "k3_tiny_vl", dtype=torch.float32)
    with torch.no_grad():
        logits = m(io["input_ids"], pixel_values=io["pixel_values"], grid_thws=io["grid_thws"]).logits
    report = measure(io["logits"], logits)
    assert report["kl_max"] <= 1e-6
    assert report["top1"] == 1.0


def test_the_biased_router_is_within_1e_6_of_its_reference():
    reference = Reference(
        arrays("kimi_linear_tiny", "io")["input_ids"], arrays("kimi_linear_tiny", "io_biased_router")["logits_biased_router"]
    )
    m = load(GOLDEN / "kimi_linear_tiny", dtype=torch.float32, router_weights="biased")
    report = compare(m, reference)
    assert report["plain"]["kl_max"] <= 1e-6
    other = compare(load(GOLDEN / "kimi_linear_tiny", dtype=torch.float32), reference)
    assert other["plain"]["kl_mean"] > 0.01
    assert not other["resolved"]
    assert "weights, settings or formulas differ" in render(other)


# ---------------------------------------------------------------- near ties


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("layers", [(1,), (0, 2)], ids=str)
def test_a_near_tie_that_falls_the_other_way_is_found_and_resolved(dtype, layers):
    """Two experts' scores are equal to 1e-8; the reference prefers the other one."""
    ours, theirs = tied(build(dtype), layers, 1e-8), tied(build(), layers, -1e-8)
    report = compare(ours, answer(theirs, tokens()))
    assert report["plain"]["max_abs"] > 0.1
    assert report["differing"]
    assert report["resolved"]
    assert report["after"]["max_abs"] < 1e-3
    assert report["after"]["kl_max"] < 1e-6
    moe = [1, 2, 3]
    assert {f["layer"] for f in report["flips"]} <= {moe[i] for i in layers}
    assert {frozenset((f["chosen"], f["other"])) for f in report["flips"]} == {frozenset(TWINS)}
    listed = {(t["layer"], t["row"], t["position"]) for t in report["ties"]}
    assert all(abs(t["margin"]) <= 1.5e-8 for t in report["ties"] if frozenset((t["chosen"], t["other"])) == frozenset(TWINS))
    first = min((f["row"], f["position"]) for f in report["flips"])
    assert any(place[1:] == first for place in listed)
    text = render(report)
    assert f"near ties of the router, within 1e-05: {len(report['ties'])}" in text
    assert "none with these near ties reversed" in text


def test_a_tie_that_falls_the_same_way_is_listed_and_harmless():
    ours, theirs = tied(build(torch.float32), (1,), 1e-8), tied(build(), (1,), 1e-8)
    report = compare(ours, answer(theirs, tokens()))
    assert report["ties"]
    assert report["differing"] == report["flips"] == []
    assert report["passes"] == 1


def test_a_real_difference_is_not_explained_by_ties():
    ours, theirs = tied(build(), (1,), 1e-8), tied(build(), (1,), -1e-8)
    with torch.no_grad():
        theirs.language_model.model.norm.weight.mul_(1.01)
    report = compare(ours, answer(theirs, tokens()))
    assert not report["resolved"]
    assert "no near ties explain" in render(report)


def test_the_search_is_bounded():
    ours, theirs = tied(build(), (0, 1, 2), 1e-8), tied(build(), (0, 1, 2), -1e-8)
    reference = answer(theirs, tokens())
    short = compare(ours, reference, max_passes=4)
    assert short["passes"] <= 4
    assert not short["resolved"]
    assert compare(ours, reference, max_passes=1000)["resolved"]


def test_the_references_own_routing_is_forced():
    ours, theirs = tied(build(), (1,), 1e-8), tied(build(), (1,), -1e-8)
    ids = tokens()
    reference = dataclasses.replace(answer(theirs, ids), routing=observe(theirs, ids).routing)
    report = compare(ours, reference)
    assert report["forced"]["max_abs"] < 1e-9
    assert report["disagreements"][0] == 0
    assert report["disagreements"][1] > 0
    assert "reference's routing" in render(report)


def test_a_flip_leaves_every_other_decision_free_and_the_past_alone():
    m, ids = build(), tokens(1)
    free = observe(m, ids)
    tie = Tie(2, 0, 9, 0.0, int(free.routing[1][9, 0]), next(e for e in range(8) if e not in free.routing[1][9]))
    flipped = observe(m, ids, [tie])
    assert set(flipped.routing[1][9].tolist()) == set(free.routing[1][9].tolist()) - {tie.chosen} | {tie.other}
    assert torch.equal(flipped.routing[0], free.routing[0])
    assert torch.equal(flipped.logits[0, :9], free.logits[0, :9])
    assert not torch.equal(flipped.logits[0, 9], free.logits[0, 9])
    # later layers chose for themselves: forcing what the free run chose there gives something else or the same, never an error
    again = observe(m, ids, routing=flipped.routing)
    assert torch.equal(again.logits, flipped.logits)


def test_near_ties_list_every_pair_around_the_cutoff():
    m, ids = build(), tokens(1, 4)
    seen = observe(m, ids)
    seen.scores[0][2] = torch.tensor([0.9, 0.5, 0.5 + 4e-9, 0.1, 0.2, 0.5 - 4e-9, 0.3, 0.4], dtype=torch.float64)
    seen.routing[0][2] = torch.tensor([0, 2])
    found = [(t.chosen, t.other) for t in near_ties(m, seen, 1e-6) if (t.layer, t.position) == (1, 2)]
    assert found == [(2, 1), (2, 5)]
    assert (2, 5) not in [(t.chosen, t.other) for t in near_ties(m, seen, 6e-9)]


# ---------------------------------------------------------------- numbers and files


def test_measure_against_hand_computed_numbers():
    theirs = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    ours = torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    got = measure(theirs, ours)
    p = torch.tensor([2.0, 0.0], dtype=torch.float64).softmax(0)
    kl = float((p[0] - p[1]) * 2)  # Σ p (log p - log q), with q the mirror image of p
    assert got == pytest.approx({"max_abs": 2.0, "kl_mean": kl / 2, "kl_max": kl, "top1": 0.5})


def test_nan_logits_differ():
    reference = answer(build(), tokens())
    reference.logits[0, 3, 5] = float("nan")
    report = compare(build(), reference, max_passes=3)
    assert report["differing"] == [[0, 3]]
    assert not report["resolved"]


def test_a_reference_file_with_routing(tmp_path):
    m, ids = build(), tokens()
    seen = observe(m, ids)
    routing = {f"routing.{i}": r.view(2, 24, 2) for i, r in enumerate(seen.routing)}
    save_file({"input_ids": ids, "logits": seen.logits, **routing}, tmp_path / "r.safetensors")
    reference = read_reference(tmp_path / "r.safetensors")
    assert reference.routing is not None
    assert all(torch.equal(a, b) for a, b in zip(reference.routing, seen.routing, strict=True))
    report = compare(m, reference)
    assert report["plain"]["max_abs"] == 0
    assert report["disagreements"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"logits": torch.zeros(1, 2, 64)}, "no tensor input_ids"),
        ({"input_ids": torch.zeros(1, 3, dtype=torch.int64), "logits": torch.zeros(1, 2, 64)}, "[1, 3]"),
        ({"input_ids": torch.zeros(1, 2, dtype=torch.int64), "logits": torch.zeros(1, 2, 9)}, "vocab_size = 64"),
        ({"input_ids": torch.full((1, 2), 64), "logits": torch.zeros(1, 2, 64)}, "0 to 63"),
    ],
)
def test_a_reference_that_does_not_fit(tmp_path, tensors, says):
    save_file(tensors, tmp_path / "r.safetensors")
    with pytest.raises(UserError) as caught:
        compare(build(), read_reference(tmp_path / "r.safetensors"))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_reference_file(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_reference(tmp_path / "none.safetensors")
    (tmp_path / "r.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(UserError, match="not a whole safetensors file"):
        read_reference(tmp_path / "r.safetensors")


# ---------------------------------------------------------------- greedy text


def greedy(m: Model, count: int = 16) -> torch.Tensor:
    return m.generate(tokens(1, 6), count, temperature=0)[0]


def logits_of(m: Model):
    def run(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return m(ids).logits

    return run


def test_greedy_text_equal_or_judged():
    m = build()
    assert judge_greedy(m, greedy(m), greedy(m), logits_of(m)) == {"verdict": "equal", "tokens": 22}
    other = build(activation_situ_beta=3.0)
    assert judge_greedy(m, greedy(m), greedy(other), logits_of(other))["verdict"] == "different"


def test_greedy_text_that_parts_at_a_tie_of_logits():
    """A token's head row is written over another's, but for 1e-7: which of the two comes first is open."""
    m, other = build(), build()
    first = int(greedy(m)[6])
    twin = (first + 1) % 64
    with torch.no_grad():
        hidden = m.language_model.model(tokens(1, 6))[0, -1]  # what the head reads at the prompt's last token
    with torch.no_grad():
        for model, step in ((m, -1e-7), (other, 1e-7)):
            head = model.language_model.lm_head.weight
            head[twin] = head[first] + step * hidden
    verdict = judge_greedy(m, greedy(m), greedy(other), logits_of(other))
    assert verdict["verdict"] == "near tie of logits"
    assert verdict["gap"] < 1e-4


def test_greedy_text_that_parts_at_a_tie_of_experts():
    ours, theirs = tied(build(), (1,), 1e-8), tied(build(), (1,), -1e-8)
    verdict = judge_greedy(ours, greedy(ours, 40), greedy(theirs, 40), logits_of(theirs))
    assert verdict["verdict"] == "near tie of experts"
