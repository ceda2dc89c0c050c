"""A model cut into stages = the whole one: loss, every gradient, biases and weights after three steps, in float64 to 1e-9."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import on_ranks
from test_equal import assert_equal
from training import BATCH, LENGTH, config_for, layout, text, train, train_on

from atoll.config import Config

SIX = {"model__num_hidden_layers": 6, "train__micro_batch": 1}  # blocks of two layers
FAST: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pipeline": 2}, {"train__gradient_checkpointing": True}),  # cut in the middle of a block
    ({"pipeline": 2, "pipeline_virtual": 2, "pipeline_cut": (1, 4, 5)}, {**SIX, "balance__kind": "aux"}),
    ({"pipeline": 4}, {"model__num_hidden_layers": 7, "model__attn_res_block_size": 3}),
    ({"pipeline": 2, "expert": 2}, {}),
    ({"pipeline": 2, "context": 2}, {}),
    ({"pipeline": 2, "tensor": 2}, {}),
]
SLOW: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pipeline": 2, "pipeline_cut": (2,)}, {"train__micro_batch": 2}),  # at a block's end, two rows a micro-batch
    ({"pipeline": 2, "pipeline_virtual": 3}, SIX),
    ({"pipeline": 2, "data_shard": 2}, {"balance__kind": "aux"}),
    ({"pipeline": 2, "data_replicate": 2}, {"balance__kind": "sign"}),
    ({"pipeline": 4, "pipeline_virtual": 2}, {"model__num_hidden_layers": 8, "model__attn_res_block_size": 3}),
    ({"pipeline": 2, "pipeline_virtual": 2, "expert": 2}, {**SIX, "train__gradient_checkpointing": True}),
    ({"pipeline": 2, "pipeline_virtual": 2, "context": 2}, {**SIX, "train__gradient_checkpointing": True}),
    ({"pipeline": 2, "pipeline_virtual": 2, "tensor": 2}, {**SIX, "train__gradient_checkpointing": True, "balance__kind": "aux"}),
    ({"pipeline": 2, "pipeline_virtual": 2}, {**SIX, "model__residual": "full"}),
    ({"pipeline": 2, "pipeline_virtual": 2}, {**SIX, "model__residual": "plain"}),
    ({"pipeline": 2}, {"balance__kind": "quantile", "balance__asynchronous": True, "balance__ema": 0.5}),
    ({"pipeline": 2}, {"balance__kind": "local_quantile"}),
    ({"pipeline": 2}, {"balance__kind": "capacity", "balance__capacity_factor": 1.0}),
]


def named(case: Any) -> str:
    return "-".join(f"{k.split('__')[-1]}{v}" for k, v in case.items()) or "-"


def processes_of(axes: dict[str, Any]) -> int:
    return math.prod(n for name, n in axes.items() if name not in ("pipeline_virtual", "pipeline_cut"))


@pytest.mark.parametrize(("axes", "changes"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=named)
def test_stages_equal_the_whole_model(axes: dict[str, Any], changes: dict[str, Any]) -> None:
    config = config_for(**{"train__micro_batch": 1, **changes})
    found, one = on_ranks(processes_of(axes), train_on, layout(config, **axes))[0], train(config)
    if config.balance.asynchronous:  # its report is not waited for: each process has its own tokens'
        found["vio"] = one["vio"]
    assert_equal(found, one)


# ---------------------------------------------------------------- what travels


def bytes_on(config: Config) -> list[int]:
    """Bytes that this process sends in a step, and its parameters, embedding and head among them."""
    import torch.distributed as dist

    from atoll.data.loader import Sampler
    from atoll.parallel.ranks import Ranks
    from atoll.train import setup
    from atoll.train.guard import Guard
    from atoll.train.step import micro_batches, train_step

    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    model, optimizer = setup.build(config, ranks=ranks)
    batches = micro_batches(Sampler(text(config.model), LENGTH, 0), 0, BATCH, config.train.micro_batch)
    train_step(model, optimizer, Guard(None), batches, 0.5, ranks)
    assert not model._flights[0].blocks  # nothing is kept that has gone home
    assert not any(flight.owed for flight in model._flights.values())
    return [model.wire.sent_bytes, sum(p.numel() for p in model.parameters())]


def test_what_a_process_has_seen_is_not_sent_again() -> None:
    """Three chunks on each of two processes, one block of one layer a stage: the cost of arXiv 2603.15031 §4.1, both ways."""
    changes = {"model__num_hidden_layers": 6, "model__attn_res_block_size": 1, "train__micro_batch": 1}
    config = layout(config_for(**changes), pipeline=2, pipeline_virtual=3)
    sent = on_ranks(2, bytes_on, config)
    row = BATCH * LENGTH * config.model.hidden_size * 8  # bytes of one source of all tokens
    p, v, n = 2, 3, 1
    published = p * (p - 1) // 2 * n + (v - 1) * p * p * n
    naive = sum(1 + s * n for s in range(1, p * v))
    # The embedding is one more source, in the first round; and of p n blocks of a later hop, n were finished by the receiver itself.
    expected = published + (p - 1) - (v - 1) * p * (n - 1)
    assert sum(number for number, _ in sent) == 2 * row * expected
    assert expected < naive
    assert sum(count for _, count in sent) == sum(p.numel() for p in whole_model(config).parameters())


def whole_model(config: Config) -> torch.nn.Module:
    from atoll.model import Model

    return Model(config.model, device="meta")


# ---------------------------------------------------------------- evaluation


def evaluated_on(config: Config) -> dict[str, Any]:
    """What the model gives before training: loss and logits of packed documents, sampled tokens, probes."""
    import torch.distributed as dist

    from atoll.infer.generate import generate
    from atoll.parallel.ranks import ALONE, Ranks
    from atoll.train import setup

    ranks = Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE
    model, _ = setup.build(config, ranks=ranks)
    model.eval()
    ids = torch.arange(40).remainder(50)[None] + 5
    record: dict[str, Any] = {}
    with torch.inference_mode():
        out = model(ids, labels=ids, cu_seqlens=torch.tensor([0, 7, 24, 40]), logits=True, record=record)
    sampled = generate(model, ids[:, :9], 6, seed=3, cache=(cache := model.new_cache(1)))
    found = {"loss": float(out.loss), "targets": int(out.num_targets), "logits": out.logits.clone(), "sampled": sampled}
    return {**found, "record": record, "length": cache.length}


@pytest.mark.parametrize("virtual", [1, 3])
def test_every_process_evaluates_and_samples_as_one_does(virtual: int) -> None:
    config = config_for(**SIX)
    one = evaluated_on(config)
    for found in on_ranks(2, evaluated_on, layout(config, pipeline=2, pipeline_virtual=virtual)):
        assert found["loss"] == pytest.approx(one["loss"], abs=1e-12)
        assert found["targets"] == one["targets"]
        torch.testing.assert_close(found["logits"], one["logits"], atol=1e-10, rtol=0)
        assert torch.equal(found["sampled"], one["sampled"])
        assert found["length"] == one["length"] == 14
        assert found["record"].keys() == one["record"].keys()
        for key, rows in one["record"].items():
            assert len(found["record"][key]) == len(rows), key
            for mine, theirs in zip(found["record"][key], rows, strict=True):
                assert_alike(mine, theirs)


def assert_alike(mine: Any, theirs: Any) -> None:
    """Entries of a record: tensors, or a name or number before them."""
    if isinstance(theirs, tuple):
        for a, b in zip(mine, theirs, strict=True):
            assert_alike(a, b)
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, atol=1e-7, rtol=0, equal_nan=True)
    else:
        assert mine == theirs
