"""Operations counted from the config against torch's own counter on the model built, and against published figures of the blueprint."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import atoll
from atoll.config import load_config, presets
from atoll.nn.block_residual import Stream
from atoll.nn.linear import Linear
from atoll.plan import flops
from atoll.plan import parameters as p


@pytest.mark.parametrize("preset", ["tiny", "mini", "kimi-linear-tiny"])
def test_products_with_weights_are_those_that_torch_counts(preset):
    """Every Linear, the router and the head, one token each; experts by their definition."""
    model = atoll.load(preset)
    c = model.config
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for module in model.modules():
            if isinstance(module, Linear):
                module(torch.zeros(1, module.weight.shape[1]))
        for layer in model.moe_layers():
            layer.gate(torch.zeros(1, c.hidden_size))
    counted = flops.matrices(c)
    filters = 2 * p.kda_layers(c) * 3 * c.kda_num_heads * c.kda_head_dim * c.short_conv_kernel_size
    assert counter.get_total_flops() == sum(counted.values()) - counted[p.ROUTED] - filters
    layer = model.moe_layers()[0].experts
    one = sum(w[0].numel() for w in (layer.w1, layer.w2, layer.w3))
    assert counted[p.ROUTED] == 2 * len(model.moe_layers()) * c.num_experts_per_token * one


@pytest.mark.parametrize("preset", presets())
def test_they_are_twice_the_active_parameters_but_for_norms_and_biases(preset):
    c = load_config(preset).model
    counts = p.count(c)
    left_out = 2 * counts.active - sum(flops.matrices(c).values())
    small = counts[p.NORMS].active + counts[p.RESIDUAL].active
    assert 0 < left_out / 2 - small < 0.003 * counts.active  # router biases, decays, the norms within mixers


@pytest.mark.parametrize("residual", ["block", "full", "plain"])
def test_rows_read_over_depth_are_those_that_the_model_reads(residual, monkeypatch):
    model = atoll.load("tiny") if residual == "block" else None
    c = load_config("tiny", {"model.residual": residual}).model
    if model is None:
        from atoll.model import Model

        model = Model(c)
    seen, rows = [], Stream.rows
    record: dict = {}
    monkeypatch.setattr(Stream, "rows", lambda self: seen.append(1) or rows(self))
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64), record=record)
    read = sum(len(weights) for _, weights in record.get("depth_weights", []))
    first = 0 if residual == "plain" else 1  # the first sublayer reads the embedding alone: no mix is recorded
    assert flops.mixed_rows(c) == read + first


def test_attention_is_half_a_square_and_the_rest_does_not_grow():
    c = load_config("blueprint").model
    short, long = (flops.forward(c, n) for n in (8192, 16384))
    assert {k for k in short if short[k] != long[k]} == {flops.ATTENTION}
    assert long[flops.ATTENTION] == 2 * short[flops.ATTENTION]
    per_layer = 2 * 96 * (192 + 128) * 8192 / 2
    assert short[flops.ATTENTION] == 24 * per_layer
    assert flops.training(c, 8192) == 3 * sum(short.values())
