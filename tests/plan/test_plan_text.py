"""What `atoll plan` prints and returns."""

import json

import pytest

from atoll.config import load_config, presets
from atoll.plan import render, report
from atoll.plan.summary import binary, short


def test_the_plan_is_json_and_names_every_group():
    plan = json.loads(json.dumps(report(load_config("blueprint").model, build=False)))
    assert (plan["total"], plan["active"], plan["a_log_padding"]) == (2_779_484_478_208, 104_189_612_640, 2_208)
    assert sum(g["total"] for g in plan["groups"]) == plan["total"]
    assert sum(g["share"] for g in plan["groups"]) == pytest.approx(1)


@pytest.mark.parametrize("preset", presets())
def test_the_text_is_narrow_and_carries_the_totals(preset):
    plan = report(load_config(preset).model, build=False)
    text = render(plan)
    assert max(map(len, text.splitlines())) <= 100
    assert f"{plan['total']:,}" in text
    assert f"{plan['active']:,}" in text


def test_groups_the_model_lacks_are_left_out():
    config = load_config("tiny", {"model.num_shared_experts": 0, "model.residual": "plain"}).model
    text = render(report(config, build=False))
    assert "shared experts" not in text
    assert "attention residual" not in text


def test_a_disagreement_is_said():
    plan = report(load_config("tiny").model, build=False)
    plan["built"] = {"agrees": False, "differs": {"norms": [1, 2]}}
    assert "DIFFERS in norms: built 1, counted 2" in render(plan)


def test_numbers_are_short():
    assert [short(n) for n in (2_779_484_478_208, 40_910_316, 55_231, 12)] == ["2.78T", "40.9M", "55.2K", "12"]
    assert [binary(n) for n in (192, 434_110_464, 1_559_965_606_912)] == ["192 B", "414 MiB", "1.419 TiB"]
