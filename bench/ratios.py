"""Medians, and ratios of medians with an interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}x [{self.low:.3f}, {self.high:.3f}]"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Median of ``above`` over median of ``below``, taken in the same rounds.

    Rounds are drawn as pairs, so a slow moment of the machine that hit both makes the interval no wider.

    Raises:
        ValueError: nothing to compare, or not the same number of rounds.
    """
    if not above or len(above) != len(below):
        raise ValueError(f"{len(above)} and {len(below)} rounds cannot be paired")
    generator = random.Random(0)
    rounds = range(len(above))
    found = []
    for _ in range(_RESAMPLES):
        drawn = generator.choices(rounds, k=len(rounds))
        found.append(statistics.median(above[i] for i in drawn) / statistics.median(below[i] for i in drawn))
    found.sort()
    low, high = (found[round(share * (_RESAMPLES - 1))] for share in (0.025, 0.975))
    return Ratio(statistics.median(above) / statistics.median(below), low, high)


def spread(values: Sequence[float]) -> float:
    """The middle half's width, over the median."""
    if len(values) < 2:
        return 0.0
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle
