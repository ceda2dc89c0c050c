"""benchmarks/scale.py on two processes with tiny shapes: it checks, times and reports every axis there is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks

from atoll.config import UserError
from atoll.parallel.ranks import ALONE, Ranks


def benchmark() -> Any:
    import sys

    spec = importlib.util.spec_from_file_location("scale", Path(__file__).parents[2] / "benchmarks" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["scale"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def smoke() -> dict[str, Any]:
    import torch.distributed as dist

    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    return benchmark().measure(ranks, "tiny", "tiny", True, [])


def test_every_axis_is_checked_and_timed() -> None:
    found = on_ranks(2, smoke, timeout=120)[0]
    axes = {"fsdp", "expert", "tensor", "context", "pipeline"}
    assert found["difference"].keys() == axes
    assert found["steps"].keys() == {"one", *axes}
    assert all(found["steps"][name]["efficiency"] > 0 for name in axes)
    assert found["context_exchange"]["exchange"] > 0
    assert found["save"]["bytes"] > 1000
    assert found["save"]["second_written"] > 0


def test_one_process_is_told_how_to_start_it() -> None:
    with pytest.raises(UserError, match="torchrun --nproc-per-node 2"):
        benchmark().measure(ALONE, "tiny", "tiny", True, [])
