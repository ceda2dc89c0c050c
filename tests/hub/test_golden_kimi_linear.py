"""The Kimi-Linear golden checkpoint: flat names, softplus decay, low-rank gate, plain residual, full-width SwiGLU experts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hub.golden import ATOL, GOLDEN, arrays, check_gradients, decode, distance, model, packed_logits

from atoll.hub.load import load_into, read_config
from atoll.model import Model

FOLDER = "kimi_linear_tiny"


@pytest.fixture(scope="module")
def io():
    return arrays(FOLDER, "io")


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=["float32", "float64"])
def m(request):
    return model(FOLDER, request.param)


def test_whole_sequences(m, io):
    with torch.no_grad():
        assert distance(m(io["input_ids"]).logits, io["logits"]) < ATOL
        assert distance(m(io["input_ids_long"]).logits, io["logits_long"]) < ATOL
        assert distance(packed_logits(m, io), io["logits_packed"]) < ATOL


def test_prefill_then_token_by_token(m, io):
    with torch.no_grad():
        first, rest = decode(m, io["input_ids"], 50, 5)
    assert distance(first, io["logits"][:, :50]) < ATOL
    assert distance(rest, io["decode_logits"]) < ATOL


def test_residual_stream(m, io):
    seen = []
    hooks = [layer.register_forward_hook(lambda _m, _a, out: seen.append(out)) for layer in m.language_model.model.layers]
    with torch.no_grad():
        m(io["input_ids"])
    for hook in hooks:
        hook.remove()
    for i, stream in enumerate(seen):
        assert distance(stream.settle().prefix[0], io[f"hidden_after_layer.{i}"]) < ATOL, i


def test_weights_from_biased_scores(io):
    """The released remote code weighs experts by the biased scores; a setting follows it."""
    config = dataclasses.replace(read_config(GOLDEN / FOLDER), router_weights="biased")
    m = Model(config, dtype=torch.float64).eval()
    load_into(m, GOLDEN / FOLDER)
    golden = arrays(FOLDER, "io_biased_router")
    with torch.no_grad():
        logits = m(io["input_ids"]).logits
    assert distance(logits, golden["logits_biased_router"]) < ATOL
    assert distance(logits, io["logits"]) > 1


def test_gradients_in_float64(io):
    check_gradients(model(FOLDER, torch.float64), io["input_ids"], arrays(FOLDER, "grads"), rtol=1e-4)
