"""Layouts: which there can be, and one line with the nearest for those that cannot."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ranks import on_ranks
from training import config_for, layout

from atoll.config import ConfigError, ParallelConfig
from atoll.parallel import check, place


@pytest.mark.parametrize(
    ("axes", "processes"),
    [({}, 1), ({"data_shard": 8}, 8), ({"data_replicate": 2, "data_shard": 2, "expert": 2}, 8), ({"expert": 4}, 4)],
)
def test_what_can_be(axes: dict[str, int], processes: int) -> None:
    check(layout(config_for(stages__1__batch=8), **axes), processes)


WRONG = [
    ({}, 2, "parallel.data_shard = 1: ", "is for 1 processes and 2 run", "data_shard = 2, expert = 1, context = 1"),
    ({"data_shard": 4}, 1, "parallel.data_shard = 4: ", "is for 4 processes and 1 run", "start them by torchrun --nproc-per-node 4"),
    (
        {"data_shard": 3},
        3,
        "parallel.data_shard = 3: ",
        "3 processes do not divide stages.0.batch = 8",
        "data_shard = 4, expert = 1, context = 1, tensor = 1 on 4",
    ),
    (
        {"expert": 8},
        4,
        "parallel.expert = 8: ",
        "is for 8 processes and 4 run",
        "data_shard = 1, expert = 4, context = 1",
    ),
    (
        {"data_shard": 0},
        1,
        "parallel.data_shard = 0: ",
        "1 or more is expected",
        "data_shard = 1, expert = 1, context = 1",
    ),
    (
        {"context": 3},
        3,
        "parallel.context = 3: ",
        "does not cut stages.0.length = 16 into even shares",
        "context = 4, tensor = 1 on 4 processes",
    ),
    ({"context": 8}, 8, "parallel.context = 8: ", "longer than a convolution", "expert = 1, context = 4"),
    (
        {"tensor": 4},
        4,
        "parallel.tensor = 4: ",
        "does not divide model.kda_num_heads = 2",
        "data_shard = 2, expert = 1, context = 1, tensor = 2",
    ),
]


@pytest.mark.parametrize(("axes", "processes", "start", "middle", "end"), WRONG)
def test_what_cannot_is_said_in_one_line_with_the_nearest(axes: dict[str, int], processes: int, start: str, middle: str, end: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(layout(config_for(stages__1__batch=8), **axes), processes)
    text = str(refused.value)
    assert text.startswith(start)
    assert middle in text
    assert end in text
    assert "\n" not in text


def test_experts_and_micro_batches_must_divide() -> None:
    with pytest.raises(
        ConfigError, match=r"parallel.expert = 4: does not divide model.num_experts = 6; .* expert = 2, context = 1, tensor = 1$"
    ):
        check(layout(config_for(model__num_experts=6), expert=4), 4)
    with pytest.raises(ConfigError, match=r"a process's 4 sequences of stages.0 are no multiple of train.micro_batch = 3"):
        check(layout(config_for(train__micro_batch=3, stages__0__batch=12, stages__1__batch=12), data_shard=3), 3)
    with pytest.raises(ConfigError, match=r"balance.bins = None: exact quantiles cannot be pooled"):
        check(layout(config_for(balance__bins="none"), data_shard=2), 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__vocab_size": 61}, "does not divide model.vocab_size = 61"),
        ({"model__num_attention_heads": 3}, "does not divide model.num_attention_heads = 3"),
        ({"model__intermediate_size": 25}, "does not divide model.intermediate_size = 25"),
        ({"model__num_shared_experts": 1, "model__moe_intermediate_size": 9}, r"num_shared_experts \* model.moe_intermediate_size = 9"),
        ({"balance__kind": "capacity"}, "balances by counts of whole micro-batches"),
        ({"balance__kind": "local_quantile"}, "balances by counts of whole micro-batches"),
    ],
)
def test_what_the_tensor_axis_cuts_must_divide(changes: dict[str, Any], said: str) -> None:
    config = config_for(**changes)
    with pytest.raises(ConfigError, match=rf"^parallel.tensor = 2: .*{said}.*; the nearest possible layout is .* tensor = 1$"):
        check(layout(config, tensor=2), 2)


def test_processes_that_cut_a_row_read_the_same_samples() -> None:
    p = ParallelConfig(data_shard=2, context=2, expert=2)
    assert [place(p, rank) for rank in range(8)] == [(0, 4), (1, 4), (0, 4), (1, 4), (2, 4), (3, 4), (2, 4), (3, 4)]
    heads = ParallelConfig(data_shard=2, expert=2, tensor=2)
    assert [place(heads, rank) for rank in range(8)] == [(0, 4), (0, 4), (1, 4), (1, 4), (2, 4), (2, 4), (3, 4), (3, 4)]
    assert [place(ParallelConfig(pipeline=2, data_shard=2, tensor=2), rank) for rank in range(8)] == [(0, 2), (0, 2), (1, 2), (1, 2)] * 2


def three_places() -> tuple[int, int, int]:
    from atoll.parallel import make_mesh

    mesh = make_mesh(ParallelConfig(1, 2, 2), "cpu")
    return mesh.whole["expert"].get_local_rank(), mesh.whole["data_shard"].get_local_rank(), mesh.dense["data"].get_local_rank()


def test_neighbours_share_experts_out() -> None:
    assert on_ranks(4, three_places) == [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)]


OUTERMOST_FIRST = ("pipeline", "data_replicate", "data_shard", "context", "expert", "tensor")


def groups_of(rank: int) -> dict[str, list[int]]:
    """The ranks of each group of a process of 64, all axes at 2; no other process is started."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from atoll.parallel import make_mesh

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=64, store=FakeStore())
    mesh = make_mesh(ParallelConfig(**dict.fromkeys(OUTERMOST_FIRST, 2)), "cpu")
    assert mesh.context
    assert mesh.tensor
    assert mesh.pipeline
    groups = {
        "context": mesh.context.get_group(),
        "tensor": mesh.tensor.get_group(),
        "pipeline": mesh.pipeline.get_group(),
        "expert": mesh.whole.get_group("expert"),
        "data_replicate": mesh.dense.get_group("data_replicate"),
        "data_shard context expert": mesh.dense.get_group("data"),
        "data_shard context tensor": mesh.whole.get_group("data_shard"),
        "data_shard context expert tensor": mesh.copy.get_group("data"),
        "data_replicate data_shard context expert": mesh.peers,
        "data_replicate data_shard context expert tensor": mesh.stage,
    }
    return {axes: dist.get_process_group_ranks(group) for axes, group in groups.items()}


@pytest.mark.parametrize("rank", [0, 37, 62])
def test_a_group_is_of_the_processes_that_differ_along_its_axes(rank: int) -> None:
    places = list(itertools.product(range(2), repeat=len(OUTERMOST_FIRST)))
    for axes, ranks in on_ranks(1, groups_of, rank)[0].items():
        fixed = [i for i, axis in enumerate(OUTERMOST_FIRST) if axis not in axes.split()]
        assert ranks == [r for r, at in enumerate(places) if all(at[i] == places[rank][i] for i in fixed)], axes


def fails_on_one(how: str) -> None:
    import os
    import time

    import torch.distributed as dist

    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(7)
        raise ValueError("of its own")
    time.sleep(60)


@pytest.mark.parametrize(("how", "said"), [("dies", "rank 1 of 2 died, exit code 7"), ("fails", "ValueError: of its own")])
def test_the_helper_tells_of_a_process_that_fails_and_ends_the_others(how: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        on_ranks(2, fails_on_one, how, timeout=30)


def test_the_helper_does_not_wait_for_ever() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0\] of 2 gave nothing in time|ranks \[0, 1\] of 2 gave nothing in time"):
        on_ranks(2, sleeps_on_one, timeout=4)


def sleeps_on_one() -> None:
    import time

    import torch.distributed as dist

    if dist.get_rank() == 0:
        time.sleep(60)
