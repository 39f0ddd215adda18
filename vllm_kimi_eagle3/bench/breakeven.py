# SPDX-License-Identifier: Apache-2.0
"""When speculation pays: arithmetic on step times and acceptance, without torch or vLLM.

A step with k draft tokens verifies them, drafts the next ones, and yields 1 + (drafts accepted) tokens for each
request; a plain step yields one. So speculation pays when the acceptance length is above the ratio of the two steps'
times.

What it does not know: that a step's time depends on the batch, on the context, and, when the weights of experts bound
it, on which tokens are verified. Times in seconds, milliseconds or plain steps alike, as long as all are in the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Times of one pair, engine and batch.

    Attributes:
        baseline: a decode step without speculation; positive.
        verify: what a speculative step takes however many tokens are drafted; positive.
        draft: what each draft token adds: a pass of the drafter, and another token to verify; 0 or more.
    """

    baseline: float
    verify: float
    draft: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("baseline", True), ("verify", True), ("draft", False)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (least and value == 0):
                raise ValueError(
                    f"{name} is {value}, but a {'positive' if least else 'non-negative'} time was expected"
                )

    def step(self, k: int) -> float:
        """A step's time with k draft tokens; the baseline's with none."""
        _check_k(k)
        return self.verify + k * self.draft if k else self.baseline

    def ratio(self, k: int) -> float:
        """Plain steps in one speculative step: the acceptance length that breaks even."""
        return self.step(k) / self.baseline

    def tok_s(self, per_position: Sequence[float], k: int | None = None) -> float:
        """Tokens by unit of time for each request, with the first k positions' acceptance; k defaults to all."""
        k = len(per_position) if k is None else k
        return acceptance_length(_first(per_position, k)) / self.step(k)

    def speedup(self, per_position: Sequence[float], k: int | None = None) -> float:
        """Speed against no speculation."""
        return self.tok_s(per_position, k) * self.baseline

    def best_k(self, per_position: Sequence[float]) -> int:
        """The number of draft tokens, from 0 to all known positions, that is fastest; the fewest of equals."""
        return max(range(len(per_position) + 1), key=lambda k: (self.tok_s(per_position, k), -k))


def split(baseline: float, step: float, k: int, grows: float) -> StepTimes:
    """Times of which a step with k draft tokens takes ``step``, if this share of what it takes more grows with k.

    One k does not tell what a draft token costs and what verifying at all does. A step that takes no more than the
    baseline has nothing to share out.
    """
    _check_k(k, 1)
    growing = grows * max(0.0, step - baseline)
    return StepTimes(baseline, step - growing, growing / k)


def best_ks(per_position: Sequence[float], ratio: float) -> tuple[int, int]:
    """The least and the largest number of draft tokens, 0 to all known positions, that may be the fastest.

    Args:
        per_position: cumulative acceptance by position, of steps with as many draft tokens.
        ratio: plain steps in one of those steps; which share of it grows with k is tried in hundredths.

    Raises:
        ValueError: no position is known, or the rates are none.
    """
    k = len(per_position)
    found = {split(1.0, ratio, k, percent / 100).best_k(per_position) for percent in range(101)}
    return min(found), max(found)


def acceptance_length(per_position: Sequence[float]) -> float:
    """Mean tokens a verify step, the target's own included, from cumulative acceptance by position.

    Raises:
        ValueError: the rates leave 0..1, or grow: position i counts the steps in which all up to i were accepted.
    """
    rates = list(per_position)
    if any(not 0 <= rate <= 1 for rate in rates) or any(b > a for a, b in itertools.pairwise(rates)):
        raise ValueError(f"acceptance by position is {rates}, but shares of 0 to 1 that don't grow were expected")
    return 1 + math.fsum(rates)


def geometric(share: float, k: int) -> list[float]:
    """Cumulative acceptance of k positions, when each passes with the same share after the one before it."""
    _check_k(k)
    return [share ** (i + 1) for i in range(k)]


def share_for_length(length: float, k: int) -> float | None:
    """The share by which each draft, after an accepted one, has to pass for an acceptance length; None beyond k + 1.

    Inverse of ``acceptance_length(geometric(share, k))``, by halving; exact to 1e-12.
    """
    _check_k(k, 1)
    if not length <= k + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if acceptance_length(geometric(middle, k)) < length:
            low = middle
        else:
            high = middle
    return high if length > 1 else 0.0


def accepted_for_length(length: float, k: int) -> float | None:
    """Accepted of drafted tokens, 0..1, for an acceptance length; None beyond k + 1."""
    _check_k(k, 1)
    return None if not length <= k + 1 else max(0.0, (length - 1) / k)


def step_of(seconds_a_token: float, accepted: float, k: int) -> float:
    """A speculative step's time, from the time of a token and the share of drafted tokens that was accepted."""
    return seconds_a_token * (1 + accepted * k)


def _first(per_position: Sequence[float], k: int) -> Sequence[float]:
    _check_k(k)
    if k > len(per_position):
        raise ValueError(f"k is {k}, but acceptance is known of {len(per_position)} positions only")
    return per_position[:k]


def _check_k(k: int, least: int = 0) -> None:
    if k < least:
        raise ValueError(f"k is {k}, but {least} or more draft tokens were expected")
