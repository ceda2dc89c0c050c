"""N processes = one: loss, every gradient, the balancer's biases and all weights after three steps, in float64 to 1e-9."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from ranks import on_ranks
from training import config_for, layout, train, train_on

LAYOUTS = [{"data_shard": 2}, {"data_replicate": 2, "data_shard": 2}, {"expert": 2}, {"data_shard": 2, "expert": 2}]


@functools.cache
def alone() -> dict[str, Any]:
    return train(config_for())


def assert_equal(mine: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert mine["targets"] == theirs["targets"]
    for key in ("loss", "norm", "vio"):
        torch.testing.assert_close(torch.tensor(mine[key]), torch.tensor(theirs[key]), atol=tolerance, rtol=tolerance)
    for key in ("gradients", "weights", "state"):
        assert mine[key].keys() == theirs[key].keys()
        for name, a in mine[key].items():
            b = theirs[key][name]
            assert a.shape == b.shape, name
            assert a.dtype == b.dtype, name
            assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max())), (key, name)


def test_what_is_compared_says_something() -> None:
    found = alone()
    assert len(found["gradients"]) > 80
    assert all(float(g.abs().max()) > 1e-9 for g in found["gradients"].values())
    assert found["norm"][0] > 0.1
    biases = [t for n, t in found["weights"].items() if n.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    assert all(float(b.abs().max()) > 1e-6 for b in biases)


@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: "-".join(f"{k}{v}" for k, v in axes.items()))
def test_processes_equal_one(axes: dict[str, int]) -> None:
    config = layout(config_for(), **axes)
    found = on_ranks(math.prod(axes.values()), train_on, config)[0]
    assert_equal(found, alone())
