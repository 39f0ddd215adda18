# SPDX-License-Identifier: Apache-2.0
"""The verdict: each name from the evidence that proves it, never from less, and stable when evidence grows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.bench.statistics import Share, falls_below, needed_trials
from vllm_kimi_eagle3.bench.verdict import Boundaries, Evidence, Name, decide

RIGHT, EARLY, LATE = (4, 7, 9), (3, 6, 8), (5, 8, 10)


def trials(right: float, early: float, late: float, n: int = 4000) -> dict[Boundaries, Share]:
    return {b: Share(round(r * n), n) for b, r in ((RIGHT, right), (EARLY, early), (LATE, late))}


HEALTHY = Evidence(
    drafts=1000,
    accepted=(800, 620, 470),
    speedup=1.6,
    captured=RIGHT,
    trials=trials(0.82, 0.72, 0.6),
)
LOW = (200, 40, 5)
CASES: dict[str, tuple[Name, Evidence]] = {
    "healthy": (Name.HEALTHY, HEALTHY),
    "healthy by a certain plan": (Name.HEALTHY, replace(HEALTHY, trials={}, certain=True)),
    "healthy, no baseline": (Name.HEALTHY, replace(HEALTHY, speedup=None)),
    "one early": (Name.MISALIGNED, replace(HEALTHY, captured=EARLY, accepted=(700, 500, 350))),
    "one late, low acceptance": (Name.MISALIGNED, replace(HEALTHY, captured=LATE, accepted=LOW)),
    "one late and slow": (Name.MISALIGNED, replace(HEALTHY, captured=LATE, speedup=0.6)),
    "stale by verify": (Name.CORRUPTED, replace(HEALTHY, features_match=False)),
    "low, and nobody looked at the states": (Name.UNKNOWN, replace(HEALTHY, accepted=LOW)),
    "other layers than the files ask for": (
        Name.MISALIGNED,
        replace(HEALTHY, trials={}, certain=True, planned=RIGHT, captured=EARLY),
    ),
    "other layers, but who asked is not certain": (
        Name.UNKNOWN,
        replace(HEALTHY, trials={}, planned=RIGHT, captured=EARLY),
    ),
    "the engine says the right layers and gives others": (
        Name.MISALIGNED,
        replace(HEALTHY, features_match=False, rows_are=EARLY),
    ),
    "states in another order": (Name.CORRUPTED, replace(HEALTHY, features_match=False, rows_are=(7, 4, 9))),
    "other states than planned, which are the right ones": (
        Name.HEALTHY,
        replace(HEALTHY, captured=EARLY, planned=EARLY, features_match=False, rows_are=RIGHT),
    ),
    "the second draft differs on right rows": (
        Name.RECURRENCE,
        replace(HEALTHY, features_match=True, wrong_drafts=(Share(0, 140), Share(30, 140))),
    ),
    "a few drafts differ where nothing rounds": (
        Name.UNKNOWN,
        replace(HEALTHY, features_match=True, wrong_drafts=(Share(0, 95), Share(1, 95), Share(2, 94))),
    ),
    "drafts differ as half precision lets them": (
        Name.HEALTHY,
        replace(
            HEALTHY,
            features_match=True,
            wrong_drafts=(Share(10, 140), Share(12, 130)),
            wrong_rounded=(Share(9, 140), Share(11, 130)),
        ),
    ),
    "later positions short of the reference's": (
        Name.RECURRENCE,
        replace(HEALTHY, accepted=(800, 600, 400), reference=tuple(Share(n, 1000) for n in (800, 620, 520))),
    ),
    "all positions short of the reference's": (
        Name.UNKNOWN,
        replace(HEALTHY, accepted=(600, 350, 200), reference=tuple(Share(n, 1000) for n in (800, 620, 520))),
    ),
    "another target's drafter": (Name.UNFIT, replace(HEALTHY, accepted=LOW, trials=trials(0.2, 0.19, 0.18))),
    "untrained": (Name.UNFIT, replace(HEALTHY, accepted=(9, 0, 0), trials=trials(0.01, 0.01, 0.01))),
    "cliff": (Name.RECURRENCE, replace(HEALTHY, accepted=(800, 100, 10))),
    "cliff against the reference": (
        Name.RECURRENCE,
        replace(HEALTHY, accepted=(800, 420, 300), reference=tuple(Share(n, 1000) for n in (800, 620, 470))),
    ),
    "d2t damaged": (Name.VOCABULARY, replace(HEALTHY, accepted=LOW, vocabulary_faults=("d2t is damaged",))),
    "d2t shuffled": (
        Name.VOCABULARY,
        replace(HEALTHY, accepted=(9, 0, 0), trials=trials(0.01, 0.01, 0.01), relabelled=Share(2800, 4000)),
    ),
    "slow verify step": (Name.WALL, replace(HEALTHY, speedup=0.66)),
    "nothing": (Name.UNKNOWN, Evidence()),
    "few steps": (Name.UNKNOWN, Evidence(drafts=50, accepted=(40, 30, 20), certain=True, captured=RIGHT)),
    "the origin": (Name.UNKNOWN, Evidence(drafts=2400, accepted=(700, 300, 119), speedup=0.66)),
    "healthy numbers of unknown layers": (Name.UNKNOWN, replace(HEALTHY, trials={})),
    "an ambiguous plan": (Name.UNKNOWN, replace(HEALTHY, trials={}, certain=False)),
    "overlapping calibration": (Name.UNKNOWN, replace(HEALTHY, trials=trials(0.8, 0.79, 0.6, 100))),
    "sampling collapses": (Name.UNKNOWN, replace(HEALTHY, sampled_first=Share(219, 821))),
    "no gain, no loss": (Name.UNKNOWN, replace(HEALTHY, speedup=1.0)),
    "lukewarm": (Name.UNKNOWN, replace(HEALTHY, accepted=(420, 200, 90), trials={}, certain=True)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_each_name(name: str) -> None:
    expected, evidence = CASES[name]
    verdict = decide(evidence)
    assert verdict.name is expected, verdict
    assert verdict.reasons and all(verdict.reasons) and verdict.next


def test_the_shift_that_mends() -> None:
    verdict = decide(replace(HEALTHY, captured=EARLY))
    assert verdict.shift == (1, 1, 1) and verdict.boundaries == RIGHT and "[4, 7, 9]" in verdict.next
    one = {**HEALTHY.trials, (4, 6, 9): Share(2000, 4000)}
    assert decide(replace(HEALTHY, captured=(4, 6, 9), trials=one)).shift == (0, 1, 0)


def test_a_control_drafter_is_weighed() -> None:
    low = replace(HEALTHY, trials={}, accepted=LOW)
    alike = decide(replace(low, control_first=Share(200, 1000)))
    better = decide(replace(low, control_first=Share(700, 1000)))
    worse = decide(replace(low, control_first=Share(10, 1000)))
    assert alike.name is better.name is worse.name is Name.UNKNOWN
    assert "two drafters failing alike" in alike.reasons[-2]
    assert "does better" in better.reasons[-2] and "does worse" in worse.reasons[-2]


RATES = st.floats(0, 1)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    drafts = draw(st.integers(0, 5000))
    counts: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        counts.append(draw(st.integers(0, counts[-1] if counts else drafts)))
    shares = st.builds(lambda total, rate: Share(round(total * rate), total), st.integers(0, 5000), RATES)
    layers = st.lists(st.integers(0, 61), min_size=1, max_size=4, unique=True).map(lambda ids: tuple(sorted(ids)))
    return Evidence(
        drafts=drafts,
        accepted=tuple(counts),
        greedy=draw(st.booleans()),
        speedup=draw(st.none() | st.floats(0.01, 6)),
        captured=draw(st.none() | layers),
        certain=draw(st.booleans()),
        trials=draw(st.dictionaries(layers, shares, max_size=7)),
        relabelled=draw(st.none() | shares),
        reference=tuple(draw(st.lists(shares, max_size=4))),
        planned=draw(st.none() | layers),
        features_match=draw(st.sampled_from([None, None, True, False])),
        rows_are=draw(st.none() | layers | st.just((7, 4, 9))),
        wrong_drafts=tuple(draw(st.lists(shares, max_size=3))),
        wrong_rounded=tuple(draw(st.lists(shares, max_size=3))),
        vocabulary_faults=tuple(draw(st.lists(st.just("d2t is damaged"), max_size=1))),
        fit_faults=tuple(draw(st.lists(st.just("made for K2"), max_size=1))),
        control_first=draw(st.none() | shares),
        sampled_first=draw(st.none() | shares),
    )


@settings(max_examples=400, deadline=None)
@given(evidences())
def test_total_and_deterministic(evidence: Evidence) -> None:
    verdict = decide(evidence)
    assert verdict == decide(evidence)
    assert isinstance(verdict.name, Name) and verdict.reasons and all(verdict.reasons) and verdict.next
    assert (verdict.boundaries is not None) == (verdict.name is Name.MISALIGNED)
    assert verdict.to_json()["name"] == verdict.name.value


def scaled(share: Share, factor: int) -> Share:
    return Share(share.hits * factor, share.total * factor)


@settings(max_examples=300, deadline=None)
@given(evidences(), st.integers(2, 20))
def test_more_of_the_same_evidence_never_unnames(evidence: Evidence, factor: int) -> None:
    more = replace(
        evidence,
        drafts=evidence.drafts * factor,
        accepted=tuple(count * factor for count in evidence.accepted),
        trials={b: scaled(s, factor) for b, s in evidence.trials.items()},
        relabelled=evidence.relabelled and scaled(evidence.relabelled, factor),
        reference=tuple(scaled(s, factor) for s in evidence.reference),
        wrong_drafts=tuple(scaled(s, factor) for s in evidence.wrong_drafts),
        wrong_rounded=tuple(scaled(s, factor) for s in evidence.wrong_rounded),
        sampled_first=evidence.sampled_first and scaled(evidence.sampled_first, factor),
        control_first=evidence.control_first and scaled(evidence.control_first, factor),
    )
    # Healthy means that nothing was seen; more evidence may see something that has no name.
    if decide(evidence).name not in (Name.UNKNOWN, Name.HEALTHY):
        assert decide(more).name is not Name.UNKNOWN


@settings(max_examples=300, deadline=None)
@given(evidences(), st.floats(1, 4))
def test_a_faster_server_is_never_worse(evidence: Evidence, factor: float) -> None:
    if evidence.speedup is None:
        return
    faster = replace(evidence, speedup=evidence.speedup * factor)
    if decide(evidence).name is Name.HEALTHY:
        assert decide(faster).name is Name.HEALTHY
    if decide(evidence).name is not Name.WALL:
        assert decide(faster).name is not Name.WALL


@settings(max_examples=300, deadline=None)
@given(evidences())
def test_counters_alone_never_blame(evidence: Evidence) -> None:
    """Without a calibration, a verification or a file's fault, no verdict names features, fit or vocabulary."""
    bare: dict[str, Any] = {
        "trials": {},
        "relabelled": None,
        "features_match": None,
        "rows_are": None,
        "planned": None,
        "vocabulary_faults": (),
        "reference": (),
    }
    verdict = decide(replace(evidence, **bare))
    assert verdict.name not in (Name.MISALIGNED, Name.CORRUPTED, Name.UNFIT, Name.VOCABULARY)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 100_000), st.floats(0, 1))
