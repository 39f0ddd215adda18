# SPDX-License-Identifier: Apache-2.0
"""The greedy loop, without and with speculation, counted as vLLM counts.

Predicts for one request what vLLM 0.32's V1 runner and scheduler do (gpu_model_runner.py, llm_base_proposer.py,
sched/scheduler.py), synchronously scheduled:

* A step runs the target on the newest token and the drafts, emits the accepted drafts plus one token of the target's
  own, and hands the drafter the confirmed rows.
* Counters include every verify step that was scheduled with drafts, and count what was accepted *before* the output is
  cut at a stop token or at max_new_tokens.
* Near max_model_len fewer drafts are scheduled: a step never computes beyond position max_model_len - 2.
* When this step's sequence length plus k exceeds the drafter's limit, the drafter does not run, and the engine
  schedules k drafts of token id 0 instead. They count as drafted, and are accepted should the target say 0.

It does not know: batches (the drafter's limit is tested against the longest request in a batch), async scheduling
(which near max_model_len plans a step as if all drafts of the one before were accepted), preemption, sampling,
grammars.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from vllm_kimi_eagle3.reference.drafter import Proposal
from vllm_kimi_eagle3.reference.ops import Cache, Media, shifted
from vllm_kimi_eagle3.reference.target import Target, TargetOutput


class Session(Protocol):
    """One sequence's drafting; ``DrafterSession``, or a test's own."""

    def propose(
        self, rows: Tensor, token_ids: Sequence[int], first_position: int, k: int, media: Media | None = None
    ) -> Proposal:
        """See ``DrafterSession.propose``."""
        ...


class DraftModel(Protocol):
    """What ``speculate`` needs of a drafter."""

    @property
    def use_aux_hidden_state(self) -> bool:
        """False: the features are the target's last hidden state after the final norm."""
        ...

    def start(self) -> Session:
        """A new sequence."""
        ...


@dataclass(frozen=True)
class Step:
    """One engine step of one request: the prefill (``drafts`` is empty), or a verify step.

    Attributes:
        start: position of the first token that the target ran.
        input_ids: what the target ran: prompt or newest token, then the drafts.
        drafts: the drafts under test, in the target's vocabulary.
        accepted: how many of them, from the left, the target agreed with.
        emitted: tokens that reach the user, cut at a stop or at the length limit.
        drafter_rows: (T, n * H), fc's input; only the rows up to the newest token. The engine carries the rejected
            tokens' rows behind them, where nothing that matters attends to them.
        drafter_ids: T ids; row i's is the token after position ``drafter_positions[i]``.
        drafter_positions: T positions.
        proposal: what was drafted for the next step; None if the drafter's length limit kept it from running.
    """

    start: int
    input_ids: list[int]
    drafts: list[int]
    accepted: int
    emitted: list[int]
    drafter_rows: Tensor
    drafter_ids: list[int]
    drafter_positions: list[int]
    proposal: Proposal | None


@dataclass
class SpeculationTrace:
    """A whole request. Counters carry the meaning of vLLM's ``SpecDecodingStats``."""

    k: int
    prompt_ids: list[int]
    steps: list[Step] = field(default_factory=list[Step])

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens, as the user gets them."""
        return [token for step in self.steps for token in step.emitted]

    @property
    def drafts(self) -> int:
        """Verify steps that tested at least one draft (vllm:spec_decode_num_drafts)."""
        return sum(bool(step.drafts) for step in self.steps)

    @property
    def drafted(self) -> int:
        """Draft tokens tested (vllm:spec_decode_num_draft_tokens)."""
        return sum(len(step.drafts) for step in self.steps)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted (vllm:spec_decode_num_accepted_tokens)."""
        return sum(step.accepted for step in self.steps)

    @property
    def accepted_per_position(self) -> list[int]:
        """For each of the k positions, in how many steps it was accepted."""
        return [sum(step.accepted > i for step in self.steps) for i in range(self.k)]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verify step, the target's own included; 1.0 when nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


