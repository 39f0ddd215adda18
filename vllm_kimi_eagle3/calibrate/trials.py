# SPDX-License-Identifier: Apache-2.0
"""The trials of a calibration, and what their hit rates decide. Pure: numbers in, decision out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_kimi_eagle3.bench.statistics import Share, needed_trials

Boundaries = tuple[int, ...]
SHIFTS = {"0": 0, "-1": -1, "1": 1}


@dataclass(frozen=True)
class Trial:
    """One set of boundaries to try.

    Attributes:
        name: ``-1``, ``0`` or ``1`` for a shift of all states, ``2:+1`` for the second state alone.
        boundaries: what the drafter is given.
    """

    name: str
    boundaries: Boundaries

    @property
    def whole(self) -> bool:
        """Whether it shifts all states alike: what the two rules and a wrong +1 come to."""
        return self.name in SHIFTS


def lay_out(base: Boundaries, num_layers: int) -> list[Trial]:
    """Every trial around ``base``, vLLM's reading of the ids, that a target of ``num_layers`` layers has.

    Boundaries stay ascending and within 0..num_layers; a trial that would leave that is left out.
    """
    trials = [Trial(name, tuple(b + shift for b in base)) for name, shift in SHIFTS.items()]
    for i in range(len(base)):
        for shift in (-1, 1):
            moved = (*base[:i], base[i] + shift, *base[i + 1 :])
            trials.append(Trial(f"{i + 1}:{shift:+d}", moved))
    seen: set[Boundaries] = set()
    kept: list[Trial] = []
    for trial in trials:
        b = trial.boundaries
        if b not in seen and all(low < high for low, high in pairwise(b)) and b[0] >= 0 and b[-1] <= num_layers:
            seen.add(b)
            kept.append(trial)
    return kept


@dataclass(frozen=True)
class Decision:
    """What the hit rates say.

    Attributes:
        boundaries: the best; None when the text did not decide.
        best: the trial with the highest rate, decided or not; None without trials.
        rival: the trial that is hardest to tell from it.
        needed: tokens that each trial needs until those two intervals part, if rates stay; None when decided, or when
            the rates are equal.
        sentence: the outcome in words.
    """

    boundaries: Boundaries | None
    best: Trial | None
    rival: Trial | None
    needed: int | None
    sentence: str


def decide(shares: Mapping[Trial, Share]) -> Decision:
    """Take the best trial when its interval is clear of its rivals'.

    A shift of all states has the other shifts of all states as rivals, and any other trial that looks better than they
    do; a shift of one state alone, which no rule explains, has to be clear of every other trial.
    """
    known = {trial: share for trial, share in shares.items() if share.total}
    if not known:
        return Decision(None, None, None, None, "nothing was measured")
    ranked = sorted(known, key=lambda trial: (-known[trial].rate, not trial.whole, trial.boundaries))
    best = ranked[0]
    rivals = [trial for trial in ranked[1:] if trial.whole or not best.whole]
    if not rivals:
        return Decision(None, best, None, None, "there is nothing to compare with: only one reading fits this target")
    rival = max(rivals, key=lambda trial: known[trial].high)
    if known[best].low > known[rival].high:
        sentence = f"boundaries {best.boundaries}: {known[best]}; next best {rival.boundaries}: {known[rival]}"
        return Decision(best.boundaries, best, rival, None, sentence)
    needed = needed_trials(known[best].rate, known[rival].rate)
    more = "they are equally good" if needed is None else f"about {needed} tokens would part them at these rates"
    sentence = (
        f"boundaries {best.boundaries} ({known[best]}) and {rival.boundaries} ({known[rival]}) can't be told apart by"
        f" this text; {more}"
    )
    return Decision(None, best, rival, needed, sentence)


def rule_of(ids: Sequence[int] | None, boundaries: Boundaries) -> str | None:
    """The rule that gives these boundaries from a checkpoint's ids; None when neither does."""
    if ids is None:
        return None
    if tuple(ids) == boundaries:
        return "boundary"
    return "output" if tuple(i + 1 for i in ids) == boundaries else None
