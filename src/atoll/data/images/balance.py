"""Which rows of a step go to which process: as many to each, of nearly equal cost, and the same answer everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.data.loader import Pictured, Rows


def assign(costs: Sequence[float], places: int) -> list[list[int]]:
    """Indices of `costs` for each of `places`, `len(costs) / places` each: the dearest first, to the cheapest place with room."""
    room, loads = len(costs) // places, [0.0] * places
    mine: list[list[int]] = [[] for _ in range(places)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        place = min((p for p in range(places) if len(mine[p]) < room), key=lambda p: (loads[p], p))
        mine[place].append(index)
        loads[place] += costs[index]
    return [sorted(rows) for rows in mine]


def step_rows(sampler: Rows, first: int, batch: int, place: int, places: int) -> list[int]:
    """Global indices of the rows that process `place` of `places` takes of the step's `batch` from `first` on.

    Rows of text cost alike and go in order. Rows with pictures are looked at by every process (their sizes, not their pixels).
    """
    share = batch // places
    if places == 1 or not isinstance(sampler, Pictured):
        return list(range(first + place * share, first + (place + 1) * share))
    costs = [sampler.cost(i) for i in range(first, first + batch)]
    return [first + i for i in assign(costs, places)[place]]
