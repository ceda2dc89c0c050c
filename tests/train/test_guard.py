"""The guard: what is not finite, and what is a spike, never reaches the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import metrics, micro_config

from atoll import train
from atoll.config import UserError
from atoll.train import step as step_module
from atoll.train.guard import SETTLE, Guard


def judge(guard: Guard, norm: float, loss: float = 1.0) -> bool:
    return bool(guard.judge(torch.tensor(loss), torch.tensor(norm)))


def test_skips_what_is_not_finite_from_the_first_step_on() -> None:
    guard = Guard(3.0)
    assert judge(guard, float("nan"))
    assert judge(guard, float("inf"))
    assert judge(guard, 1.0, loss=float("nan"))
    assert int(guard.in_a_row) == 3
    assert not judge(guard, 1.0)
    assert (int(guard.skipped), int(guard.in_a_row), int(guard.seen)) == (3, 0, 1)
    assert float(guard.mean) == 1.0


def test_calls_a_spike_only_after_norms_have_settled() -> None:
    guard = Guard(3.0)
    assert not any(judge(guard, n) for n in [100.0, 1.0, *[1.0] * (SETTLE - 2)])
    for _ in range(100):
        judge(guard, 1.0)
    mean = float(guard.mean)
    assert not judge(guard, 2.9 * mean)
    assert judge(guard, 3.5 * float(guard.mean))
    assert judge(guard, 1e9)
    assert float(guard.mean) < 1.5  # one huge norm hardly moved it
    assert not judge(guard, 1.0)


def test_accepts_norms_that_rose_for_good() -> None:
    guard = Guard(3.0)
    for _ in range(50):
        judge(guard, 1.0)
    skipped = [judge(guard, 20.0) for _ in range(100)]
    assert skipped[0]
    assert not any(skipped[40:])


def test_without_a_factor_only_the_infinite_is_skipped() -> None:
    guard = Guard(None)
    for _ in range(50):
        judge(guard, 1.0)
    assert not judge(guard, 1e9)
    assert judge(guard, float("inf"))


def poison(monkeypatch: pytest.MonkeyPatch, at: int, factor: float) -> dict[str, dict[str, torch.Tensor]]:
    """Multiply all gradients of step `at` (0-based); the state before and after that step is put into the returned dict."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    calls = -1
    accumulate, judge_step = step_module.accumulate, step_module.train_step

    def spoiled(model, *args):
        loss = accumulate(model, *args)
        if calls == at:
            for p in model.parameters():
                p.grad.mul_(factor)
        return loss

    def watched(model, optimizer, *args):
        nonlocal calls
        calls += 1
        state = {**model.state_dict(), **optimizer.state()}
        if calls == at:
            seen["before"] = {n: t.clone() for n, t in state.items()}
        result = judge_step(model, optimizer, *args)
        if calls == at:
            seen["after"] = {n: t.clone() for n, t in state.items()}
        return result

    monkeypatch.setattr(step_module, "accumulate", spoiled)
    monkeypatch.setattr("atoll.train.trainer.train_step", watched)
    return seen


@pytest.mark.parametrize("factor", [float("nan"), 1e6])
def test_a_bad_step_leaves_weights_state_and_biases_untouched_and_is_said(
    standin_model: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float
) -> None:
    at = 11
    seen = poison(monkeypatch, at, factor)
    out = train.run(micro_config(tmp_path, train__steps=20), tmp_path / "run")
    assert all(torch.equal(seen["before"][n], seen["after"][n]) for n in seen["before"])
    steps = [line for line in metrics(out) if "loss" in line]
    assert [line["step"] for line in steps if line["skipped"]] == [at + 1]
    assert (steps[at]["grad_norm"] is None) == (factor != factor)
    text = capsys.readouterr().out
    assert f"step {at + 1} skipped: " + ("not finite" if factor != factor else "a spike") in text
    assert all(line["loss"] is not None for line in steps[at + 1 :])


def test_gives_up_when_every_step_is_bad(standin_model: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("atoll.train.trainer.GIVE_UP", 3)
    poison(monkeypatch, 0, 1.0)
    monkeypatch.setattr(Guard, "judge", lambda self, loss, norm: self.in_a_row.add_(1).clamp(max=1).float())
    with pytest.raises(UserError, match=r"optim\.lr = 0\.016: the last 3 steps had to be skipped"):
        train.run(micro_config(tmp_path), tmp_path / "run")
