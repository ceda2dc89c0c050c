"""The K3-style golden checkpoint: strict load, logits, depth stream, decode and gradients against independent numbers."""

from __future__ import annotations

import pytest
import torch
from hub.golden import ATOL, arrays, check_gradients, decode, distance, model, packed_logits

from atoll.nn.block_residual import read

FOLDER = "k3_tiny"


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


def test_token_by_token_from_the_start(m, io):
    """Every token through the decode path: states and latents grow from nothing."""
    ids = io["input_ids"][:, :20]
    with torch.no_grad():
        _, rest = decode(m, ids, 1, 19)
    assert distance(rest, io["logits"][:, 1:20]) < ATOL


def test_stream_over_depth(m, io):
    """Running block sum after each layer, finished blocks, and what the final norm is applied to."""
    seen = []
    decoder = m.language_model.model
    hooks = [layer.register_forward_hook(lambda _m, _a, out: seen.append(out)) for layer in decoder.layers]
    with torch.no_grad():
        m(io["input_ids"])
    for hook in hooks:
        hook.remove()
    for i, stream in enumerate(seen):
        assert distance(stream.settle().prefix[0], io[f"prefix_after_layer.{i}"]) < ATOL, i
    assert distance(torch.stack(seen[-1].bank)[:, 0], io["bank"]) < ATOL
    assert distance(read(seen[-1], decoder.output_reader())[0][0], io["output_mix"]) < ATOL


def test_gradients_in_float64(io):
    check_gradients(model(FOLDER, torch.float64), io["input_ids"], arrays(FOLDER, "grads"), rtol=1e-5)


def test_the_first_layers_unused_mix_has_no_gradient(io):
    m = model(FOLDER, torch.float64)
    m(io["input_ids"], labels=io["input_ids"]).loss.backward()
    without = {name for name, p in m.named_parameters() if p.grad is None or not p.grad.any()}
    prefix = "language_model.model.layers.0.self_attention_res"
    assert without == {f"{prefix}_norm.weight", f"{prefix}_proj.weight"}
