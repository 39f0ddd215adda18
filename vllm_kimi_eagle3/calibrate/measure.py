# SPDX-License-Identifier: Apache-2.0
"""Run the drafter, teacher-forced, over what the target wrote: on the torch reference, whoever ran the target.

Row i of the drafter holds the target's states of token i and the embedding of token i + 1, and predicts token i + 2. A
hit is the drafter's first choice being the target's own greedy choice there, which is what greedy verification tests;
on sampled text the prefix is what was sampled. Only what the target wrote is counted, not the prompt.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_kimi_eagle3.bench.statistics import Share
from vllm_kimi_eagle3.calibrate.texts import Written
from vllm_kimi_eagle3.calibrate.trials import Boundaries, Trial
from vllm_kimi_eagle3.reference import Cache, Drafter


@dataclass(frozen=True)
class Guesses:
    """The drafter's first choices for one trial over all texts.

    Attributes:
        drafted: ids in the draft vocabulary.
        right: the target's own choices.
        hits: how many of the drafts, mapped by d2t, are right.
    """

    drafted: list[int]
    right: list[int]
    hits: int

    @property
    def share(self) -> Share:
        """The hit rate."""
        return Share(self.hits, len(self.right))


def guess(drafter: Drafter, texts: Sequence[Written], boundaries: Boundaries) -> Guesses:
    """Teacher-forced first choices with these boundaries."""
    drafted, right = list[int](), list[int]()
    hits = 0
    for text in texts:
        rows = text.rows(boundaries)
        last = len(text.ids) - 1
        normed, _ = drafter.forward(text.ids[1:], drafter.combine_hidden_states(rows[:last]), Cache())
        # Row i predicts what the target says after token i + 1; the first written token follows token prompt - 1.
        first = max(text.prompt - 2, 0)
        choices = drafter.logits(normed[first:]).argmax(-1)
        says = text.says[first + 1 :]
        hits += int((drafter.draft_to_target[choices] == says).sum())
        drafted += choices.tolist()
        right += says.tolist()
    return Guesses(drafted, right, hits)


def run_trials(
    drafter: Drafter,
    texts: Sequence[Written],
    trials: Sequence[Trial],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[Trial, Guesses]:
    """Every trial; the drafter alone is repeated."""
    found: dict[Trial, Guesses] = {}
    for number, trial in enumerate(trials):
        progress(number, len(trials))
        found[trial] = guess(drafter, texts, trial.boundaries)
    progress(len(trials), len(trials))
    return found


def relabelled(guesses: Guesses) -> Share:
    """The hit rate if the vocabulary mapping were learnt from the text instead of read from d2t.

    Each half of the text is judged by the mapping that the other half teaches: for a draft id, the token that most
    often was right. A drafter that knows nothing gains little by it; one whose d2t is wrong gains everything.
    """
    hits = 0
    for half in (0, 1):
        counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for number, (draft, token) in enumerate(zip(guesses.drafted, guesses.right, strict=True)):
            if number % 2 != half:
                counts[draft][token] += 1
        learnt = {draft: tokens.most_common(1)[0][0] for draft, tokens in counts.items()}
        for number, (draft, token) in enumerate(zip(guesses.drafted, guesses.right, strict=True)):
            hits += number % 2 == half and learnt.get(draft) == token
    return Share(hits, len(guesses.right))


def coverage(drafter: Drafter, guesses: Guesses) -> Share:
    """How many of the target's choices can be drafted at all: the ceiling of any hit rate."""
    known = set(drafter.draft_to_target.tolist())
    return Share(sum(token in known for token in guesses.right), len(guesses.right))


def simulate(drafter: Drafter, texts: Sequence[Written], boundaries: Boundaries, k: int) -> list[Share]:
    """Acceptance by position, cumulative, as a server would count it on the greedy texts.

    The target's part of the loop is known from the text, so only the drafter runs: from each newest token it drafts k,
    those that agree with the text are accepted, and the next step starts behind them.
    """
    accepted, steps = [0] * k, 0
    for text in texts:
        if not text.greedy:
            continue
        rows = text.rows(boundaries)
        session, seen, newest = drafter.start(), 0, text.prompt
        while newest + k < len(text.ids):
            proposal = session.propose(rows[seen:newest], text.ids[seen + 1 : newest + 1], seen, k)
            seen = newest
            right = _agreeing(proposal.token_ids, text.ids[newest + 1 :])
            for position in range(right):
                accepted[position] += 1
            steps += 1
            newest += right + 1
    return [Share(count, steps) for count in accepted]


def _agreeing(drafts: Sequence[int], text: Sequence[int]) -> int:
    count = 0
    for draft, token in zip(drafts, text, strict=False):
        if draft != token:
            break
        count += 1
    return count


def kept_streams(trials: Sequence[Trial]) -> set[int]:
    """The boundaries that some trial reads."""
    return {boundary for trial in trials for boundary in trial.boundaries}
