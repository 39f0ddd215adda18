# SPDX-License-Identifier: Apache-2.0
"""What is wrong with this server's speculation? A pure function of the evidence.

The order of the rules is the order of proof: what a file or an independent calculation proves comes before what counts
suggest. Counts alone can't tell wrong layers from a wrong drafter, nor either from spoilt states, and healthy counts
don't prove the right layers: one layer off costs about 0.1 of acceptance length on Kimi-K2.5 (sglang#25454). So without
a calibration, a verification or a certain plan the answer to many numbers is "not enough evidence", with the command
that gets it. Nothing is said of the states themselves unless somebody has looked at them, which ``verify`` does.

Thresholds are from published runs at k = 3 on chat (first position .63 to .75); they hold for drafters of
ordinary training, and say nothing about a workload on which the target itself rambles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from vllm_kimi_eagle3.bench.statistics import Share, falls_below

MIN_DRAFTS = 200
"""Verify steps below which counters say nothing."""
HEALTHY_FIRST = 0.50
"""First-position acceptance of a sound pair on chat is .63 to .75; .50 leaves room for harder text."""
LOW_FIRST = 0.30
"""Below this, features or drafter are wrong."""
CLIFF = 0.5
"""A sound drafter's later positions keep more than this share of the first one's rate (conditional)."""
LIVE_MARGIN = 0.15
"""How far the live first position may stay below the teacher-forced rate: it is measured after misses."""
TEXT_MARGIN = 0.08
"""How far later positions may stay below an independent run of the same loop, on other text of the kind."""
WRONG_DRAFTS = 0.02
"""Share of drafts that may differ from a reference's on the same rows: near-ties that rounding flips."""
SAMPLED = 0.5
"""At ordinary temperatures sampled text keeps more than this share of the greedy first position."""
BREAK_EVEN_NOISE = 0.03
"""Speed-ups this close to 1 are neither gain nor loss."""

Boundaries = tuple[int, ...]


class Name(Enum):
    """The verdicts."""

    HEALTHY = "healthy"
    MISALIGNED = "features misaligned"
    CORRUPTED = "features stale or corrupted"
    UNFIT = "drafter does not fit the target"
    RECURRENCE = "drafter's own recurrence or KV"
    VOCABULARY = "vocabulary mapping"
    WALL = "throughput wall"
    UNKNOWN = "not enough evidence"


