# SPDX-License-Identifier: Apache-2.0
"""The loop: text, drafter inputs, and counters worked out by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import drafter_files, relative_error
from torch import Tensor

from vllm_kimi_eagle3.reference import Drafter, Proposal, SpeculationTrace, Target, fc_rows, greedy, speculate
from vllm_kimi_eagle3.reference.ops import Media

PROMPT = [5, 17, 80, 3, 44, 9, 61]
IDS = (1, 2, 4)


class Scripted:
    """A drafter that knows the text and, at each step, gets as many drafts right as ``right`` says."""

    use_aux_hidden_state = True

    def __init__(self, text: list[int], right: Callable[[int], int]) -> None:
        self.text, self.right, self.calls = text, right, 0

    def start(self) -> "Scripted":
        return self

    def propose(
        self, rows: Tensor, token_ids: Sequence[int], first_position: int, k: int, media: Media | None = None
    ) -> Proposal:
        at = first_position + len(token_ids) + 1  # index of the first token to guess
        guesses = (self.text + [0] * k)[at : at + k]
        good = self.right(self.calls)
        self.calls += 1
        return Proposal([t if i < good else (t + 1) % 96 for i, t in enumerate(guesses)], rows, rows)


@pytest.fixture(scope="module")
def text(target: Target) -> list[int]:
    return PROMPT + greedy(target, PROMPT, 60)


@pytest.fixture(scope="module")
def drafters(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Drafter]:
    folder = tmp_path_factory.mktemp("drafters")
    kinds = [{"kind": "gqa"}, {"kind": "mla", "norm_output": True}, {"kind": "gqa", "draft_vocab_size": 96}]
    return [Drafter.load(drafter_files(folder / str(i), seed=i, **kind), target) for i, kind in enumerate(kinds)]


def run(target: Target, text: list[int], right: Callable[[int], int], n: int = 20, k: int = 3, **limits: int):
    return speculate(target, Scripted(text, right), PROMPT, IDS, k, n, **limits)


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 95), min_size=1, max_size=12),
    which=st.integers(0, 2),
    k=st.integers(1, 5),
    n=st.integers(1, 24),
    limit=st.none() | st.integers(14, 40),
    stop=st.sets(st.integers(0, 95), max_size=12),
)
def test_the_text_is_plain_greedy_whatever_the_drafter(
    target: Target,
    drafters: list[Drafter],
    prompt: list[int],
    which: int,
    k: int,
    n: int,
    limit: int | None,
    stop: set[int],
) -> None:
    trace = speculate(
        target, drafters[which], prompt, IDS, k, n, stop_token_ids=stop, max_model_len=limit, drafter_max_model_len=20
    )
    assert trace.output_ids == greedy(target, prompt, n, stop_token_ids=stop, max_model_len=limit)
    assert all(len(s.input_ids) + s.start < (limit or 10**9) for s in trace.steps)
    assert sum(trace.accepted_per_position) == trace.accepted <= trace.drafted


def test_an_oracle_is_always_accepted(target: Target, text: list[int]) -> None:
    trace = run(target, text, lambda _: 3, n=20)
    assert trace.output_ids == text[7:27]
    # one token from the prefill, then four a step; the last step emits 3 of 4 and still counts 3 accepted
    assert [len(s.emitted) for s in trace.steps] == [1, 4, 4, 4, 4, 3]
    assert (trace.drafts, trace.drafted, trace.accepted) == (5, 15, 15)
    assert trace.acceptance_length == 4.0
    assert trace.accepted_per_position == [5, 5, 5]


def test_a_drafter_that_is_always_wrong(target: Target, text: list[int]) -> None:
    trace = run(target, text, lambda _: 0, n=20)
    assert trace.output_ids == text[7:27]
    assert (trace.drafts, trace.drafted, trace.accepted, trace.acceptance_length) == (19, 57, 0, 1.0)


def test_partial_acceptance_counts_by_position(target: Target, text: list[int]) -> None:
    trace = run(target, text, lambda call: call % 4, n=21)
    # proposals right for 0, 1, 2, 3, 0, 1, 2, 3 drafts: 1 + (1+2+3+4) + (1+2+3+4) = 21 tokens
    assert [s.accepted for s in trace.steps] == [0, 0, 1, 2, 3, 0, 1, 2, 3]
    assert trace.output_ids == text[7:28]
    assert (trace.drafts, trace.drafted, trace.accepted) == (8, 24, 12)
    assert trace.accepted_per_position == [6, 4, 2]
    assert trace.acceptance_length == 2.5


def test_what_is_cut_from_the_output_still_counts_as_accepted(target: Target, text: list[int]) -> None:
    trace = run(target, text, lambda _: 3, n=2)
    assert trace.steps[-1].emitted == text[8:9]
    assert (trace.drafts, trace.drafted, trace.accepted) == (1, 3, 3)
    one = run(target, text, lambda _: 3, n=1)  # drafted after the prefill, never tested
    assert (one.drafts, one.drafted, one.acceptance_length) == (0, 0, 1.0)
    assert one.steps[0].proposal is not None


def test_a_stop_token_among_the_drafts_ends_the_text_there(target: Target, text: list[int]) -> None:
    new = text[7:]
    at = next(i for i in range(2, 40) if new[i] not in new[:i] and i % 4 == 2)  # the second draft of a step
    trace = speculate(target, Scripted(text, lambda _: 3), PROMPT, IDS, 3, 60, stop_token_ids={new[at]})
    assert trace.output_ids == new[: at + 1]
    assert trace.steps[-1].accepted == 3
    assert len(trace.steps[-1].emitted) == 2


def test_near_max_model_len_fewer_drafts_are_scheduled(target: Target, text: list[int]) -> None:
    trace = run(target, text, lambda _: 0, n=60, max_model_len=14, drafter_max_model_len=99)
    assert trace.output_ids == text[7:14]
    assert [s.start for s in trace.steps] == [0, 7, 8, 9, 10, 11, 12]
    assert [len(s.drafts) for s in trace.steps] == [0, 3, 3, 3, 2, 1, 0]
    assert (trace.drafts, trace.drafted) == (5, 12)


def test_beyond_the_drafters_limit_the_engine_verifies_zeros(target: Target, text: list[int]) -> None:
    trace = run(target, text, lambda _: 0, n=6, drafter_max_model_len=14)
    # lengths of the steps: 7, then 7 + 4, 8 + 4, ...; the drafter runs while length + 3 <= 14
    assert [s.proposal is not None for s in trace.steps] == [True, True, False, False, False, False]
    assert [s.drafts == [0, 0, 0] for s in trace.steps] == [False, False, False, True, True, True]
    assert (trace.drafts, trace.drafted) == (5, 15)


@pytest.fixture(scope="module", params=[0, 1, 2])
def real(request: pytest.FixtureRequest, target: Target, drafters: list[Drafter]) -> tuple[Drafter, SpeculationTrace]:
    return drafters[request.param], speculate(target, drafters[request.param], PROMPT, IDS, 3, 40)


def test_the_drafter_receives_each_confirmed_row_once_with_the_next_token(
    target: Target, real: tuple[Drafter, SpeculationTrace]
) -> None:
    _, trace = real
    text = PROMPT + trace.output_ids
    want = fc_rows(target.forward(text), IDS)
    rows = torch.cat([s.drafter_rows for s in trace.steps])
    positions = [p for s in trace.steps for p in s.drafter_positions]
    ids = [t for s in trace.steps for t in s.drafter_ids]
    n = min(len(text) - 1, len(rows))
    assert positions == list(range(len(positions)))
    assert ids[:n] == text[1 : n + 1] != text[:n]
    assert relative_error(rows[:n], want[:n]) < 2e-5
    assert relative_error(rows[1:n], want[: n - 1]) > 2e-3
    assert relative_error(rows[:n], fc_rows(target.forward(text), (0, 1, 3))[:n]) > 2e-3


def test_every_proposal_equals_one_from_scratch_and_none_from_other_boundaries(
    target: Target, real: tuple[Drafter, SpeculationTrace]
) -> None:
    drafter, trace = real
    text = PROMPT + trace.output_ids
    right, wrong = (fc_rows(target.forward(text), ids) for ids in (IDS, (2, 3, 5)))
    differ = 0
    for step in trace.steps[:-1]:
        n = step.start + len(step.drafter_ids)
        assert step.proposal is not None
        assert step.proposal.token_ids == drafter.start().propose(right[:n], text[1 : n + 1], 0, 3).token_ids
        differ += step.proposal.token_ids != drafter.start().propose(wrong[:n], text[1 : n + 1], 0, 3).token_ids
    assert differ > len(trace.steps) // 2


def test_a_drafter_without_aux_states_gets_the_normed_state(target: Target, text: list[int]) -> None:
    stub = Scripted(text, lambda _: 3)
    stub.use_aux_hidden_state = False
    trace = speculate(target, stub, PROMPT, IDS, 3, 8)
    rows = torch.cat([s.drafter_rows for s in trace.steps])
    whole = target.forward(PROMPT + trace.output_ids)
    assert relative_error(rows[:14], whole.normed[:14]) < 2e-5
    assert relative_error(rows[:14], whole.boundaries[-1][:14]) > 2e-3


@pytest.mark.parametrize("ids", [(), (2, 1, 4), (1, 1, 2), (1, 2, 6), (-1, 2, 3)])
def test_boundaries_that_the_engine_would_misread_are_refused(target: Target, ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"strictly increasing numbers in 0\.\.5"):
        fc_rows(target.forward(PROMPT), ids)


def test_the_wrong_number_of_boundaries_is_refused(target: Target, drafters: list[Drafter], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrong number of boundaries"):
        speculate(target, drafters[0], PROMPT, (1, 2), 3, 4)
