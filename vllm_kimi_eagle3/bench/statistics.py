# SPDX-License-Identifier: Apache-2.0
"""Shares with their uncertainty: the Wilson score interval (E. B. Wilson, 1927), and nothing else.

Neighbouring tokens of one text are not independent, so the true uncertainty is larger than any binomial interval says;
the default of 99 % instead of 95 % leaves room for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Z = 2.5758
"""Standard normal quantile of a two-sided 99 % interval."""


@dataclass(frozen=True)
class Share:
    """``hits`` of ``total``.

    Attributes:
        hits: 0..total.
        total: number of trials; 0 means that nothing is known.
    """

    hits: int
    total: int

    @property
    def rate(self) -> float:
        """hits / total, or 0.0 of nothing."""
        return self.hits / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high end of the 99 % interval; (0, 1) of nothing."""
        if not self.total:
            return 0.0, 1.0
        n, p, zz = self.total, self.rate, Z * Z
        middle = (p + zz / (2 * n)) / (1 + zz / n)
        half = Z / (1 + zz / n) * math.sqrt(p * (1 - p) / n + zz / (4 * n * n))
        # Rounding may put an end on the wrong side of the rate by one unit in the last place.
        return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))

    @property
    def low(self) -> float:
        """The interval's low end."""
        return self.interval[0]

    @property
    def high(self) -> float:
        """The interval's high end."""
        return self.interval[1]

    def __str__(self) -> str:
        return f"{self.rate:.1%} ({self.low:.1%} to {self.high:.1%}, n = {self.total})"


def falls_below(share: Share, other: Share, margin: float = 0.0) -> bool:
    """Whether ``share`` lies more than ``margin`` below ``other``, beyond 99 % of what chance does.

    By the interval of a difference that Newcombe (1998, method 10) makes of two Wilson intervals: it finds smaller
    differences than two intervals that have to part.
    """
    if not share.total or not other.total:
        return False
    gap = other.rate - share.rate
    return gap - math.hypot(other.rate - other.low, share.high - share.rate) > margin


def needed_trials(first: float, second: float) -> int | None:
    """How many trials each share needs until their intervals part, if the rates stay; None for equal rates.

    Searches by doubling and halving; exact to one per cent. At most 10 million.
    """
    if first == second:
        return None
    low, high = 1, 1

    def part(total: int) -> bool:
        a, b = (Share(round(rate * total), total) for rate in sorted((first, second)))
        return a.high < b.low

    while not part(high):
        low, high = high, high * 2
        if high > 10_000_000:
            return None
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if part(middle) else (middle, high)
    return high
