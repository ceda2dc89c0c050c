"""Pipelines that cannot be are refused before anything is built, in one line with the nearest layout that can."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import on_ranks
from training import config_for, layout

from atoll.config import ConfigError, ParallelConfig, load_config, to_toml
from atoll.parallel import check, place

NEAREST = "; the nearest possible layout is "
FEW = "parallel.pipeline = 2: needs as many micro-batches, stages.0 gives a process 1; set train.micro_batch = 4"
WRONG: list[tuple[dict[str, Any], int, int | None, str]] = [
    ({"pipeline": 4}, 4, 1, "parallel.pipeline = 4: 4 stages are more than model.num_hidden_layers = 3" + NEAREST + "pipeline = 2, "),
    ({"pipeline": 2, "pipeline_virtual": 2}, 2, 1, "parallel.pipeline_virtual = 2: 4 stages are more than model.num_hidden_layers = 3"),
    (
        {"pipeline": 2},
        2,
        None,
        FEW + NEAREST + "pipeline = 1, ",
    ),
    ({"pipeline": 2}, 2, 8, FEW),
    ({"pipeline": 2, "data_shard": 8}, 16, 1, "parallel.pipeline = 2: needs as many micro-batches, stages.0 gives a process 1" + NEAREST),
    ({"pipeline_virtual": 2}, 1, 1, "parallel.pipeline_virtual = 2: 1 is expected" + NEAREST),
    ({"pipeline": 2, "pipeline_cut": (3,)}, 2, 1, "parallel.pipeline_cut = [3]: 1 ascending layers from 1 to 2 are expected"),
    ({"pipeline": 2, "pipeline_cut": (1, 2)}, 2, 1, "parallel.pipeline_cut = [1, 2]: 1 ascending layers from 1 to 2 are expected"),
    (
        {"pipeline": 3},
        2,
        1,
        "parallel.pipeline = 3: pipeline 3 x data_replicate 1 x data_shard 1 x expert 1 x context 1 x tensor 1 is for 3",
    ),
    ({"pipeline": 0}, 1, 1, "parallel.pipeline = 0: 1 or more is expected"),
]


@pytest.mark.parametrize(("axes", "processes", "micro", "said"), WRONG)
def test_pipelines_that_cannot_be(axes: dict[str, Any], processes: int, micro: int | None, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(layout(config_for(train__micro_batch=micro, stages__1__batch=8), **axes), processes)
    text = str(refused.value)
    assert text.startswith(said)
    assert NEAREST in text
    assert "\n" not in text


def test_interleaved_micro_batches_go_round_in_full() -> None:
    config = config_for(train__micro_batch=1, stages__0__batch=6, model__num_hidden_layers=8)
    with pytest.raises(ConfigError, match=r"pipeline_virtual = 2: pipeline = 4 does not divide a process's 6 micro-batches of stages.0; "):
        check(layout(config, pipeline=4, pipeline_virtual=2), 4)
    with pytest.raises(ConfigError, match=r", pipeline_virtual = 1$"):
        check(layout(config, pipeline=4, pipeline_virtual=2), 4)
    check(layout(config, pipeline=4), 4)


def test_a_stage_s_own_micro_batch_is_what_counts() -> None:
    config = config_for(train__micro_batch=1, stages__0__micro_batch=8)
    with pytest.raises(ConfigError, match=r"pipeline = 2: needs as many .*, stages.0 gives a process 1; set stages.0.micro_batch = 4; "):
        check(layout(config, pipeline=2), 2)
    check(layout(config_for(stages__0__micro_batch=1, stages__1__micro_batch=2), pipeline=2), 2)


def test_rows_in_segments_go_through_no_pipeline() -> None:
    config = config_for(train__micro_batch=1, stages__0__segment=8)
    with pytest.raises(ConfigError, match=r"^parallel.pipeline = 2: does not go with stages.0.segment = 8, .* pipeline = 1, "):
        check(layout(config, pipeline=2), 2)


def test_what_can_be() -> None:
    config = config_for(train__micro_batch=1, stages__1__batch=8, model__num_hidden_layers=8)
    check(layout(config, pipeline=2, data_shard=2, expert=2), 8)
    check(layout(config, pipeline=4, pipeline_virtual=2, pipeline_cut=(1, 2, 3, 4, 5, 6, 7)), 4)


def test_the_processes_of_a_pipeline_read_the_same_samples_and_lie_furthest_apart() -> None:
    p = ParallelConfig(pipeline=2, data_shard=2, expert=2)
    assert [place(p, rank) for rank in range(8)] == [(0, 4), (1, 4), (2, 4), (3, 4)] * 2
    assert on_ranks(4, places) == [(0, 0, [0, 1]), (0, 1, [0, 1]), (1, 0, [2, 3]), (1, 1, [2, 3])]


def places() -> tuple[int, int, list[int]]:
    import torch.distributed as dist

    from atoll.parallel import make_mesh

    mesh = make_mesh(ParallelConfig(pipeline=2, expert=2), "cpu")
    assert mesh.pipeline is not None
    assert mesh.pipelines == [[0, 2], [1, 3]]
    return mesh.pipeline.get_local_rank(), mesh.whole["expert"].get_local_rank(), dist.get_process_group_ranks(mesh.stage)


def test_a_cut_is_read_from_the_command_line_and_written_to_the_run_s_settings(tmp_path: Any) -> None:
    config = load_config("tiny", {"parallel.pipeline": "2", "parallel.pipeline_cut": "3"})
    assert config.parallel.pipeline_cut == (3,)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "config.toml") == config
