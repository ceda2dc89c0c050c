"""N processes = one: loss, every gradient, the balancer's biases and all weights after three steps, in float64 to 1e-9."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from ranks import on_ranks
from training import config_for, layout, train, train_on

from atoll.config import Config

LAYOUTS = [{"data_shard": 2}, {"data_replicate": 2, "data_shard": 2}, {"expert": 2}, {"data_shard": 2, "expert": 2}]


@functools.cache
def alone() -> dict[str, Any]:
    return train(config_for())


def assert_equal(mine: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert mine["targets"] == theirs["targets"]
    for key in ("loss", "norm", "vio"):
        torch.testing.assert_close(torch.tensor(mine[key]), torch.tensor(theirs[key]), atol=tolerance, rtol=tolerance)
    for key in ("gradients", "weights", "state"):
        assert mine[key].keys() == theirs[key].keys()
        for name, a in mine[key].items():
            b = theirs[key][name]
            assert a.shape == b.shape, name
            assert a.dtype == b.dtype, name
            assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max())), (key, name)


def test_what_is_compared_says_something() -> None:
    found = alone()
    assert len(found["gradients"]) > 70
    assert all(float(g.abs().max()) > 1e-9 for g in found["gradients"].values())
    assert found["norm"][0] > 0.1
    biases = [t for n, t in found["weights"].items() if n.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert all(float(b.abs().max()) > 1e-6 for b in biases)


@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: "-".join(f"{k}{v}" for k, v in axes.items()))
def test_processes_equal_one(axes: dict[str, int]) -> None:
    config = layout(config_for(), **axes)
    found = on_ranks(math.prod(axes.values()), train_on, config)[0]
    assert_equal(found, alone())


CUT = [({"context": 4}, False), ({"data_shard": 2, "context": 2}, False), ({"context": 2, "expert": 2}, True)]


@pytest.mark.parametrize(("axes", "recompute"), CUT, ids=lambda v: "-".join(f"{k}{n}" for k, n in v.items()) if isinstance(v, dict) else "")
def test_cut_sequences_equal_whole_ones(axes: dict[str, int], recompute: bool) -> None:
    """One row of 16 tokens at a time: its documents lie across up to four shares, and shares hold whole ones too."""
    config = layout(config_for(train__micro_batch=1, train__gradient_checkpointing=recompute), **axes)
    assert_equal(on_ranks(4, train_on, config)[0], alone())


def test_the_rows_hold_what_cutting_them_must_stand() -> None:
    from training import BATCH, LENGTH, STEPS, text

    from atoll.data.loader import Sampler

    sampler = Sampler(text(config_for().model), LENGTH, 0)
    starts = [sampler[i][1].tolist() for i in range(BATCH * STEPS)]
    assert [0] in starts  # a document across all four shares
    documents = [pair for s in starts for pair in itertools.pairwise([*s, LENGTH])]
    assert any(b - a > 4 and a % 4 and b % 4 and b // 4 - a // 4 == 2 for a, b in documents)  # across three, from and to their middle
    assert any(a // 4 == (b - 1) // 4 for a, b in documents)  # a whole one within a share
    assert any(a and a % 4 == 0 for a, _ in documents)  # one that starts where a share does


def test_recomputed_layers_and_micro_batches_equal_too() -> None:
    config = layout(config_for(train__gradient_checkpointing=True, train__micro_batch=1), data_shard=2, expert=2)
    assert_equal(on_ranks(4, train_on, config)[0], alone())


RULES: list[dict[str, Any]] = [
    {"kind": "sign"},
    {"kind": "aux"},
    {"kind": "quantile", "asynchronous": True, "ema": 0.5},
    {"kind": "local_quantile"},
    {"kind": "capacity", "capacity_factor": 1.0},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["kind"])
def test_every_balancing_rule_equals_one_process(rule: dict[str, Any]) -> None:
    """A row a micro-batch: what a rule makes of a micro-batch by itself (a quantile, a capacity) is then the same rows' everywhere."""
    config = config_for(train__micro_batch=1, **{f"balance__{k}": v for k, v in rule.items()})
    _assert_rule_equals(config, data_shard=2, expert=2)


@pytest.mark.parametrize("rule", RULES[:3], ids=lambda rule: rule["kind"])
def test_rules_over_all_tokens_stand_the_cutting_of_rows(rule: dict[str, Any]) -> None:
    config = config_for(train__micro_batch=1, **{f"balance__{k}": v for k, v in rule.items()})
    _assert_rule_equals(config, data_shard=2, context=2)


def _assert_rule_equals(config: Config, **axes: int) -> None:
    found, one = on_ranks(4, train_on, layout(config, **axes))[0], train(config)
    if config.balance.asynchronous:  # its report is not waited for: each process has its own tokens'
        found["vio"] = one["vio"]
    assert_equal(found, one)


def test_experts_that_get_nothing() -> None:
    config = config_for(balance__kind="none")
    found, one = on_ranks(2, train_on, layout(config, expert=2), True)[0], train(config, crowd=True)
    idle = [g[4:] for n, g in one["gradients"].items() if ".experts." in n]
    assert len(idle) == 6
    assert not any(g.any() for g in idle)
    assert_equal(found, one)


def test_a_bfloat16_model_has_the_same_types_and_nearly_the_same_curve() -> None:
    config = config_for(train__dtype="bfloat16")
    found, one = on_ranks(4, train_on, layout(config, data_shard=2, expert=2))[0], train(config)
    for key in ("gradients", "weights", "state"):
        assert {n: t.dtype for n, t in found[key].items()} == {n: t.dtype for n, t in one[key].items()}
    assert found["loss"] == pytest.approx(one["loss"], rel=2e-3)
    assert found["norm"] == pytest.approx(one["norm"], rel=0.05)
    masters = [n.removeprefix("master.") for n in one["state"] if n.startswith("master.")]
    assert len(masters) > 40
    for name in masters:
        master = found["state"][f"master.{name}"]
        assert torch.equal(master.to(torch.bfloat16), found["weights"][name])
        assert float((master - one["state"][f"master.{name}"]).abs().mean()) < 2e-3, name  # AdamW steps by signs of small gradients
