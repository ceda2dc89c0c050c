"""The order of a pipeline: every micro-batch once each way, no process waits for one that waits for it, messages meet in one order."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from training import config_for

from atoll.config import load_config
from atoll.model import Model
from atoll.nn.block_residual import Stream
from atoll.parallel.pipeline_order import Action, bank_size, layer_ranges, order, stages

SHAPES = [(p, v, m * p) for p in (2, 3, 4, 8) for v in (1, 2, 3) for m in (1, 2, 3)] + [(2, 1, 3), (4, 1, 5), (3, 1, 7)]


def walk(processes: int, chunks: int, micros: int) -> list[int]:
    """Let the processes work through their orders, each waiting for what the others send; the most passes each had open."""
    todo = [deque(order(r, processes, chunks, micros)) for r in range(processes)]
    channels: dict[Any, deque[tuple[int, int]]] = {}
    last, open_, most = processes * chunks - 1, [0] * processes, [0] * processes

    def channel(stage: int, forward: bool) -> deque[tuple[int, int]]:
        """What travels to a stage: between two processes one queue a direction, and one around the ring's end."""
        around = stage % processes == (0 if forward else processes - 1)
        return channels.setdefault((stage % processes, forward, around), deque())

    while any(todo):
        moved = False
        for r, queue in enumerate(todo):
            if not queue:
                continue
            a = queue[0]
            stage = a.chunk * processes + r
            if stage != (0 if a.forward else last):
                waiting = channel(stage, a.forward)
                if not waiting:
                    continue
                assert waiting.popleft() == (stage, a.micro)
            queue.popleft()
            moved = True
            open_[r] += 1 if a.forward else -1
            most[r] = max(most[r], open_[r])
            to = stage + (1 if a.forward else -1)
            if 0 <= to <= last:
                channel(to, a.forward).append((to, a.micro))
        assert moved, "all wait"
    assert not any(channels.values())
    return most


@pytest.mark.parametrize(("processes", "chunks", "micros"), SHAPES)
def test_no_process_waits_for_ever(processes: int, chunks: int, micros: int) -> None:
    most = walk(processes, chunks, micros)
    warm = [processes - r if chunks == 1 else 2 * (processes - r - 1) + (chunks - 1) * processes + 1 for r in range(processes)]
    assert most == [min(w, micros * chunks) for w in warm]
    for r in range(processes):
        every = [Action(f, c, m) for f in (True, False) for c in range(chunks) for m in range(micros)]
        assert sorted(order(r, processes, chunks, micros)) == sorted(every)


@pytest.mark.parametrize(("processes", "chunks", "micros"), [s for s in SHAPES if s[1] > 1 and s[0] < 8])
def test_interleaved_is_torch_s_own_order(processes: int, chunks: int, micros: int) -> None:
    about = {"num_stages": processes * chunks, "group_size": processes, "group_rank": 0, "has_backward": True, "is_last": False}
    parts: Any = [SimpleNamespace(**about, is_first=c == 0, stage_index=c * processes) for c in range(chunks)]
    theirs = ScheduleInterleaved1F1B(parts, micros).pipeline_order
    for r in range(processes):
        mine = [f"{a.chunk * processes + r}{'F' if a.forward else 'B'}{a.micro}" for a in order(r, processes, chunks, micros)]
        assert [str(a) for a in theirs[r] if a is not None and "REDUCE" not in str(a)] == mine


def test_layers_are_cut_evenly_or_as_asked() -> None:
    assert layer_ranges(93, 8) == [range(a, b) for a, b in ((0, 11), (11, 23), (23, 34), (34, 46), (46, 58), (58, 69), (69, 81), (81, 93))]
    assert layer_ranges(7, 3, (1, 6)) == [range(1), range(1, 6), range(6, 7)]


@pytest.mark.parametrize(("mode", "block"), [("block", 3), ("block", 1), ("full", 2), ("plain", 2)])
@pytest.mark.parametrize("schedule", ["one-pass", "two-phase"])
def test_a_model_can_be_run_in_parts_and_its_bank_has_the_size_it_should(mode: str, block: int, schedule: str) -> None:
    config = config_for(model__residual=mode, model__attn_res_block_size=block, model__num_hidden_layers=5)
    model, ids = Model(config.model, dtype=torch.float64), torch.arange(6)[None] + 3
    for name, p in model.named_parameters():
        if "res_proj" in name:  # zero at the start
            torch.nn.init.normal_(p)
    whole = model(ids).logits
    model.language_model.model.schedule = schedule
    for stop in range(1, 5):
        stream = model(ids, layers=range(stop)).stream
        assert isinstance(stream, Stream)
        assert len(stream.bank) == bank_size(mode, block, stop)
        parts = model(ids, stream=stream, layers=range(stop, 5)).logits
        torch.testing.assert_close(parts, whole, atol=1e-12, rtol=0)


def test_a_process_is_sent_what_it_has_not_seen() -> None:
    """Two processes, three chunks each, blocks of two layers, cut in their middle too."""
    found = stages(layer_ranges(12, 6, (3, 4, 7, 8, 11)), 2, "block", 2)
    assert [s.entry for s in found] == [0, 2, 2, 4, 4, 6]
    assert [list(s.arriving) for s in found] == [[], [0, 1], [], [2, 3], [], [4, 5]]
    aligned = stages(layer_ranges(32, 16), 4, "block", 2)  # one block a stage
    assert [len(s.arriving) for s in aligned] == [0, 1, 2, 3, *([3] * 12)]


@pytest.mark.parametrize(("processes", "chunks", "blocks"), [(p, v, n) for p in (2, 3, 4) for v in (1, 2, 3) for n in (1, 2)])
def test_what_is_sent_is_the_published_cost(processes: int, chunks: int, blocks: int) -> None:
    """arXiv 2603.15031 §4.1, the embedding beside it; and of the blocks of a later hop, all but one of those the receiver finished."""
    p, v, n = processes, chunks, blocks
    every = stages(layer_ranges(4 * n * p * v, p * v), p, "block", 4)
    published = p * (p - 1) // 2 * n + (v - 1) * p * p * n
    assert sum(1 + len(s.arriving) for s in every[1:]) == published + (p - 1) - (v - 1) * p * (n - 1)


def test_the_page_s_table_is_what_the_cut_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    rows = [tuple(map(int, row)) for row in re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)]
    assert len(rows) == 5
    m = load_config("blueprint").model
    for p, v, sent, naive, largest in rows:
        every = stages(layer_ranges(m.num_hidden_layers, p * v), p, m.residual, m.attn_res_block_size)[1:]
        sizes = [1 + len(s.arriving) for s in every]
        assert (sum(sizes), sum(1 + s.entry for s in every), max(sizes)) == (sent, naive, largest)
