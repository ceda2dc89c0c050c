"""One step: the same gradients however it is split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import micro_config

from atoll.data import open_corpus
from atoll.data.loader import Sampler
from atoll.train.guard import Guard
from atoll.train.step import accumulate, micro_batches, train_step


@pytest.mark.parametrize("size", [1, 2, 3])
def test_another_split_gives_the_same_gradients_in_float64(tmp_path: Path, size: int) -> None:
    from atoll.model import Model

    config = micro_config(tmp_path)
    corpus = open_corpus(config.data, config.model)
    torch.manual_seed(0)
    model = Model(config.model, dtype=torch.float64)
    sampler, rows, length = Sampler(corpus.train, 32, 0), 8, 32
    whole = micro_batches(sampler, 0, rows, None)
    # The experts of the whole batch, an id list a layer, are replayed in every split.
    routing = model(whole[0].input_ids, cu_seqlens=whole[0].cu_seqlens).routing
    results = []
    for batches in (whole, micro_batches(sampler, 0, rows, size)):
        model.zero_grad()
        sizes = [b.input_ids.shape[1] for b in batches]
        parts = [ids.split(sizes) for ids in routing]
        loss, targets = accumulate(model, batches, [[layer[i] for layer in parts] for i in range(len(sizes))])
        results.append((loss, targets, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (loss, targets, grads), (other_loss, other_targets, other_grads) = results
    assert targets == other_targets == rows * length - sum(len(b.cu_seqlens) - 1 for b in whole)
    torch.testing.assert_close(loss, other_loss, atol=1e-12, rtol=1e-12)
    assert len(grads) > 60
    for a, b in zip(grads, other_grads, strict=True):
        assert float((a - b).abs().max()) <= 1e-9 * max(1.0, float(a.abs().max()))


def test_nan_inside_the_model_leaves_weights_state_and_router_biases_alone(tmp_path: Path) -> None:
    from atoll.train import setup

    config = micro_config(tmp_path)
    corpus = open_corpus(config.data, config.model)
    model, optimizer = setup.build(config)
    guard, sampler = Guard(3.0), Sampler(corpus.train, 32, 0)
    assert not train_step(model, optimizer, guard, micro_batches(sampler, 0, 8, None), 1.0).read()[2]
    weight = model.language_model.model.embed_tokens.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))  # every activation, score and margin is NaN
    before = {n: t.clone() for n, t in [*model.state_dict().items(), *optimizer.state().items()]}
    assert train_step(model, optimizer, guard, micro_batches(sampler, 8, 8, None), 1.0).read()[2]
    after = dict([*model.state_dict().items(), *optimizer.state().items()])
    assert all(before[n].numpy().tobytes() == after[n].numpy().tobytes() for n in before)
    with torch.no_grad():
        weight.copy_(kept)
    loss, norm, skipped, _ = train_step(model, optimizer, guard, micro_batches(sampler, 16, 8, None), 1.0).read()
    assert not skipped
    assert 0 < loss < 7
    assert 0 < norm < 10
