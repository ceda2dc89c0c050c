"""The tensor axis: N processes that cut heads, widths and vocabulary among them = one, in float64 to 1e-9."""

from __future__ import annotations

import math
from typing import Any

import pytest
from ranks import on_ranks
from test_equal import alone, assert_equal
from training import config_for, layout, train_on

LAYOUTS: list[dict[str, int]] = [
    {"tensor": 2},
    {"data_shard": 2, "tensor": 2},
    {"data_replicate": 2, "tensor": 2},
    {"expert": 2, "tensor": 2},
    {"context": 2, "tensor": 2},
]


@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: "-".join(f"{k}{v}" for k, v in axes.items()))
def test_processes_equal_one(axes: dict[str, int]) -> None:
    config = layout(config_for(train__micro_batch=1 if "context" in axes else None), **axes)
    assert_equal(on_ranks(math.prod(axes.values()), train_on, config)[0], alone())