@dataclass(frozen=True)
class Evidence:
    """What is known about one server. Everything may be missing.

    Attributes:
        drafts: verify steps.
        accepted: for each position, the steps in which it and all before it were accepted (cumulative, as vLLM counts).
        greedy: whether the counters are of greedy decoding; sampling lowers them.
        speedup: tokens per second against the same server without speculation; None without a baseline.
        captured: the boundaries that the server captures, as planned, logged, or seen by ``verify``; None when unknown.
        planned: the boundaries that the pair's files ask for; None when unknown.
        certain: whether somebody who knows decided those boundaries (not an ambiguous reading).
        trials: teacher-forced first-token hits by boundaries, from ``calibrate``.
        decided: the boundaries that ``calibrate`` decided for; None when it did not, or did not say.
        relabelled: the best trial's hits if its vocabulary mapping were learnt from the text; see ``calibrate``.
        reference: per-position acceptance that an independent implementation gets from the captured boundaries.
        features_match: whether ``verify`` found rows, token ids and positions equal to the reference's.
        rows_are: where they are not: the boundaries whose states they are, in the order of the columns.
        wrong_drafts: by position, drafts in ``verify`` that are not the reference's, of those whose forerunners are.
        wrong_rounded: the same for the reference itself, in the engine's dtype.
        vocabulary_faults: what ``doctor`` found wrong with ``d2t`` or the vocabularies, one sentence each.
        vocabulary_doubts: what it found odd about them.
        fit_faults: what ``doctor`` found that speaks of another target, one sentence each.
        control_first: first-position acceptance of a control drafter on the same server.
        sampled_first: first-position acceptance of sampled text at an ordinary temperature, beside greedy ``accepted``.
    """

    drafts: int = 0
    accepted: tuple[int, ...] = ()
    greedy: bool = True
    speedup: float | None = None
    captured: Boundaries | None = None
    planned: Boundaries | None = None
    certain: bool = False
    trials: Mapping[Boundaries, Share] = field(default_factory=dict[Boundaries, Share])
    decided: Boundaries | None = None
    relabelled: Share | None = None
    reference: tuple[Share, ...] = ()
    features_match: bool | None = None
    rows_are: Boundaries | None = None
    wrong_drafts: tuple[Share, ...] = ()
    wrong_rounded: tuple[Share, ...] = ()
    vocabulary_faults: tuple[str, ...] = ()
    vocabulary_doubts: tuple[str, ...] = ()
    fit_faults: tuple[str, ...] = ()
    control_first: Share | None = None
    sampled_first: Share | None = None

    @property
    def positions(self) -> tuple[Share, ...]:
        """Cumulative acceptance by position."""
        return tuple(Share(min(max(count, 0), self.drafts), self.drafts) for count in self.accepted)

    @property
    def conditional(self) -> tuple[Share, ...]:
        """Acceptance of each position given that the one before it was accepted."""
        before = (self.drafts, *self.accepted)
        return tuple(
            Share(min(count, total), total) for count, total in zip(self.accepted, before, strict=False) if total > 0
        )

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a verify step, the target's own included; 1.0 when nothing was drafted."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else 1.0

    @property
    def best(self) -> tuple[Boundaries, Share] | None:
        """The calibration's winner; None when there is none, or its interval overlaps another's."""
        if self.decided is not None and self.decided in self.trials:
            return self.decided, self.trials[self.decided]
        if not self.trials:
            return None
        ranked = sorted(self.trials.items(), key=lambda item: (-item[1].rate, item[0]))
        (boundaries, share), others = ranked[0], ranked[1:]
        return (boundaries, share) if all(share.low > other.high for _, other in others) else None

    @property
    def fed(self) -> Boundaries | None:
        """The boundaries that reach the drafter, as far as is known; ascending."""
        return self.rows_are if self.rows_are is not None and _ascending(self.rows_are) else self.captured

    @property
    def right(self) -> Boundaries | None:
        """The boundaries that the drafter was trained on: measured, or else decided by somebody who knows."""
        if self.best is not None:
            return self.best[0] if self.best[1].low >= LOW_FIRST else None  # the best of bad ones proves nothing
        planned, fed = self.planned, self.fed
        if planned is None or not self.certain:
            return None
        own, asked = self.trials.get(fed) if fed is not None else None, self.trials.get(planned)
        if own is not None and asked is not None and own.rate > asked.rate:
            return None  # the text did not decide, but it leans the other way
        return planned

    @property
    def features_right(self) -> bool | None:
        """Whether the drafter is given right states, by ``verify``; None where nobody has looked."""
        if self.rows_are is None:
            return self.features_match
        if not _ascending(self.rows_are):
            return False
        return None if self.right is None else self.rows_are == self.right


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        name: what is wrong, or not.
        reasons: sentences, the weightiest first.
        next: the command to run next, or what to do.
        shift: for ``MISALIGNED``, what to add to the captured boundaries, one number a state; None otherwise.
        boundaries: for ``MISALIGNED``, the right ones.
    """

    name: Name
    reasons: tuple[str, ...]
    next: str
    shift: tuple[int, ...] | None = None
    boundaries: Boundaries | None = None

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "name": self.name.value,
            "reasons": list(self.reasons),
            "next": self.next,
            "shift": None if self.shift is None else list(self.shift),
            "boundaries": None if self.boundaries is None else list(self.boundaries),
        }


def _ascending(boundaries: Boundaries) -> bool:
    return list(boundaries) == sorted(set(boundaries))


CALIBRATE = "vllm-kimi-eagle3 calibrate --target DIR --drafter DIR"
DOCTOR = "vllm-kimi-eagle3 doctor --target DIR --drafter DIR"
VERIFY = "vllm-kimi-eagle3 verify --target DIR --drafter DIR"
AND_VERIFY = f"{VERIFY} --json > v.json, then `vllm-kimi-eagle3 bench … --verification v.json`"


def decide(evidence: Evidence) -> Verdict:
    """Name the fault, or say what evidence is lacking. Total and deterministic."""
    for rule in (_vocabulary, _misaligned, _unfit, _corrupted, _recurrence, _wall, _healthy):
        verdict = rule(evidence)
        if verdict is not None:
            return Verdict(
                verdict.name,
                (*verdict.reasons, *_context(evidence, verdict.name)),
                verdict.next,
                verdict.shift,
                verdict.boundaries,
            )
    return _unknown(evidence)


# ---------------------------------------------------------------------------------------------------------------------
# The rules, strongest proof first. Each gives its verdict or None.


def _vocabulary(e: Evidence) -> Verdict | None:
    if e.vocabulary_faults:
        return Verdict(
            Name.VOCABULARY, e.vocabulary_faults, f"mend the drafter's d2t or draft_vocab_size; {DOCTOR} names it"
        )
    ranked = sorted(e.trials.values(), key=lambda share: -share.rate)
    if ranked and e.relabelled is not None and e.relabelled.low > max(ranked[0].high + LIVE_MARGIN, 2 * ranked[0].high):
        return Verdict(
            Name.VOCABULARY,
            (
                f"the drafter's own ids predict the target's tokens in {e.relabelled} of cases once the mapping is"
                f" learnt from text, but only {ranked[0]} by the checkpoint's d2t",
            ),
            "export d2t again from the training run that made these weights",
        )
    return None


def _misaligned(e: Evidence) -> Verdict | None:
    fed, right = e.fed, e.right
    if fed is None or right is None or fed == right:
        return None
    reasons: list[str] = []
    if fed != e.captured:
        reasons.append(f"verify saw that the drafter is given the states of boundaries {fed}, not of {e.captured}")
    if e.best is not None:
        reasons.append(f"the drafter's first token is right in {e.best[1]} of cases with boundaries {right}")
        own = e.trials.get(fed)
        reasons.append(
            f"with {fed}, which the server captures, in {own}"
            if own is not None
            else f"the server captures {fed}, which was not among those tried"
        )
    else:
        reasons.append(f"the drafter's files ask for boundaries {right}, and the server captures {fed}")
    shift = None
    if len(right) == len(fed):
        shift = tuple(wanted - taken for wanted, taken in zip(right, fed, strict=True))
    listed = ", ".join(map(str, right))
    choice = f'{{"kimi_eagle3": {{"layer_ids": [{listed}], "layer_rule": "boundary"}}}}'
    step = f"vllm serve … --additional-config '{choice}'"
    if e.captured == right:
        step = f"that is a fault of the engine, not of the choice of layers: report it with the output of `{VERIFY}`"
    return Verdict(Name.MISALIGNED, tuple(reasons), step, shift, right)


def _unfit(e: Evidence) -> Verdict | None:
    ranked = sorted(e.trials.values(), key=lambda share: -share.rate)
    if len(ranked) < 2 or ranked[0].high >= LOW_FIRST or ranked[0].total < MIN_DRAFTS:
        return None
    if e.relabelled is not None and e.relabelled.high >= LOW_FIRST:
        return None
    reasons = (f"whatever the layers, the drafter's first token is right in at most {ranked[0]} of cases",)
    return Verdict(
        Name.UNFIT,
        reasons + e.fit_faults,
        "take a drafter that was trained for this target, or train longer; the engine is not at fault",
    )


def _corrupted(e: Evidence) -> Verdict | None:
    if e.features_right is not False:
        return None
    if e.rows_are is not None:
        reason = f"the drafter is given the states of boundaries {e.rows_are}, in that order"
    else:
        reason = "what the engine hands to the drafter is not what an independent calculation gives"
    return Verdict(Name.CORRUPTED, (reason,), f"{VERIFY} shows in which situation they part")


def _recurrence(e: Evidence) -> Verdict | None:
    if e.features_match is True:
        for number, share in enumerate(e.wrong_drafts, 1):
            rounded = e.wrong_rounded[number - 1] if number <= len(e.wrong_rounded) else Share(0, 0)
            if share.low > max(WRONG_DRAFTS, 2 * rounded.high if rounded.total else 0):
                of = "" if number == 1 else " after right ones"
                return _recurrence_verdict(
                    f"given the right states, tokens and positions, draft {number} is another than the reference's in"
                    f" {share} of cases{of}"
                )
    if e.drafts < MIN_DRAFTS or len(e.conditional) < 2:
        return None
    first = e.conditional[0]
    if e.reference and first.rate < e.reference[0].rate - TEXT_MARGIN:
        return None  # whatever spoils the first position spoils the later ones, too
    for number, share in enumerate(e.conditional[1:], 2):
        expected = _expected_conditional(e, number)
        if expected is not None:
            if falls_below(share, expected, TEXT_MARGIN) and first.low >= LOW_FIRST:
                return _recurrence_verdict(
                    f"position {number} is accepted in {share} of cases after the one before it; the same drafter, run"
                    f" independently, gets {expected}"
                )
        elif first.low >= HEALTHY_FIRST and share.high < CLIFF * first.low:
            return _recurrence_verdict(
                f"position 1 is accepted in {first} of cases, but position {number} in only {share} after the one"
                " before it"
            )
    return None


def _expected_conditional(e: Evidence, number: int) -> Share | None:
    if len(e.reference) < number:
        return None
    before, here = e.reference[number - 2], e.reference[number - 1]
    return Share(min(here.hits, before.hits), before.hits) if before.hits >= MIN_DRAFTS // 2 else None


def _recurrence_verdict(reason: str) -> Verdict:
    return Verdict(
        Name.RECURRENCE,
        (reason, "the features serve position 1 only; later ones depend on the drafter's own state, positions and KV"),
        f"{VERIFY} names the first draft that differs; compare num_speculative_tokens 1 with more",
    )


def _wall(e: Evidence) -> Verdict | None:
    if e.speedup is None or e.speedup >= 1 - BREAK_EVEN_NOISE or not _acceptance_is_fine(e):
        return None
    cost = step_cost(e)
    return Verdict(
        Name.WALL,
        (
            f"acceptance is fine (length {e.acceptance_length:.2f}), but the server runs at {e.speedup:.2f} of its"
            " speed without speculation",
            f"a verify step costs {cost:.1f} ordinary steps, and brings {e.acceptance_length:.2f} tokens",
        ),
        "look for a verify step outside CUDA graphs or on a prefill kernel (TRITON_MLA up to vLLM 0.30 where D19 is not"
        " mended); try another attention backend or fewer draft tokens",
    )


def _healthy(e: Evidence) -> Verdict | None:
    if not _acceptance_is_fine(e):
        return None
    if e.speedup is not None and e.speedup < 1 + BREAK_EVEN_NOISE:
        return None
    if _drafts_differ(e) or _falls_short(e) or _forced_short(e) or _sampling_collapses(e) or not _layers_are_right(e):
        return None
    gain = "the speed-up was not measured" if e.speedup is None else f"the server is {e.speedup:.2f} times as fast"
    return Verdict(
        Name.HEALTHY,
        (f"position 1 is accepted in {e.positions[0]} of cases, length {e.acceptance_length:.2f}", gain),
        "nothing" if e.speedup is not None else "run `vllm-kimi-eagle3 bench` with a baseline to know the gain",
    )


def _unknown(e: Evidence) -> Verdict:
    """Why no name fits, and what would help most."""
    reasons: list[str] = []
    step = CALIBRATE
    if e.drafts < MIN_DRAFTS:
        reasons.append(f"only {e.drafts} verify steps were seen, at least {MIN_DRAFTS} are needed")
        if not e.trials:
            step = "run `vllm-kimi-eagle3 bench` with more prompts or tokens"
    elif not e.accepted:
        reasons.append("nothing is known about acceptance by position")
        step = "run `vllm-kimi-eagle3 bench` against a server that speculates"
    else:
        first = e.positions[0]
        if first.high < LOW_FIRST:
            reasons.append(
                f"position 1 is accepted in only {first} of cases: wrong layers, a wrong drafter or a fault between"
                " them look alike from outside"
            )
        elif _acceptance_is_fine(e) and _sampling_collapses(e):
            reasons.append(
                f"greedy text is accepted well (position 1: {first}), sampled text hardly ({e.sampled_first}):"
                " a fault of the engine's sampling or its verification, not of the features"
            )
            step = "compare with temperature 0 in production, and report it; " + DOCTOR
        elif _drafts_differ(e):
            wrong, of = sum(share.hits for share in e.wrong_drafts), max(share.total for share in e.wrong_drafts)
            reasons.append(
                f"in {wrong} of {of} calls the drafter proposed another token than the reference on the same rows:"
                " near-ties that rounding flips, or a fault of its own passes that costs little on this text"
            )
            step = f"{VERIFY} with more --prompts"
        elif _falls_short(e):
            pairs = zip(e.positions, e.reference, strict=False)
            number, live, own = next((n, a, b) for n, (a, b) in enumerate(pairs, 1) if falls_below(a, b))
            reasons.append(
                f"position {number} is accepted in {live} of cases, in an independent run of the same drafter in {own}:"
                " other text, other states than those planned, or spoilt ones"
            )
            step = AND_VERIFY
        elif _forced_short(e) and e.captured is not None:
            reasons.append(
                f"with true states of boundaries {e.captured} the drafter's first token is right in"
                f" {e.trials[e.captured]} of cases, in the server in {first}: other states than those planned, or"
                " spoilt ones"
            )
            step = AND_VERIFY
        elif first.low >= HEALTHY_FIRST and not _layers_are_right(e):
            reasons.append(
                f"acceptance looks healthy (position 1: {first}), but that does not prove the right layers: one layer"
                " off costs little"
            )
        elif first.low >= HEALTHY_FIRST:
            reasons.append(f"acceptance is fine (position 1: {first}) and the speed-up is within noise of 1")
            step = "repeat with more tokens, other concurrency, or fewer draft tokens"
        else:
            reasons.append(f"position 1 is accepted in {first} of cases, neither healthy nor broken")
            if e.best is not None and e.best[0] == e.captured:
                step = "compare with a control drafter: `vllm-kimi-eagle3 bench --control DIR`"
    if e.trials and e.best is None:
        reasons.append("the calibration's intervals overlap; it needs more text")
    return Verdict(Name.UNKNOWN, (*reasons, *_context(e, Name.UNKNOWN)), step)


# ---------------------------------------------------------------------------------------------------------------------


def step_cost(e: Evidence) -> float:
    """What a verify step costs in ordinary steps, which is the acceptance length that breaks even."""
    assert e.speedup is not None
    return e.acceptance_length / max(e.speedup, 1e-9)


def _acceptance_is_fine(e: Evidence) -> bool:
    return e.drafts >= MIN_DRAFTS and bool(e.accepted) and e.positions[0].low >= HEALTHY_FIRST


def _layers_are_right(e: Evidence) -> bool:
    """Whether anything but the counters says so."""
    if e.features_right is False or e.fed is None:
        return False
    if e.best is not None:
        return e.best[0] == e.fed
    return e.certain and e.planned in (None, e.fed)


def _sampling_collapses(e: Evidence) -> bool:
    """Whether sampled text is accepted so much less than greedy text that its verification must be at fault."""
    return e.sampled_first is not None and e.greedy and e.sampled_first.high < SAMPLED * e.positions[0].low


def _drafts_differ(e: Evidence) -> bool:
    """Whether a draft on right rows was not the reference's, where no rounding explains it."""
    return e.features_match is True and not e.wrong_rounded and any(share.hits for share in e.wrong_drafts)


