"""The plan: steps to stages to global sample indices."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import micro_config
from hypothesis import given
from hypothesis import strategies as st

from atoll.config import StageConfig
from atoll.data.loader import Sampler
from atoll.train.stages import plan, stage_at
from atoll.train.step import micro_batches


@given(st.integers(1, 10_000), st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_stages_tile_the_run(steps: int, weights: list[int]) -> None:
    shares = [w / sum(weights) for w in weights]
    stages = plan(tuple(StageConfig(str(i), 2**i, s, 3) for i, s in enumerate(shares)), steps)
    assert stages[0].start == 0
    assert stages[-1].stop == steps
    assert all(a.stop == b.start for a, b in itertools.pairwise(stages))
    assert all(abs((s.stop - s.start) - share * steps) <= 1 for s, share in zip(stages, shares, strict=True))
    for step in {0, steps // 2, steps - 1}:
        stage = stage_at(stages, step)
        assert stage.start <= step < stage.stop
        assert stage.first_sample(step) == (step - stage.start) * 3


def test_a_step_outside_the_plan_is_an_error() -> None:
    stages = plan((StageConfig(),), 5)
    with pytest.raises(IndexError):
        stage_at(stages, 5)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100, None])
def test_any_split_reads_the_same_samples(tmp_path, size) -> None:
    from atoll.data import open_corpus

    config = micro_config(tmp_path)
    corpus = open_corpus(config.data, config.model)
    sampler = Sampler(corpus.train, 32, 0)
    whole, parts = micro_batches(sampler, 5, 8, None), micro_batches(sampler, 5, 8, size)
    assert len(whole) == 1
    assert torch.equal(whole[0].input_ids, torch.cat([b.input_ids for b in parts], 1))
    assert torch.equal(whole[0].labels, torch.cat([b.labels for b in parts], 1))
    assert whole[0].num_bytes == sum(b.num_bytes for b in parts)
