"""`atoll selftest`: its checks pass here, notice what is wrong, and say so in the exit code, the table and the JSON."""

import json
import os

import pytest
import torch

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
DEVICE = torch.device("cuda" if CARD else "cpu")

from atoll import cli, selftest  # noqa: E402
from atoll.ops.dispatch import HAS_TRITON  # noqa: E402
from atoll.selftest import case, kda_cases, layer_cases  # noqa: E402


def test_all_checks_pass_on_a_cpu_and_say_that_no_kernel_ran(capsys):
    assert cli.main(["selftest", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "no kernel ran" in out
    assert "0 failed" in out
    for op in ("kda chunks", "kda_step", "short_conv", "gated_rms_norm"):
        assert op in out


def test_json_holds_every_row(capsys):
    assert cli.main(["selftest", "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"]
    assert result["paths"]["chunk"] > 0
    assert len(result["rows"]) == sum(len(room(False)) for room in selftest.ROOMS)
    assert all(row["ok"] and row["repeats"] and row["error"] <= row["limit"] for row in result["rows"])


def trial(got, expected, limit=1e-3):
    return lambda device: case.Trial(got, lambda: {"o": expected}, {"": limit})


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (trial(lambda: {"o": torch.full((4,), 1.01)}, torch.ones(4)), "FAILED"),
        (trial(lambda: {"o": torch.tensor([1.0, float("nan")])}, torch.ones(2)), "not finite"),
        (trial(lambda: {"o": torch.ones(4) + 1e-6 * torch.rand(4)}, torch.ones(4)), "OTHER BITS"),
        (trial(lambda: 1 / 0, torch.ones(4)), "ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_wrong_fails(build, word, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "ROOMS", (lambda card: [case.Case("op", "4", "float32", build)],))
    assert cli.main(["selftest", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert word in out
    assert "1 failed" in out


def test_a_wrong_twin_is_noticed(monkeypatch):
    from atoll.ops.kda import chunk_forward

    monkeypatch.setattr(chunk_forward, "L2_EPS", 1e-3)
    found = case.run_case(kda_cases.cases(False)[0], torch.device("cpu"), 1)
    assert not found["ok"]
    assert found["error"] > found["limit"]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton has no wheel for this platform")
@pytest.mark.parametrize(
    "check",
    [
        kda_cases._case("kda", (1, 70, 1, 16, 16), torch.float32, ("triton", "chunk"), [0, 0, 66, 70]),
        kda_cases._step(2, 1, 16, torch.float32),
        layer_cases._conv(20, 16, torch.float32, "triton"),
        *layer_cases._norms(5, 20, torch.float32, "triton"),
    ],
    ids=lambda check: check.op,
)
def test_the_checks_of_a_card_in_small(check):
    row = case.run_case(check, DEVICE, 1)
    assert row["ok"], row


def test_a_card_is_needed_for_its_checks(capsys):
    if CARD:
        pytest.skip("there is a card")
    assert cli.main(["selftest", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_a_card_checks_every_kernel_in_both_dtypes():
    cases = [c for room in selftest.ROOMS for c in room(True)]
    for op in ("kda", "kda packed", "kda segments", "kda_step", "short_conv", "rms_norm", "gated_rms_norm", "l2_norm"):
        assert {c.dtype for c in cases if c.op == op} == {"bfloat16", "float32"}, op