def _falls_short(e: Evidence) -> bool:
    """Whether some position is accepted less than in an independent run, if only by a layer's worth."""
    return e.greedy and any(falls_below(live, own) for live, own in zip(e.positions, e.reference, strict=False))


def _forced_short(e: Evidence) -> bool:
    """Whether the first position is accepted less than the drafter guesses right on true states of those layers."""
    forced = e.trials.get(e.captured) if e.captured is not None else None
    return e.greedy and forced is not None and bool(e.accepted) and falls_below(e.positions[0], forced, LIVE_MARGIN)


def _context(e: Evidence, name: Name) -> tuple[str, ...]:
    """What stands beside the main reasons."""
    lines: list[str] = []
    if name not in (Name.UNFIT,):
        lines += e.fit_faults
    if name is not Name.HEALTHY:
        lines += e.vocabulary_doubts
    if e.control_first is not None and e.drafts >= MIN_DRAFTS and e.accepted:
        own = e.positions[0]
        if e.control_first.low > own.high:
            lines.append(f"a control drafter does better on the same server (position 1: {e.control_first})")
        elif e.control_first.high < own.low:
            lines.append(f"a control drafter does worse on the same server (position 1: {e.control_first})")
        else:
            lines.append(
                f"a control drafter does alike (position 1: {e.control_first}); two drafters failing alike can be one"
                " fault of the engine, or two drafters that don't fit"
            )
    if e.speedup is not None and name not in (Name.WALL, Name.HEALTHY):
        lines.append(
            f"speed-up {e.speedup:.2f}; a verify step costs {step_cost(e):.1f} ordinary steps, so acceptance length"
            f" {step_cost(e):.1f} breaks even"
        )
    if not e.greedy and e.accepted:
        lines.append("the counters are of sampled text, which lowers acceptance")
    return tuple(lines)