def fc_rows(out: TargetOutput, boundaries: Sequence[int]) -> Tensor:
    """The drafter's features, (T, n * H): the boundaries side by side, in layer order as the engine collects them.

    Raises:
        ValueError: the boundaries are not strictly increasing, or not in 0..L.
    """
    last = out.boundaries.shape[0] - 1
    ids = list(boundaries)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > last:
        raise ValueError(f"boundaries {ids}: need strictly increasing numbers in 0..{last}")
    return torch.cat([out.boundaries[i] for i in ids], dim=-1)


def greedy(
    target: Target,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    stop_token_ids: Collection[int] = (),
    max_model_len: int | None = None,
    media: Media | None = None,
) -> list[int]:
    """Generate without speculation; arguments and stopping as in ``speculate``."""
    cache = Cache()
    tokens = list(prompt_ids)
    pending = tokens[:]
    while True:
        pictures = None if cache.length else media
        pending = [int(target.forward(pending, cache, pictures).logits[-1].argmax())]
        tokens += pending
        generated = len(tokens) - len(prompt_ids)
        if pending[0] in stop_token_ids or generated >= max_new_tokens or len(tokens) == max_model_len:
            return tokens[len(prompt_ids) :]


def speculate(
    target: Target,
    drafter: DraftModel,
    prompt_ids: Sequence[int],
    boundaries: Sequence[int],
    k: int,
    max_new_tokens: int,
    *,
    stop_token_ids: Collection[int] = (),
    max_model_len: int | None = None,
    drafter_max_model_len: int | None = None,
    media: Media | None = None,
    drafter_media: Media | None = None,
) -> SpeculationTrace:
    """Generate greedily with speculation, and record every step.

    Args:
        target: the model whose text is generated.
        drafter: a ``Drafter``, or anything with its ``start``.
        prompt_ids: at least one token, and fewer than max_model_len.
        boundaries: which of the target's boundaries feed the drafter, strictly increasing.
        k: draft tokens per step (num_speculative_tokens).
        max_new_tokens: the request's max_tokens.
        stop_token_ids: EOS and other stop tokens, which are emitted; empty stands for ignore_eos.
        max_model_len: the engine's limit on prompt plus output; None: unlimited.
        drafter_max_model_len: the drafter's limit (``speculative_config.draft_model_config.max_model_len``); vLLM
            takes the smaller of the drafter's own and the target's, so the default is max_model_len.
        media: the rows of the prompt's pictures, by place in the prompt.
        drafter_media: what the drafter sees in those places; None: the placeholder's embedding.

    Raises:
        ValueError: the boundaries do not fit the target, or their number does not fit the drafter's fc.
    """
    limit = max_model_len if drafter_max_model_len is None else drafter_max_model_len
    trace = SpeculationTrace(k, list(prompt_ids))
    cache, session = Cache(), drafter.start()
    tokens, pending, drafts = list(prompt_ids), list(prompt_ids), list[int]()
    while True:
        start = cache.length
        input_ids = pending + drafts
        pictures = media if start == 0 else None
        out = target.forward(input_ids, cache, pictures)
        says: list[int] = out.logits[len(pending) - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == says[accepted]:
            accepted += 1
        sampled = says[: accepted + 1]

        confirmed = len(pending) + accepted  # rows of this step that belong to the text
        rows = (fc_rows(out, boundaries) if drafter.use_aux_hidden_state else out.normed)[:confirmed]
        next_ids = [*input_ids[1:confirmed], sampled[-1]]
        cache.truncate(start + confirmed)
        fits = limit is None or start + len(input_ids) + k <= limit
        # A drafter's row holds the next token's embedding, a picture's as any other.
        seen = shifted(drafter_media, 1) if drafter_media and start == 0 else None
        proposal = session.propose(rows, next_ids, start, k, seen) if fits else None

        emitted, stopped = list[int](), False
        for token in sampled:
            emitted.append(token)
            tokens.append(token)
            generated = len(tokens) - len(prompt_ids)
            stopped = token in stop_token_ids or generated >= max_new_tokens or len(tokens) == max_model_len
            if stopped:
                break
        positions = list(range(start, start + confirmed))
        trace.steps.append(Step(start, input_ids, drafts, accepted, emitted, rows, next_ids, positions, proposal))
        if stopped:
            return trace
        pending = sampled[-1:]
        drafts = proposal.token_ids if proposal else [0] * k
        if max_model_len is not None:
            drafts = drafts[: max(0, max_model_len - cache.length - 2)]
