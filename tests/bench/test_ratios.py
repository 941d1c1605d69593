"""Ratios of medians and their intervals, on times whose answer is known."""

from __future__ import annotations

import random

import pytest

from dithoist.bench.ratios import ratio, spread


def test_a_constant_ratio_has_no_width_however_much_the_machine_drifts() -> None:
    below = [random.Random(i).uniform(1, 9) for i in range(9)]
    found = ratio([1.5 * t for t in below], below)
    assert (found.low, found.value, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_holds_the_true_ratio_about_nineteen_times_in_twenty() -> None:
    generator = random.Random(0)

    def times(mean: float) -> list[float]:
        return [generator.gauss(mean, 0.1) for _ in range(15)]

    found = [ratio(times(2.0), times(1.0)) for _ in range(100)]
    assert 88 <= sum(r.low <= 2 <= r.high for r in found) <= 100


def test_the_same_times_give_the_same_interval() -> None:
    times = [1.0, 1.3, 0.9, 1.1], [0.8, 1.0, 1.2, 0.7]
    assert ratio(*times) == ratio(*times)


def test_rounds_must_pair() -> None:
    with pytest.raises(ValueError, match="2 and 1 rounds"):
        ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="0 and 0 rounds"):
        ratio([], [])


def test_spread_is_the_middle_half_over_the_median() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([1.0]) == 0
