"""Differences, knees, recommendations: on numbers whose answer is known."""

from __future__ import annotations

import math
import random

import pytest

from pipeline.tuning import analysis, figures


def test_a_difference_has_an_interval_that_narrows_with_agreement():
    found = analysis.difference([100, 101, 99], [110, 111, 109], 0.95)
    assert found["difference_pct"] == pytest.approx(10, abs=0.1) and 0 < found["low_pct"] < 10 < found["high_pct"]
    wide = analysis.difference([100, 130, 80], [110, 141, 90], 0.95)
    assert wide["low_pct"] < 0 < wide["high_pct"]
    assert analysis.difference([100], [110, 111], 0.95)["difference_pct"] is None
    assert analysis.difference([100, 100], [110, 110], 0.95)["low_pct"] == pytest.approx(10)


def test_intervals_cover_as_often_as_they_say():
    """A/A: of equal settings, the interval leaves out 0 in about one case of twenty."""
    draw, missed = random.Random(1), 0
    for _ in range(400):
        a, b = ([100 * math.exp(draw.gauss(0, 0.05)) for _ in range(4)] for _ in range(2))
        found = analysis.difference(a, b, 0.95)
        missed += not found["low_pct"] <= 0 <= found["high_pct"]
    assert missed <= 32, f"{missed} of 400"


def test_pairs():
    found = analysis.paired_difference([1.10, 1.12, 1.09, 1.11], 0.95)
    assert analysis.verdict(found) == "beats" and found["difference_pct"] == pytest.approx(10.5, abs=0.1)
    assert analysis.verdict(analysis.paired_difference([1.1, 0.9, 1.05], 0.95)) == "nothing_beats_the_default"
    assert analysis.verdict(analysis.paired_difference([1.1], 0.95)) == "untested"


@pytest.mark.parametrize(
    "curve, status, knee",
    [
        ([(1, 10), (2, 19), (4, 36), (8, 60), (16, 61), (32, 61.5)], "knee", 8),
        ([(1, 10), (2, 20), (4, 40), (8, 80)], "still_rising", None),
        ([(1, 60), (2, 61), (4, 59)], "flat", 1),
        ([(1, 60), (2, 61)], "too_few_points", None),
        ([(256, 50), (512, 80), (1024, 100), (2048, 90), (4096, 60)], "knee", 1024),
    ],
)
def test_knees(curve, status, knee):
    found = analysis.knee(curve, 0.05)
    assert (found["status"], found["knee"]) == (status, knee)


def test_kneedle_finds_the_bend():
    assert analysis.kneedle([(1, 10), (2, 19), (4, 36), (8, 60), (16, 61), (32, 61.5)]) == 8
    assert analysis.kneedle([(1, 5), (2, 5), (4, 5)]) is None


def row(axis, value, percent, low=None, status="valid", lost=0.0):
    return {
        "axis": axis,
        "value": value,
        "status": status,
        "coincides_with": None,
        "difference_pct": percent,
        "low_pct": percent - 1 if low is None else low,
        "accuracy_lost": lost,
    }


BASE = row(None, None, 0.0)


def test_settings_that_are_better_on_several_axes_are_combined_at_their_knees():
    rows = [BASE, row("max_num_seqs", 32, 20), row("max_num_seqs", 64, 22), row("block_size", 512, 5)]
    found = analysis.candidates(rows, {"max_num_seqs": {"knee": 32}}, 0.1, 0.05)
    assert found == [{"max_num_seqs": 32, "block_size": 512}, {"max_num_seqs": 64}]


def test_a_large_but_uncertain_gain_is_tested_and_a_lossy_or_incomparable_one_is_not():
    rows = [
        BASE,
        row("max_num_seqs", 32, 15, low=-0.3),
        row("kv", "fp8", 30, lost=0.4),
        row("quant", "int8", 90, status="not_comparable"),
        row("block_size", 512, 1, low=-3),
    ]
    assert analysis.candidates(rows, {}, 0.1, 0.05) == [{"max_num_seqs": 32}]


def test_without_a_promising_point_the_best_median_is_tried():
    rows = [BASE, row("max_num_seqs", 32, -4), row("block_size", 512, 1, low=-3)]
    assert analysis.candidates(rows, {}, 0.1, 0.05) == [{"block_size": 512}]
    assert analysis.candidates([BASE], {}, 0.1, 0.05) == []


@pytest.mark.parametrize(("numbers", "text"), [([3, 1, 2, 5], "1-3, 5"), ([7], "7"), ([9, 8], "8-9")])
def test_numbers_of_one_label_are_told_as_ranges(numbers, text):
    assert figures.ranges(numbers) == text