def test_wilson_interval(total: int, rate: float) -> None:
    share = Share(round(total * rate), total)
    assert 0 <= share.low <= share.rate <= share.high <= 1
    assert Share(share.hits * 4, total * 4).high - Share(share.hits * 4, total * 4).low < share.high - share.low


def test_wilson_against_known_values() -> None:
    # 95 % would be .4038 to .5962 at 50 of 100; at 99 %, from the closed form.
    low, high = Share(50, 100).interval
    assert abs(low - 0.3753) < 1e-3 and abs(high - 0.6247) < 1e-3
    assert Share(0, 0).interval == (0.0, 1.0) and Share(0, 10).low == 0 and Share(10, 10).high == 1


def test_needed_trials() -> None:
    needed = needed_trials(0.82, 0.74)
    assert needed is not None and 600 < needed < 1600
    assert Share(round(0.74 * needed), needed).high < Share(round(0.82 * needed), needed).low
    assert needed_trials(0.5, 0.5) is None
    assert (needed_trials(0.5, 0.501) or 0) > 1_000_000


def test_one_share_below_another() -> None:
    assert falls_below(Share(220, 360), Share(240, 330)) and not Share(220, 360).high < Share(240, 330).low
    assert not falls_below(Share(293, 344), Share(294, 330)) and not falls_below(Share(240, 330), Share(220, 360))
    assert falls_below(Share(500, 1000), Share(700, 1000), 0.1) and not falls_below(
        Share(500, 1000), Share(700, 1000), 0.2
    )
    assert not falls_below(Share(0, 0), Share(700, 1000)) and not falls_below(Share(0, 10), Share(0, 0))
