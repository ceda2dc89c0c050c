"""Smoothing, thinning and the placing of labels."""

import numpy as np
import pytest

from atoll.report.look import DARK, LIGHT, spread
from atoll.report.mechanisms import even
from atoll.report.series import median, smooth, smooth_pieces, thin, window


def test_smoothing_is_the_mean_of_the_window():
    values = np.random.default_rng(0).normal(size=50)
    got = smooth(values, 7)
    assert got[20] == pytest.approx(values[17:24].mean())
    assert got[0] == pytest.approx(values[:4].mean())
    assert smooth(values, 7, keep_start=True)[[0, 1]] == pytest.approx([values[0], values[:3].mean()])
    assert smooth(values, 1) == pytest.approx(values)


def test_missing_values_are_passed_over():
    values = np.array([1.0, np.nan, 3.0, np.nan, np.nan, np.nan])
    for method in (smooth, median):
        assert method(values, 3)[[0, 1, 2]] == pytest.approx([1, 2, 3])
    assert np.isnan(smooth(values, 3)[5])
    assert np.isnan(median(np.full(4, np.nan), 3)).all()


def test_an_outlier_does_not_move_the_median():
    values = np.ones(100)
    values[40] = 1e9
    assert median(values, 9) == pytest.approx(np.ones(100))


def test_the_median_of_a_long_curve_is_close_at_every_point():
    values = np.linspace(0, 1, 50_000)
    assert median(values, window(50_000)) == pytest.approx(values, abs=0.02)


def test_no_mean_reaches_over_a_stage_boundary():
    values = np.array([1.0] * 60 + [5.0] * 40)
    assert smooth_pieces(values, [slice(0, 60), slice(60, 100)]) == pytest.approx(values)


def test_thinning_keeps_ends_and_peaks():
    y = np.zeros(100_000)
    y[54_321], y[7] = 9.0, -9.0
    x, thinned = thin(np.arange(100_000.0), y)
    assert len(x) <= 1502
    assert (x[0], x[-1]) == (0, 99_999)
    assert (np.diff(x) > 0).all()
    assert {54_321.0, 7.0} <= set(x)
    assert (thinned.max(), thinned.min()) == (9.0, -9.0)
    assert thin(np.arange(10.0), np.arange(10.0))[0].tolist() == list(range(10))


def test_thinning_survives_stretches_without_values():
    y = np.full(10_000, np.nan)
    y[5_000] = 1.0
    assert np.nanmax(thin(np.arange(10_000.0), y)[1]) == 1.0


def test_labels_are_moved_apart_and_keep_their_order():
    heights = [0.50, 0.51, 0.52, 0.9]
    placed = spread(heights, 0.1)
    assert np.diff(placed).min() >= 0.1 - 1e-9
    assert placed[3] == 0.9
    assert np.mean(placed[:3]) == pytest.approx(0.51)
    assert spread([0.2, 0.8, 0.5], 0.1) == [0.2, 0.8, 0.5]


def test_even_takes_first_and_last():
    assert even(100, 3) == [0, 50, 99]
    assert even(4, 10) == [0, 1, 2, 3]
    assert even(1, 5) == [0]


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("look", [LIGHT, DARK])
def test_every_written_colour_stands_out_from_the_paper(look):
    """WCAG 2 contrast: 4.5 for text, which all these colours label something with (4 for the orange beside its large marks)."""
    for colour, least in ((look.ink, 7), (look.muted, 4.5), (look.blue, 4.5), (look.green, 4), (look.red, 4.5), (look.orange, 4)):
        pair = sorted((luminance(colour), luminance(look.paper)))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, colour
