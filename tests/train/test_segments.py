"""A row computed in segments: loss, every gradient, routing counts and the optimizer's step equal the whole row's, in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.config import Config, ConfigError, load_config
from atoll.data.loader import Batch
from atoll.model import Model
from atoll.train.segments import Segments, cut
from atoll.train.step import accumulate

SHAPE: dict[str, Any] = {
    "model.vocab_size": 60,
    "model.hidden_size": 16,
    "model.num_hidden_layers": 5,
    "model.num_attention_heads": 2,
    "model.kda_num_heads": 2,
    "model.kda_head_dim": 8,
    "model.q_lora_rank": 8,
    "model.kv_lora_rank": 8,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 6,
    "model.intermediate_size": 24,
    "model.moe_intermediate_size": 8,
    "model.routed_expert_hidden_size": 8,
    "model.num_experts": 8,
    "model.num_experts_per_token": 2,
    "model.attn_res_block_size": 2,
}


def config_for(**changes: Any) -> Config:
    return load_config("tiny", SHAPE | {k.replace("__", "."): v for k, v in changes.items()})


def model_of(config: Config) -> Model:
    torch.manual_seed(0)
    model = Model(config.model, config.balance, dtype=torch.float64)
    with torch.no_grad():  # off the symmetric start, where some gradients vanish
        for name, p in model.named_parameters():
            if "res_proj" in name or name.endswith("A_log"):
                p += torch.randn_like(p) * 0.3
    return model.train()


def batch_of(rows: list[list[int]]) -> Batch:
    """Rows of documents of these lengths, random tokens."""
    sizes = [n for row in rows for n in row]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (1, sum(sizes)), generator=generator)
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    labels = ids.clone()
    labels[0, bounds[:-1]] = -100
    return Batch(ids, labels, bounds, 0)


def learnt(config: Config, batches: list[Batch], segments: Segments | None, **model_options: Any) -> dict[str, Tensor]:
    model = model_of(config)
    for name, value in model_options.items():
        setattr(model, name, value)
    loss, targets = accumulate(model, batches, segments=segments)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    counts = {f"counts.{i}": layer.counts() for i, layer in enumerate(model.moe_layers()) if layer.counts() is not None}
    loads = {f"load.{i}": layer.load for i, layer in enumerate(model.moe_layers())}
    return {"loss": loss, "targets": torch.tensor(targets), **found, **counts, **loads}


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert mine.keys() == theirs.keys()
    assert len(mine) > 100
    for name, a in mine.items():
        b = theirs[name]
        assert a is not None
        assert float((a - b).double().abs().max()) <= tolerance * max(1.0, float(b.double().abs().max())), name


LONG = [[90], [20, 44, 26], [64, 26], [1, 1, 88], [70, 20]]  # documents over two and three segments, cut where a segment is, of one token


@pytest.mark.parametrize("size", [32, 30, 64, 7, 2])
def test_segments_equal_whole_rows(size: int) -> None:
    config, batches = config_for(), [batch_of(LONG[:3]), batch_of(LONG[3:])]
    assert_same(learnt(config, batches, Segments(90, size)), learnt(config, batches, None))


def test_what_is_compared_says_something() -> None:
    whole = learnt(config_for(), [batch_of(LONG)], None)
    gradients = [t for n, t in whole.items() if "." in n and not n.startswith(("counts", "load"))]
    assert all(float(g.abs().max()) > 1e-9 for g in gradients)
    cut_off = learnt(config_for(), [batch_of([[30, 30, 30]])], None)
    joined = learnt(config_for(), [batch_of([[90]])], None)
    assert not torch.allclose(cut_off["loss"], joined["loss"], atol=1e-6), "a state that is not carried would show"


@pytest.mark.parametrize("how", ["offload", "recompute", "plain", "aux"])
def test_segments_equal_whole_rows_with(how: str) -> None:
    options = {"plain": {"model__residual": "plain"}, "aux": {"balance__kind": "aux"}}.get(how, {})
    config, batches = config_for(**options), [batch_of(LONG)]
    model_options = {"gradient_checkpointing": True} if how == "recompute" else {}
    segmented = learnt(config, batches, Segments(90, 32, offload=how == "offload"), **model_options)
    assert_same(segmented, learnt(config, batches, None))


def test_a_long_row() -> None:
    config, batches = config_for(), [batch_of([[5000, 3192]])]
    assert_same(learnt(config, batches, Segments(8192, 1024)), learnt(config, batches, None))


def test_activations_are_those_of_one_segment() -> None:
    """Tensors saved for the backward pass at once: as many for a row of eight segments as for one of two."""

    def saved(tokens: int) -> int:
        held = peak = 0

        def pack(t: Tensor) -> tuple[Tensor, int]:
            nonlocal held, peak
            held += t.numel()
            peak = max(peak, held)
            return t, t.numel()

        def unpack(kept: tuple[Tensor, int]) -> Tensor:
            nonlocal held
            held -= kept[1]
            return kept[0]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            accumulate(model_of(config_for(model__full_attn_layers=[])), [batch_of([[tokens]])], segments=Segments(tokens, 64))
        return peak

    assert saved(1024) < 1.3 * saved(128)


def test_cutting() -> None:
    shares = cut([0, 10, 40, 64], 0, 64, 16)
    assert [(s.start, s.stop, s.bounds, s.before) for s in shares] == [
        (0, 16, [0, 10, 16], 0),
        (16, 32, [0, 16], 6),
        (32, 48, [0, 8, 16], 22),
        (48, 64, [0, 16], 8),
    ]
    assert [s.stop for s in cut([0, 50], 0, 50, 20)] == [20, 40, 50]


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"stages\.0\.offload = True: nothing waits"):
        load_config("tiny", {"stages.0.offload": "true"})
    with pytest.raises(ConfigError, match=r"stages\.0\.segment = 0"):
        load_config("tiny", {"stages.0.segment": "0"})
    from atoll.parallel import check

    config = load_config("tiny", {"stages.0.segment": "128", "parallel.context": "2"})
    with pytest.raises(ConfigError, match=r"parallel\.context = 2: does not go with stages\.0\.segment = 128"):
        check(dataclasses.replace(config), 2)
