# SPDX-License-Identifier: Apache-2.0
"""Which trials there are, and when their hit rates decide."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.bench.statistics import Share
from vllm_kimi_eagle3.calibrate.trials import Trial, decide, lay_out, rule_of

ZERO, EARLY, LATE = Trial("0", (3, 6, 8)), Trial("-1", (2, 5, 7)), Trial("1", (4, 7, 9))
ONE = Trial("3:+1", (3, 6, 9))


def shares(n: int, **rates: float) -> dict[Trial, Share]:
    names = {"zero": ZERO, "early": EARLY, "late": LATE, "one": ONE}
    return {names[name]: Share(round(rate * n), n) for name, rate in rates.items()}


def test_all_shifts_of_all_and_of_each() -> None:
    trials = {t.name: t.boundaries for t in lay_out((3, 6, 8), 10)}
    assert trials == {
        "0": (3, 6, 8),
        "-1": (2, 5, 7),
        "1": (4, 7, 9),
        "1:-1": (2, 6, 8),
        "1:+1": (4, 6, 8),
        "2:-1": (3, 5, 8),
        "2:+1": (3, 7, 8),
        "3:-1": (3, 6, 7),
        "3:+1": (3, 6, 9),
    }


def test_the_edges_of_the_target() -> None:
    assert {t.name for t in lay_out((0, 5, 10), 10)} == {"0", "1:+1", "2:-1", "2:+1", "3:-1"}
    assert "1:+1" not in {t.name for t in lay_out((3, 4, 8), 10)}, "two states of one layer"
    assert lay_out((8, 6, 3), 10) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-2, 64), min_size=1, max_size=6), st.integers(1, 61))
def test_every_trial_is_possible_and_new(base: list[int], layers: int) -> None:
    trials = lay_out(tuple(base), layers)
    assert len({t.boundaries for t in trials}) == len(trials)
    for trial in trials:
        assert all(low < high for low, high in pairwise(trial.boundaries))
        assert trial.boundaries[0] >= 0 and trial.boundaries[-1] <= layers


def test_it_decides_when_intervals_part() -> None:
    decision = decide(shares(2000, zero=0.75, early=0.5, late=0.85, one=0.82))
    assert decision.boundaries == LATE.boundaries and decision.rival == ZERO and decision.needed is None


def test_it_does_not_decide_before() -> None:
    decision = decide(shares(100, zero=0.79, early=0.5, late=0.85))
    assert decision.boundaries is None and decision.best == LATE and decision.rival == ZERO
    assert decision.needed is not None and 400 < decision.needed < 4000 and str(decision.needed) in decision.sentence
    # With as much text as it asked for, and the same rates, it decides.
    assert decide(shares(decision.needed + 5, zero=0.79, early=0.5, late=0.85)).boundaries == LATE.boundaries


def test_a_single_state_needs_more_than_a_rule() -> None:
    decision = decide(shares(2000, zero=0.75, early=0.5, late=0.82, one=0.84))
    assert decision.boundaries is None and decision.best == ONE and decision.rival == LATE
    assert decide(shares(20_000, zero=0.75, early=0.5, late=0.80, one=0.84)).boundaries == ONE.boundaries


def test_equal_rates_and_nothing() -> None:
    decision = decide(shares(5000, zero=0.8, late=0.8))
    assert decision.boundaries is None and decision.needed is None and "equally good" in decision.sentence
    assert decide({}).boundaries is None and decide({ZERO: Share(0, 0)}).best is None
    assert decide({ZERO: Share(9, 10)}).boundaries is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=9), st.integers(1, 5000))
def test_whatever_is_decided_is_the_best(rates: list[float], n: int) -> None:
    trials = lay_out((3, 6, 8), 10)
    measured = {t: Share(round(r * n), n) for t, r in zip(trials, rates, strict=False)}
    decision = decide(measured)
    if decision.boundaries is not None:
        assert decision.best is not None and decision.best.boundaries == decision.boundaries
        assert all(measured[decision.best].rate >= share.rate for share in measured.values())
    assert decision.sentence


def test_rule_of() -> None:
    assert rule_of((3, 6, 8), (4, 7, 9)) == "output"
    assert rule_of((4, 7, 9), (4, 7, 9)) == "boundary"
    assert rule_of((5, 8, 10), (4, 7, 9)) is None and rule_of(None, (4, 7, 9)) is None
