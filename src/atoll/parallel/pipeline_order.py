"""Which layers a stage of the pipeline holds, which finished blocks pass to it, and the order in which a process works. No process in it.

With P processes and V virtual stages each, stage s = c P + r is chunk c of process r. Of the bank of finished blocks a stage is sent those
that its process does not hold yet: all of them in its first chunk, later the ones finished since its chunk before (arXiv 2603.15031 §4.1).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Action(NamedTuple):
    """One thing a process does: the pass of a micro-batch through one of its chunks, forward or backward."""

    forward: bool
    chunk: int
    micro: int


def order(rank: int, processes: int, chunks: int, micros: int) -> list[Action]:
    """What process `rank` does in a step of `micros` micro-batches: one forward, one backward (1F1B), after a warm-up that is as long as
    the way to the last stage and back. With several `chunks` it is interleaved: they take turns of `processes` micro-batches
    (Narayanan et al., arXiv 2104.04473 §2.2), a number that then divides `micros`."""
    total = micros * chunks
    warm = processes - rank - 1 if chunks == 1 else 2 * (processes - rank - 1) + (chunks - 1) * processes
    warm = min(warm, total)

    def action(k: int, forward: bool) -> Action:
        if chunks == 1:
            return Action(forward, 0, k)
        turn, inside = divmod(k, processes * chunks)
        chunk, micro = divmod(inside, processes)
        return Action(forward, chunk if forward else chunks - 1 - chunk, turn * processes + micro)

    steady = [a for k in range(total - warm) for a in (action(warm + k, True), action(k, False))]
    return [*(action(k, True) for k in range(warm)), *steady, *(action(k, False) for k in range(total - warm, total))]


def layer_ranges(layers: int, stages: int, cut: Sequence[int] = ()) -> list[range]:
    """The layers of each stage: from each entry of `cut` on, or as many for each as can be."""
    bounds = [0, *cut, layers] if cut else [s * layers // stages for s in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def bank_size(mode: str, block: int, layer: int) -> int:
    """Finished sources in the bank where `layer` begins, before it closes a block; `mode` is the model's `residual`."""
    if mode == "plain":
        return 0
    return 2 * layer if mode == "full" else -(-layer // block)


@dataclass(frozen=True)
class Stage:
    """One stage: its place among `count`, its layers, the bank's sources where it begins (`entry`) and ends (`exit`); of those before
    `entry`, the first `known` lie on its process already."""

    number: int
    count: int
    layers: range
    entry: int
    exit: int
    known: int

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.count - 1

    @property
    def arriving(self) -> range:
        """The sources that are sent to it."""
        return range(self.known, self.entry)


def stages(ranges: Sequence[range], processes: int, mode: str, block: int) -> list[Stage]:
    """All stages of a model, in order."""
    entries = [bank_size(mode, block, r.start) for r in ranges]
    exits = [*entries[1:], bank_size(mode, block, ranges[-1].stop)]
    known = [0 if s < processes else exits[s - processes] for s in range(len(ranges))]
    parts = zip(ranges, entries, exits, known, strict=True)
    return [Stage(s, len(ranges), *part) for s, part in enumerate(parts)]
