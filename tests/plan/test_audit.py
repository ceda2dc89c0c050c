"""The audit finds planted faults and passes the blueprint; its proof agrees with arithmetic done the long way."""

from __future__ import annotations

import json
import math

import pytest
import torch

from atoll import cli
from atoll.config import presets
from atoll.plan.audit import look, render, report, rounded, settings_of
from atoll.plan.audited import audit
from atoll.plan.ranges import FORMATS, Decay, exponents, prove, safe_bound, safe_tile

TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def faults(found) -> list[str]:
    return [f["what"] for f in found["findings"] if f["level"] == "fault"]


@pytest.mark.parametrize("name", [p for p in presets() if not p.startswith("kimi-linear")])
def test_the_blueprint_passes(name):
    found = audit(name, {})
    assert found["ok"]
    assert not faults(found)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"bound": "none"}, "factors of a tile"),  # softplus decay with dense tiles
        ({"tile": 32, "anchor": "first"}, "factors of a tile"),  # 32-token tiles at -5
        ({"tile": 64}, "factors of a tile"),
        ({"operands": "float16"}, "factors of a tile"),
        ({"gate": "bfloat16"}, "slow decays"),
        ({"gate": "bfloat16"}, "sums of log-decays"),
        ({"anchor": "middle"}, "causality"),
        ({"state": "float16"}, "state"),
        ({"state": "bfloat16"}, "state"),
    ],
)
def test_planted_faults_are_found(given, what):
    assert what in faults(audit("tiny", given))
    assert not audit("tiny", given)["ok"]


def test_softplus_presets_are_faults_in_dense_tiles():
    assert "factors of a tile" in faults(audit("kimi-linear-tiny", {}))


def test_half_precision_says_why_and_what_would_do():
    (finding,) = (f for f in audit("tiny", {"operands": "float16"})["findings"] if f["what"] == "factors of a tile")
    assert "37.5" in finding["says"]
    assert "bfloat16 operands" in finding["says"]
    assert safe_bound(16, "centred", "float16") == pytest.approx(-math.log(2**14) / 7.5)


