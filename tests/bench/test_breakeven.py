# SPDX-License-Identifier: Apache-2.0
"""Break-even arithmetic, the origin's numbers by it, and ``docs/BREAK_EVEN.md``, which is written from here.

``UPDATE_BREAK_EVEN=1`` writes the tables of the document anew.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.bench.breakeven import (
    StepTimes,
    acceptance_length,
    accepted_for_length,
    best_ks,
    geometric,
    share_for_length,
    split,
    step_of,
)
from vllm_kimi_eagle3.commands import bench

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "BREAK_EVEN.md"

times = st.floats(0.01, 1000)
shares = st.floats(0, 1)
rates = st.lists(shares, min_size=1, max_size=8).map(lambda found: sorted(found, reverse=True))
steps = st.builds(StepTimes, times, times, st.floats(0, 1000))


@given(steps, rates)
def test_speculation_pays_exactly_above_the_ratio_of_the_steps(step: StepTimes, found: list[float]) -> None:
    length, ratio = acceptance_length(found), step.ratio(len(found))
    if not math.isclose(length, ratio):
        assert (step.speedup(found) > 1) == (length > ratio)
    assert step.speedup(found) == pytest.approx(length / ratio)
    assert step.tok_s([]) == pytest.approx(1 / step.baseline) and step.speedup([]) == pytest.approx(1)


@given(steps, rates)
def test_no_k_is_faster_than_the_best(step: StepTimes, found: list[float]) -> None:
    best = step.best_k(found)
    speeds = [step.tok_s(found, k) for k in range(len(found) + 1)]
    assert speeds[best] == max(speeds) and all(speed < speeds[best] for speed in speeds[:best])


@given(shares, st.integers(1, 16))
def test_the_share_that_a_length_takes(share: float, k: int) -> None:
    length = acceptance_length(geometric(share, k))
    found = share_for_length(length, k)
    assert found is not None and acceptance_length(geometric(found, k)) == pytest.approx(length)
    assert accepted_for_length(length, k) == pytest.approx((length - 1) / k)
    assert share_for_length(k + 1.001, k) is None and accepted_for_length(k + 1.001, k) is None
    assert share_for_length(0.5, k) == 0 == accepted_for_length(0.5, k)


@given(times, shares, st.integers(1, 16))
def test_a_step_from_its_tokens(seconds: float, accepted: float, k: int) -> None:
    step = step_of(seconds, accepted, k)
    # Which is what a server with that step and that acceptance takes for a token.
    assert step / acceptance_length([accepted] * k) == pytest.approx(seconds)


@given(times, st.floats(0.5, 20), st.integers(0, 100), rates)
def test_any_split_holds_the_measured_step(baseline: float, ratio: float, percent: int, found: list[float]) -> None:
    k = len(found)
    times_here = split(baseline, ratio * baseline, k, percent / 100)
    assert times_here.step(k) == pytest.approx(ratio * baseline) and times_here.ratio(0) == 1
    low, high = best_ks(found, ratio)
    assert 0 <= low <= split(1.0, ratio, k, percent / 100).best_k(found) <= high <= k


def test_fewer_drafts_are_faster_where_each_costs() -> None:
    rates_here = [0.65, 0.40, 0.25]
    # Each draft token costs 0.3 plain steps: the third brings 0.25 tokens.
    assert StepTimes(1.0, 1.0, 0.3).best_k(rates_here) == 2
    assert StepTimes(1.0, 1.0, 0.1).best_k(rates_here) == 3
    assert StepTimes(1.0, 1.0, 0.7).best_k(rates_here) == 0
    # A long step that does not pay: nothing does if it is so long whatever is drafted, one draft if they make it so.
    assert split(1.0, 2.65, 5, 0.0).best_k(geometric(0.45, 5)) == 0
    assert split(1.0, 2.65, 5, 1.0).best_k(geometric(0.45, 5)) == 1
    assert best_ks(geometric(0.45, 5), 2.65) == (0, 1)
    assert best_ks(rates_here, 1.0) == (3, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: StepTimes(0.0, 1.0),
        lambda: StepTimes(1.0, math.nan),
        lambda: StepTimes(1.0, 1.0, -0.1),
        lambda: StepTimes(1.0, 1.0).step(-1),
        lambda: StepTimes(1.0, 1.0).tok_s([0.5], 2),
        lambda: acceptance_length([0.4, 0.5]),
        lambda: acceptance_length([1.1]),
        lambda: split(1.0, 2.0, 0, 1.0),
        lambda: best_ks([], 2.0),
        lambda: share_for_length(1.0, 0),
    ],
)
def test_what_is_no_measurement_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"expected|known of"):
        wrong()  # type: ignore[operator]


def test_what_bench_says_of_it() -> None:
    from vllm_kimi_eagle3.bench.metrics import Counters

    def said(length: float, *by_position: int) -> str:
        found = bench._break_even(length, Counters(drafts=100, by_position=by_position))
        return bench._pays(found)

    assert said(1.74, 65, 40, 25) == (
        ", 24.7% of the drafts, 0.45 of each after an accepted one; fastest k by these rates: 2 to 3"
    )
    assert said(4.2, 65, 40, 25).startswith(", which no acceptance reaches; fastest k by these rates: 0 (0: no spec")
    assert said(1.9, 20, 1).endswith("fastest k by these rates: 0 (0: no speculation)")
    assert said(2.2, 65, 40, 25).endswith("fastest k by these rates: 1 to 3")
    # A server's counters may be nonsense.
    assert said(2.0, 40, 65) == said(2.0) == said(2.0, 101) == said(2.0, 40, -5) == said(-0.5, 40, 20) == ""
    assert bench._break_even(None, None) == {"break_even_acceptance": None, "best_k": None}


# The document --------------------------------------------------------------------------------------------------------

PLAIN, ORIGIN, ORIGIN_K, ORIGIN_ACCEPTED = 12.1, 18.3, 5, 0.15
"""ms a token without speculation and with it, draft tokens, share of drafts accepted: as the origin measured them."""
SM120, SM120_SPEEDUP = [0.65, 0.40, 0.25], 1.32
"""Acceptance by position and speed-up that were published for Kimi-K2.6 on eight SM120 GPUs, at concurrency 1."""
HEALTHY_LENGTH, HEALTHY_K = 3.07, 4
"""What was published for Kimi-K2.5 with the drafter that fits it, on vLLM with tensor parallel 8."""


def tables() -> dict[str, str]:
    """The document's tables by name."""
    step = step_of(ORIGIN, ORIGIN_ACCEPTED, ORIGIN_K)
    ratio = step / PLAIN
    origin = StepTimes(1.0, ratio)
    origin_length = 1 + ORIGIN_ACCEPTED * ORIGIN_K
    community = acceptance_length(SM120)
    community_ratio = community / SM120_SPEEDUP
    breaks = share_for_length(ratio, ORIGIN_K)
    healthy = share_for_length(HEALTHY_LENGTH, HEALTHY_K)
    modest = share_for_length(community, len(SM120))
    assert breaks is not None and healthy is not None and modest is not None
    read = [
        ("", "tokens a step", "step, plain steps", "against no speculation"),
        ("the origin, k = 5", f"{origin_length:.2f}", f"{ratio:.2f} ({step:.1f} ms)", f"{origin_length / ratio:.2f}x"),
        ("SM120, published, k = 3", f"{community:.2f}", f"{community_ratio:.2f}", f"{SM120_SPEEDUP:.2f}x"),
    ]
    even = [
        ("at the origin's step", ""),
        ("tokens a step that break even", f"{ratio:.2f}"),
        ("of all drafts", f"{accepted_for_length(ratio, ORIGIN_K):.0%}"),
        ("of each draft after an accepted one", f"{breaks:.2f}"),
        ("the origin's own", f"{ORIGIN_ACCEPTED:.0%} of all drafts"),
    ]

    def row(name: str, length: float, plain_steps: float) -> tuple[str, ...]:
        return name, f"{length:.2f}", f"{plain_steps:.2f}", f"{length / plain_steps:.2f}x"

    best = acceptance_length(geometric(healthy, ORIGIN_K))
    usual = acceptance_length(geometric(modest, ORIGIN_K))
    faults = [
        ("", "tokens a step", "plain steps a step", "against no speculation"),
        row("as it was", origin_length, ratio),
        row("right features as good as published for K2.5, that step", best, ratio),
        row("right features as good as published on SM120, that step", usual, ratio),
        row("those features, the SM120 step", origin_length, community_ratio),
        row("both, features as on SM120, k = 3", community, community_ratio),
        row("both, features as for K2.5, at k = 3", acceptance_length(geometric(healthy, 3)), community_ratio),
    ]
    assert origin.speedup(geometric(breaks, ORIGIN_K)) == pytest.approx(1)
    return {"read": markdown(read), "even": markdown(even), "faults": markdown(faults)}


def markdown(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---|" + "--:|" * (len(rows[0]) - 1), *lines[1:]])


def test_the_document_is_this_arithmetic() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    written = text
    for name, table in tables().items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        head, _, rest = written.partition(begin)
        _, found, tail = rest.partition(end)
        assert found, f"{DOCUMENT.name} has no table called {name}"
        written = head + begin + table + end + tail
    if os.environ.get("UPDATE_BREAK_EVEN"):
        DOCUMENT.write_text(written, encoding="utf-8")
    assert text == written, "UPDATE_BREAK_EVEN=1 writes the tables anew"


def test_the_numbers_that_the_issue_tells() -> None:
    step = step_of(ORIGIN, ORIGIN_ACCEPTED, ORIGIN_K)
    assert step == pytest.approx(32.0, abs=0.05) and step / PLAIN == pytest.approx(2.65, abs=0.005)
    assert acceptance_length(SM120) == pytest.approx(2.3)
    assert acceptance_length(SM120) / SM120_SPEEDUP == pytest.approx(1.74, abs=0.005)
