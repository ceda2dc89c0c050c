"""The tensor axis: N processes that cut heads, widths and vocabulary among them = one, in float64 to 1e-9."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from runs import config_in, contents, restored_on, run_on
from test_equal import alone, assert_equal
from test_runs import assert_same_curve, assert_same_tensors
from training import config_for, layout, train, train_on

from atoll.ops.loss import linear_cross_entropy
from atoll.parallel import tensor_loss
from atoll.parallel.tensor import TABLE, kind_of
from atoll.parallel.tensor_loss import vocabulary_cross_entropy

LAYOUTS: list[dict[str, int]] = [
    {"tensor": 2},
    {"data_shard": 2, "tensor": 2},
    {"data_replicate": 2, "tensor": 2},
    {"expert": 2, "tensor": 2},
    {"context": 2, "tensor": 2},
]


@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: "-".join(f"{k}{v}" for k, v in axes.items()))
def test_processes_equal_one(axes: dict[str, int]) -> None:
    config = layout(config_for(train__micro_batch=1 if "context" in axes else None), **axes)
    assert_equal(on_ranks(math.prod(axes.values()), train_on, config)[0], alone())


def test_recomputed_layers_and_micro_batches_equal_too() -> None:
    config = layout(config_for(train__gradient_checkpointing=True, train__micro_batch=1), data_shard=2, tensor=2)
    assert_equal(on_ranks(4, train_on, config)[0], alone())


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data_shard": 2, "tensor": 2}, {"expert": 2}], ids="-".join)
def test_rows_in_segments_equal_too(axes: dict[str, int]) -> None:
    config = layout(config_for(train__micro_batch=2, stages__0__segment=6, balance__kind="aux"), **axes)
    assert_equal(on_ranks(math.prod(axes.values()), train_on, config)[0], train(config_for(balance__kind="aux")))


RULES: list[dict[str, Any]] = [{"kind": "sign"}, {"kind": "aux"}, {"kind": "quantile", "asynchronous": True, "ema": 0.5}]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["kind"])
def test_balancing_counts_each_token_once(rule: dict[str, Any]) -> None:
    config = config_for(train__micro_batch=2, **{f"balance__{k}": v for k, v in rule.items()})
    found, one = on_ranks(4, train_on, layout(config, expert=2, tensor=2))[0], train(config)
    if config.balance.asynchronous:  # its report is not waited for: each process has its own tokens'
        found["vio"] = one["vio"]
    assert_equal(found, one)


def test_low_rank_gates_and_direct_queries_equal_too() -> None:
    config = config_for(model__use_full_rank_gate=False, model__q_lora_rank="none", model__residual="plain", model__num_shared_experts=0)
    assert_equal(on_ranks(2, train_on, layout(config, tensor=2))[0], train(config))


def test_a_bfloat16_model_has_the_same_types_and_nearly_the_same_curve() -> None:
    config = config_for(train__dtype="bfloat16")
    found, one = on_ranks(2, train_on, layout(config, tensor=2))[0], train(config)
    for key in ("gradients", "weights", "state"):
        assert {n: t.dtype for n, t in found[key].items()} == {n: t.dtype for n, t in one[key].items()}
    assert found["loss"] == pytest.approx(one["loss"], rel=2e-3)
    for name in [n.removeprefix("master.") for n in one["state"] if n.startswith("master.")]:
        assert torch.equal(found["state"][f"master.{name}"].to(torch.bfloat16), found["weights"][name])


# ---------------------------------------------------------------- the table


def test_every_parameter_of_every_form_is_named_once() -> None:
    from atoll.model import Model

    for changes in ({}, {"model__use_full_rank_gate": False, "model__q_lora_rank": "none"}, {"model__vision__vt_hidden_size": 12}):
        model = Model(config_for(**changes).model, device="meta")
        for name, _ in model.named_parameters():
            inner = re.sub(r"language_model\.model\.layers\.\d+\.", "", name)
            assert sum(bool(re.fullmatch(pattern, inner)) for _, pattern in TABLE) == 1, name


def test_a_parameter_that_no_rule_names_is_refused() -> None:
    assert kind_of("language_model.model.layers.7.self_attn.o_proj.weight") == "row"
    with pytest.raises(ValueError, match=r"layers.7.self_attn.new_proj.weight: no rule of parallel.tensor.TABLE names it"):
        kind_of("language_model.model.layers.7.self_attn.new_proj.weight")


# ---------------------------------------------------------------- parts


def losses(tokens: int, missing: int) -> list[torch.Tensor]:
    """Loss, count, gradients of hidden states and weight, of a cut vocabulary and of a whole one."""
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 6, generator=generator, dtype=torch.float64) * 3 for n in (tokens, 10))
    labels = torch.randint(0, 10, (tokens,), generator=generator)
    labels[:missing] = -100
    found = []
    for cut in (True, False):
        h = hidden.clone().requires_grad_()
        w = (weight.chunk(2)[dist.get_rank()] if cut else weight).clone().requires_grad_()
        loss, count = vocabulary_cross_entropy(h, w, labels, group) if cut else linear_cross_entropy(h, w, labels)
        (loss / 3).backward()
        own = w.grad if cut else w.grad.chunk(2)[dist.get_rank()]
        found.append([loss.detach(), count, h.grad, own])
    return found


@pytest.mark.parametrize(("tokens", "missing"), [(7, 0), (9, 4), (5, 5), (0, 0)])
def test_loss_over_a_cut_vocabulary_is_that_over_a_whole_one(tokens: int, missing: int) -> None:
    for cut, whole in on_ranks(2, losses, tokens, missing):
        for a, b in zip(cut, whole, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
        assert int(cut[1]) == tokens - missing
        assert bool(cut[3].any()) == (tokens > missing)


def chunked_losses() -> list[torch.Tensor]:
    tensor_loss.CHUNK = 2
    return losses(7, 2)


def test_chunks_of_tokens_do_not_change_the_loss() -> None:
    for cut, whole in on_ranks(2, chunked_losses):
        for a, b in zip(cut, whole, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def logits_of(tokens: int) -> dict[str, torch.Tensor]:
    """Logits, experts and counts of a whole model and of one cut over tensor 2, in evaluation and in training."""
    from torch.distributed.device_mesh import init_device_mesh

    from atoll.model import Model
    from atoll.parallel.tensor import cut_tensor

    torch.manual_seed(0)
    c = config_for()
    whole, cut = (Model(c.model, dtype=torch.float64) for _ in range(2))
    cut.load_state_dict(whole.state_dict())
    cut_tensor(cut, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))["tensor"])
    ids = torch.arange(3, 3 + tokens)[None]
    found = {}
    for name, model in (("whole", whole), ("cut", cut)):
        out = model.train()(ids, logits=True)
        load = torch.stack([layer.load for layer in model.moe_layers()])
        if name == "cut":
            dist.all_reduce(load)
        tokens_of = model.eval().generate(ids, 3, temperature=0.0)
        found |= {f"{name}.logits": out.logits.detach(), f"{name}.routing": torch.stack(out.routing), f"{name}.load": load}
        found[f"{name}.generated"] = tokens_of
    return found


@pytest.mark.parametrize("tokens", [1, 5])
def test_tokens_that_do_not_divide(tokens: int) -> None:
    """One token leaves one process without any for its experts; generating feeds one at a time."""
    for found in on_ranks(2, logits_of, tokens):
        for name in ("logits", "routing", "load", "generated"):
            torch.testing.assert_close(found[f"cut.{name}"], found[f"whole.{name}"], atol=1e-12, rtol=1e-12)
        assert int(found["cut.load"].sum()) == tokens * 2 * 2


# ---------------------------------------------------------------- runs


def test_a_run_on_two_tensor_ranks_is_a_run_by_one_and_any_layout_reads_it(tmp_path: Path) -> None:
    config = config_in(tmp_path, train__export=True)
    assert run_on(config, str(tmp_path / "alone")) == ""
    out = tmp_path / "tensor"
    assert on_ranks(2, run_on, layout(config, tensor=2), str(out)) == ["", ""]
    assert_same_curve(out, tmp_path / "alone")
    assert_same_tensors(out, tmp_path / "alone", 6)
    stored = contents(out, 6)
    for processes, axes in ((1, {}), (2, {"data_shard": 2}), (4, {"expert": 2, "tensor": 2})):
        (found, *_) = on_ranks(processes, restored_on, layout(config_in(tmp_path), **axes), str(out))
        assert found.keys() == stored.keys()
        assert all(found[n].numpy().tobytes() == stored[n].numpy().tobytes() for n in stored), axes
    import atoll

    for name, weight in atoll.load(out / "model").state_dict().items():
        assert torch.equal(weight.double(), stored[f"model.{name}"].float().double()), name