@pytest.mark.parametrize("form", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("anchor", ["centred", "first", "middle"])
@pytest.mark.parametrize("tile", [2, 5, 16, 17, 32])
def test_the_proof_by_trying_every_gate_at_its_extremes(form, anchor, tile):
    """Gates all at 0, all at the bound, and each mix of a head and a tail: factors of the largest safe bound are normal numbers, and ten
    per cent beyond it one is not."""
    dtype = TORCH[form]
    bound = safe_bound(tile, anchor, form)

    def stands(b):
        limits = torch.finfo(dtype)
        for head in range(tile + 1):
            for low in (True, False):
                g = torch.zeros(tile, dtype=torch.float64)
                g[:head] = b if low else 0.0
                g[head:] = 0.0 if low else b
                sums = g.cumsum(0) - g[0]
                most = exponents(Decay(tile=tile, bound=b, anchor=anchor, operands=form))
                at = {"centred": torch.tensor(-most, dtype=torch.float64), "first": sums[0], "middle": sums[tile // 2]}[anchor]
                for factor in ((sums - at).exp(), (at - sums).exp()):
                    if not bool((factor <= limits.max).all() and (factor >= limits.tiny).all()):
                        return False
        return True

    assert stands(bound * 0.999)
    assert not stands(bound * 1.1)


@pytest.mark.parametrize("anchor", ["centred", "first", "middle"])
def test_the_largest_safe_tile(anchor):
    tile = safe_tile(-5.0, anchor, "bfloat16")
    assert prove(Decay(tile=tile, anchor=anchor))[0].level == "ok"
    assert prove(Decay(tile=tile + 2, anchor=anchor))[0].level == "fault"
    assert safe_tile(-5.0, "first", "float32") == 18
    assert safe_tile(-5.0, "centred", "float32") == 35


@pytest.mark.parametrize("form", ["float16", "bfloat16", "float32"])
def test_rounding_is_the_formats_own(form):
    exponents = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 8
    x = torch.cat([exponents.exp2(), -exponents.exp2()]).double()  # float32 numbers: torch rounds a float64 one to 16 bits in two steps
    dtype = TORCH[form]
    expected = x.to(dtype).double()
    normal = (x.abs() >= torch.finfo(dtype).tiny) & (x.abs() < torch.finfo(dtype).max)
    assert torch.equal(rounded(x, form)[normal], expected[normal])
    assert torch.equal(
        rounded(torch.tensor([1e40, -1e40, 1e-46], dtype=torch.float64), form), torch.tensor([math.inf, -math.inf, 0.0]).double()
    )


def test_slow_decays_lost_in_bfloat16_are_those_torch_loses():
    lost = 2.0 ** -(FORMATS["bfloat16"][2] + 1)
    assert torch.tensor(1 - 0.99 * lost, dtype=torch.float64).bfloat16() == 1
    assert torch.tensor(1 - 1.01 * lost, dtype=torch.float64).bfloat16() < 1


@pytest.fixture(scope="module")
def model():
    import atoll

    torch.manual_seed(0)
    return atoll.load("tiny", dtype=torch.float32)


def test_on_activations(model):
    ids = torch.randint(3, 4096, (1, 256), generator=torch.Generator().manual_seed(0))
    layers, findings = look(model, ids, Decay())
    assert [row["layer"] for row in layers] == [i for i in range(5) if model.config.is_kda(i)]
    assert all(-5 <= row["strongest"] < 0 for row in layers)
    assert all(0 < row["product_error"] < 0.02 for row in layers)
    assert {f.what for f in findings} >= {"tiles on this text", "slow channels on this text", "near-tied experts"}
    low, middle, high = layers[0]["half_life"]
    assert low < middle < high


def test_a_gate_that_saturates_breaks_wide_tiles_and_not_the_blueprints(model):
    ids = torch.randint(3, 4096, (1, 256), generator=torch.Generator().manual_seed(0))
    layer = model.language_model.model.layers[0].self_attn
    kept = layer.dt_bias.detach().clone()
    with torch.no_grad():
        layer.dt_bias[: layer.dt_bias.numel() // 2] = 12.0
    try:
        assert report(Decay(), model, ids)["ok"]
        found = report(Decay(tile=32, anchor="first"), model, ids)
    finally:
        with torch.no_grad():
            layer.dt_bias.copy_(kept)
    assert found["layers"][0]["product_error"] == math.inf
    assert found["layers"][0]["at_bound"] > 0.4
    assert "tiles on this text" in faults(found)


def test_sums_in_bfloat16_show_in_the_products(model):
    ids = torch.randint(3, 4096, (1, 256), generator=torch.Generator().manual_seed(0))
    exact, rough = (look(model, ids, Decay(gate=gate, operands="float32"))[0][0]["product_error"] for gate in ("float32", "bfloat16"))
    assert rough > 1000 * exact


def test_the_verb(tmp_path, capsys, model):
    assert cli.main(["audit", "tiny"]) == 0
    assert "Safe." in capsys.readouterr().out
    assert cli.main(["audit", "none", "--bound", "none", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert cli.main(["audit", "none", "--tile", "32", "--bound", "-2.5", "--anchor", "first"]) == 0
    capsys.readouterr()
    model.save_pretrained(tmp_path / "folder")
    assert cli.main(["audit", str(tmp_path / "folder"), "--tokens", "64"]) == 0
    assert "On 64 tokens of random tokens:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tiny", "--bound", "3"], 'bound = 3.0: a number below 0 is expected, or "none"'),
        (["tiny", "--tile", "0"], "tile = 0: 1 to chunk = 64 tokens are expected"),
        (["tiny", "--text", "x"], "a preset has no weights"),
        (["none", "--text", "x"], "text = 'x': there is no model to run on it"),
        (["tiny", "--tokens", "0"], "tokens = 0: 1 or more"),
        (["nothing-here"], "no such preset or file"),
    ],
)
def test_mistakes_are_one_line(words, says, capsys):
    assert cli.main(["audit", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_rendering_names_every_finding():
    found = audit("tiny", {"operands": "float16"})
    text = render(found)
    assert all(f["what"] in text for f in found["findings"])
    assert "FAULT" in text
    assert settings_of.__doc__
