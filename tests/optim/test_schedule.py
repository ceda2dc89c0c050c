"""The schedule is a pure function with the right ends."""

import itertools
import math

import pytest

from atoll.optim.schedule import factor


def test_warms_up_linearly_then_follows_one_cosine() -> None:
    values = [factor(i, 1000) for i in range(1000)]
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(values) == values[9] == 1.0
    assert all(a > b for a, b in itertools.pairwise(values[9:]))
    assert values[504] == pytest.approx(0.5, abs=1e-3)
    assert 0 < values[-1] < 1e-5


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 99])
@pytest.mark.parametrize("warmup", [0.0, 0.01, 0.5])
def test_stays_between_floor_and_peak_for_any_length(steps: int, warmup: float) -> None:
    values = [factor(i, steps, warmup, 0.1) for i in range(steps)]
    climb = math.ceil(warmup * steps)
    assert values[:climb] == pytest.approx([(i + 1) / climb for i in range(climb)])
    assert all(0.1 < v < 1.0 for v in values[climb:])
    assert factor(steps, steps, warmup, 0.1) == pytest.approx(0.1)  # where the cosine ends, one past the last step


def test_one_percent_of_a_short_run_is_one_step() -> None:
    assert factor(0, 5) == 1.0
    assert factor(0, 150) == 0.5
