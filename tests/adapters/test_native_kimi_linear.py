"""The flat form and transformers' own `kimi_linear` class: the same logits, gradients and training; its folders come back."""

from __future__ import annotations

import json

import pytest
import torch
from adapters.remote_models import tokens
from hub.golden import arrays, model
from transformers import AutoModelForCausalLM

from atoll.hub import export
from atoll.hub.layout import slots
from atoll.model import load

IDS = arrays("kimi_linear_tiny", "io")["input_ids"]


def differs(a, b) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max())


@pytest.fixture
def both(tmp_path):
    ours = model("kimi_linear_tiny", torch.float32)
    export.save(ours, tmp_path / "a")
    assert "auto_map" not in json.loads((tmp_path / "a" / "config.json").read_text())
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert type(theirs).__module__ == "transformers.models.kimi_linear.modeling_kimi_linear"
    return ours, theirs


def named_gradients(theirs, folder) -> dict[str, torch.Tensor]:
    """Gradients under the folder's names: saved by transformers in place of the weights."""
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(p.grad)
    theirs.save_pretrained(folder)
    holder = load(folder)
    return {slot.name: slot.tensor for slot in slots(holder)}


def test_logits_and_gradients_agree(both, tmp_path):
    ours, theirs = both
    with torch.no_grad():
        assert differs(ours(IDS).logits, theirs(IDS).logits) < 1e-4
    mine, other = ours(IDS, labels=IDS).loss, theirs(IDS, labels=IDS).loss
    assert differs(mine, other) < 1e-5
    mine.backward()
    other.backward()
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    found = named_gradients(theirs, tmp_path / "g")
    for slot in slots(ours):
        if "e_score_correction_bias" not in slot.name:
            size = float(slot.tensor.double().norm())
            assert float((found[slot.name].double() - slot.tensor.double()).norm()) <= 1e-4 * size + 1e-9, slot.name


def test_training_stays_together(both):
    ours, theirs = both
    losses = []
    for m in (ours, theirs):
        m.train()
        optimizer = torch.optim.SGD(m.parameters(), lr=0.02)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = m(IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert losses[0][2] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0, atol=1e-3)


def test_what_the_native_class_saves_is_read(both, tmp_path):
    """It names the dense layer as sparse ones; see `atoll.hub.load`."""
    ours, theirs = both
    theirs.save_pretrained(tmp_path / "b")
    assert torch.equal(load(tmp_path / "b")(IDS).logits, ours(IDS).logits)


def test_greedy_text_is_the_native_class_own(both):
    ours, theirs = both
    prompt = tokens(1, 20, vocab=256)
    expected = theirs.generate(prompt, max_new_tokens=32, do_sample=False, eos_token_id=None)
    assert torch.equal(ours.generate(prompt, max_new_tokens=32, temperature=0), expected)


def test_loading_our_code_leaves_the_native_class_alone(both, tmp_path):
    """Conversion mappings are registered per process: ours must not reach the native class."""
    from atoll.hub.remote import modeling_kimi_k3  # noqa: F401

    _, theirs = both
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(again(IDS).logits, theirs(IDS).logits)
