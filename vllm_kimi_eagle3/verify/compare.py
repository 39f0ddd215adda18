# SPDX-License-Identifier: Apache-2.0
"""Records and oracle to a verdict: for each situation, how far the drafter's rows are from what they should be.

Pure: it knows neither vLLM nor how the records were made. A row's error is relative, |got - want| / |want| in the
Euclidean norm, one number for each boundary. The bar:

* float32: 1e-4.
* Other dtypes, oracle with a same-dtype reference: the flash-attention rule, at most twice the error of that reference
  against float32, so that the tolerance is measured and not chosen. It holds for the worst row, and for the median of
  a situation's rows: a near-tie of the router that rounding flips moves one row far, and the worst row's bar with it.
  Another row may flip in the engine than in the reference: one row in a hundred may be beyond the bar, up to 0.3, if no
  other boundary's state and no other position's is nearer to it than its own.
* A cache of keys and values in a smaller dtype: the median four times, since kernels then round queries and
  probabilities, too, or cut off where the reference rounds. MLA's latents stay at twice: FLASHMLA and
  TRITON_MLA took 1.4 times on an H200.
* Other dtypes without one: 0.1 for bf16, 0.03 for float16. One layer off is 0.2 and more on trained models, one
  position off about 1.

Token ids and positions are exact in every dtype. Drafts are exact in float32; elsewhere their disagreement may be as
many times that of the same-dtype reference: four over either cache of a smaller dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_kimi_eagle3.verify.capture import Call
from vllm_kimi_eagle3.verify.drive import Served
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle, Oracle

BARS = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.1}
"""Largest relative error of a row where nothing better is known."""

FLIPPED, FLIPPED_SHARE = 0.3, 0.01
"""How far a row may be off whose experts rounding has changed, and which share of the rows may be such."""

_MOST_PROBLEMS = 20
_ENOUGH = 12
"""Rows from which on a median says something."""


def times(rounded_cache: bool, latents: bool) -> tuple[float, float]:
    """``median_times`` and ``draft_times`` of ``compare``, by what the KV cache holds."""
    return (4.0 if rounded_cache and not latents else 2.0), (4.0 if rounded_cache else 2.0)


@dataclass
class Situation:
    """All rows that reached the drafter in one way.

    Attributes:
        name: such as "verify, some accepted".
        rows: how many.
        errors: the largest relative error by boundary.
        bars: the largest that passes, by boundary.
        median: the median row's error by boundary.
        median_bars: the largest median that passes; None where no same-dtype reference gave one, or rows are few.
        flipped: rows beyond the bar that rounding explains.
        cells: largest error by position and boundary, for the picture.
        wrong_drafts: calls whose drafts are not the oracle's; None if it did not tell.
        calls: how many.
    """

    name: str
    boundaries: tuple[int, ...]
    rows: int = 0
    calls: int = 0
    errors: list[float] = field(default_factory=list[float])
    bars: list[float] = field(default_factory=list[float])
    median: list[float] = field(default_factory=list[float])
    median_bars: list[float] | None = None
    flipped: int = 0
    cells: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    wrong_drafts: int | None = None
    wrong_ids: int = 0
    inputs_ok: bool = True
    ok: bool = True

    @property
    def max_relative_error(self) -> float:
        """Over all rows and boundaries."""
        return max(self.errors, default=0.0)

    @property
    def worst(self) -> tuple[float, float]:
        """Error and bar of the boundary that is nearest to its bar, or furthest beyond it."""
        return _nearest(self.errors, self.bars)

    @property
    def worst_median(self) -> tuple[float, float] | None:
        """The same of the medians; None where there is no bar for them."""
        return None if self.median_bars is None else _nearest(self.median, self.median_bars)

    def to_json(self) -> dict[str, Any]:
        """As ``verify --json`` prints it."""
        return {
            "name": self.name,
            "ok": self.ok,
            "rows": self.rows,
            "calls": self.calls,
            "max_relative_error": self.max_relative_error,
            "by_boundary": dict(zip(map(str, self.boundaries), self.errors, strict=True)),
            "bar": max(self.bars, default=0.0),
            "bar_by_boundary": dict(zip(map(str, self.boundaries), self.bars, strict=True)),
            "median_relative_error": max(self.median, default=0.0),
            "median_bar": None if self.median_bars is None else max(self.median_bars),
            "flipped_rows": self.flipped,
            "wrong_drafts": self.wrong_drafts,
            "wrong_ids": self.wrong_ids,
        }


def _nearest(errors: Sequence[float], bars: Sequence[float]) -> tuple[float, float]:
    def share(pair: tuple[float, float]) -> float:
        error, bar = pair
        if math.isnan(error):
            return math.inf
        # The reference's own embeddings, boundary 0, are exact in every dtype, so that their bar is 0.
        return 0.0 if error == 0 else error / bar if bar else math.inf

    return max(zip(errors, bars, strict=True), key=share)


@dataclass
class Comparison:
    """The verdict: right only if every situation is and there is no other problem."""

    situations: dict[str, Situation]
    problems: list[str]
    rows: int = 0
    """Rows compared; a row counts in each of its situations, but here once."""
    inputs_ok: bool = False
    """Whether all rows, ids and positions are right, whatever was drafted from them."""
    rows_are: list[int] | None = None
    """Where rows differ: the boundaries whose states they are, in the order of the columns; None if unknown."""
    drafts: list[list[int]] = field(default_factory=list[list[int]])
    """By position [wrong, of]: drafts that are not the oracle's, of those whose forerunners in the call are."""
    rounded_drafts: list[list[int]] = field(default_factory=list[list[int]])
    """The same for the oracle's own drafts from features in the engine's dtype."""

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and something was compared."""
        return bool(self.situations) and not self.problems and all(s.ok for s in self.situations.values())

    @property
    def max_relative_error(self) -> float:
        """Over all situations."""
        return max((s.max_relative_error for s in self.situations.values()), default=0.0)


def situations_of(served: Sequence[Served], block_size: int, max_model_len: int) -> dict[int, list[str]]:
    """The names of the situations that each call was in, by ``id`` of the call."""
    names: dict[int, list[str]] = {}
    kinds: dict[int, str] = {}
    steps: dict[int, list[tuple[Served, Call]]] = {}
    for one in served:
        before: Call | None = None
        for call in one.calls:
            kind = kinds[id(call)] = _kind(call, before, len(one.prompt_ids))
            found = names[id(call)] = [kind]
            if before is not None and before.scheduled > len(before.positions) and call.positions[0]:
                found.append("step after a rejection")
            first, last = call.positions[0], call.positions[-1]
            if first // block_size != last // block_size or (first and first % block_size == 0):
                found.append("across a block boundary")
            before = call
            steps.setdefault(call.step, []).append((one, call))
        if one.calls and len(one.prompt_ids) + len(one.output_ids) == max_model_len:
            names[id(one.calls[-1])].append("up to max_model_len")
    previous: set[str] = set()
    last_step = -2
    for step, members in sorted(steps.items()):
        present = {one.name for one, _ in members}
        prefilling = {kinds[id(call)] in _PREFILLS for _, call in members}
        for _, call in members:
            if len(members) > 1:
                names[id(call)].append("batch")
                if len(prefilling) == 2:
                    names[id(call)].append("batch of prefill and verify")
            if step == last_step + 1 and kinds[id(call)] not in _PREFILLS:
                if present - previous:
                    names[id(call)].append("a request joined")
                if previous - present:
                    names[id(call)].append("a request left")
        previous, last_step = present, step
    return names


_PREFILLS = frozenset({"whole prefill", "chunked prefill", "prefix-cache hit", "resumed after preemption"})


def _kind(call: Call, before: Call | None, prompt: int) -> str:
    start, rows = call.positions[0], len(call.positions)
    if before is not None and start <= before.positions[0]:
        return "resumed after preemption"
    if start < prompt:
        if before is None and start:
            return "prefix-cache hit"
        return "whole prefill" if start == 0 and rows == prompt else "chunked prefill"
    if call.scheduled == 1:
        return "decode of one token"
    if rows == call.scheduled:
        return "verify, all accepted"
    return "verify, none accepted" if rows == 1 else "verify, some accepted"


def compare(
    served: Sequence[Served],
    oracle: Oracle,
    boundaries: Sequence[int],
    *,
    dtype: str,
    block_size: int,
    max_model_len: int,
    bar: float | None = None,
    embedding_bar: float | None = None,
    floor: Tensor | None = None,
    median_times: float = 2.0,
    draft_times: float = 2.0,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Compare every recorded row, token id, position and draft with the oracle.

    Args:
        served: ended requests with their calls.
        oracle: what is right.
        boundaries: what the columns of a row are, in order.
        dtype: the engine's, "float32", "bfloat16" or "float16".
        block_size: of the KV cache, in tokens; names a situation.
        max_model_len: names a situation, and ends what is drafted.
        bar: replaces the one by dtype.
        embedding_bar: the same for pictures' embeddings alone.
        floor: what ``rounding`` found for more requests than these, where these are few.
        median_times: how many times the same-dtype reference's median error is right.
        draft_times: how many times its wrong drafts are right.
        progress: told how many requests are compared.
    """
    boundaries = tuple(boundaries)
    names = situations_of(served, block_size, max_model_len)
    problems: list[str] = []
    situations: dict[str, Situation] = {}
    floors: list[Tensor] = []
    by_situation: dict[str, list[tuple[int, Tensor]]] = {}
    total = 0
    wrong = {"ours": 0, "reference": 0, "calls": 0}
    ours, noise = list[list[int]](), list[list[int]]()
    differing: list[tuple[Oracle, list[int], Call, Tensor]] = []
    exact = dtype == "float32"  # but for a cache in another dtype
    for done, one in enumerate(served):
        if progress is not None and done:
            progress(done)
        if not one.calls:
            problems.append(f"{one.name}: the drafter was never given anything")
            continue
        tokens, found = _ids_and_positions(one)
        view, embeds = _about(one, oracle)
        allowed = bar if embedding_bar is None else embedding_bar
        found += _embeddings(one, embeds, BARS[dtype] if allowed is None else allowed)
        wrong_calls = {index for index, _ in found}
        problems += [text for _, text in found]
        want = view.features(tokens)
        rounded = view.rounded(tokens)
        exact = exact and rounded is None
        if rounded is not None and floor is None:
            floors.append(_errors(rounded, want, len(boundaries)))
        # Beyond the longest request engines draft from positions of their own choice, and throw the tokens away.
        reached = [max_model_len - call.positions[-1] for call in one.calls]
        expected = _cut(view.drafts(want, tokens, one.calls), reached)
        nearby = None if rounded is None else _cut(view.drafts(rounded, tokens, one.calls), reached)
        for index, call in enumerate(one.calls):
            drafts = call.drafts[: reached[index]]
            off = expected is not None and drafts != expected[index]
            if expected is not None:
                _count(ours, drafts, expected[index])
                if nearby is not None:
                    _count(noise, nearby[index], expected[index])
            wrong["calls"] += 1
            wrong["ours"] += off
            wrong["reference"] += expected is not None and nearby is not None and nearby[index] != expected[index]
            if max(call.positions) >= len(want):
                problems.append(f"{one.name}: a row for position {max(call.positions)} of {len(want)} tokens")
                continue
            rows = want[call.positions]
            if call.rows.shape != rows.shape:
                problems.append(f"{one.name}: rows of {call.rows.shape[1]} numbers, expected {rows.shape[1]}")
                continue
            errors = _errors(call.rows.float(), rows, len(boundaries))
            total += len(errors)
            differing.append((view, tokens, call, errors))
            for name in names[id(call)]:
                s = situations.setdefault(name, Situation(name, boundaries, errors=[0.0] * len(boundaries)))
                _add(s, call, errors)
                by_situation.setdefault(name, []).append((id(call), errors))
                s.wrong_ids += index in wrong_calls
                if expected is not None:
                    s.wrong_drafts = (s.wrong_drafts or 0) + off
    if progress is not None:
        progress(len(served))
    floor = torch.cat(floors) if floors else floor
    if exact or bar is not None:
        floor = None
    bars = [BARS[dtype] if bar is None else bar] * len(boundaries)
    if floor is not None:
        bars = (2 * floor.amax(0)).tolist()
    flipped = {} if exact or bar is not None else _flipped(differing, boundaries, bars, total)
    for s in situations.values():
        rows = torch.cat([errors for _, errors in by_situation[s.name]])
        s.median = rows.median(0).values.tolist()
        s.bars = bars
        if floor is not None and len(rows) >= _ENOUGH:
            s.median_bars = (median_times * floor.median(0).values).tolist()
        judged = torch.cat([_without(errors, flipped.get(call, ())) for call, errors in by_situation[s.name]])
        s.flipped = len(rows) - len(judged)
        # Written so that NaN fails.
        s.ok = not s.wrong_ids and bool((judged <= torch.tensor(bars, dtype=judged.dtype)).all())
        s.ok = s.ok and all(e <= b for e, b in zip(s.median, s.median_bars or s.bars, strict=True))
        s.inputs_ok = s.ok
        s.ok = s.ok and not (exact and s.wrong_drafts)
    inputs_ok = bool(situations) and not problems and all(s.inputs_ok for s in situations.values())
    largest = max((bar for s in situations.values() for bar in s.bars), default=0.0)
    rows_are = None
    if not inputs_ok:
        # Written so that NaN counts as different.
        worst = [(view, ids, call) for view, ids, call, errors in differing if not errors.max() <= largest]
        rows_are = _whose(worst[:_ENOUGH], boundaries, largest)
    if rows_are is not None:
        problems.insert(0, f"the rows are the states of boundaries {rows_are}, not of {list(boundaries)}")
    if not exact and wrong["reference"] and wrong["ours"] > draft_times * wrong["reference"] + 0.05 * wrong["calls"]:
        problems.append(
            f"{wrong['ours']} of {wrong['calls']} drafter calls proposed other tokens than the reference, which itself"
            f" proposes other ones at {wrong['reference']} in {dtype}"
        )
    return Comparison(situations, problems[:_MOST_PROBLEMS], total, inputs_ok, rows_are, ours, noise)


def rounding(served: Sequence[Served], oracle: Oracle, count: int) -> Tensor | None:
    """What rounding to the engine's dtype costs the oracle on these requests.

    Returns:
        (T, count): each row's relative error in each of ``count`` boundaries; None where it is unknown.
    """
    found: list[Tensor] = []
    for one in served:
        tokens, _ = _ids_and_positions(one)
        view, _ = _about(one, oracle)
        rounded = view.rounded(tokens)
        if rounded is None:
            return None
        found.append(_errors(rounded, view.features(tokens), count))
    return torch.cat(found) if found else None


def _about(one: Served, oracle: Oracle) -> tuple[Oracle, Mapping[int, Tensor]]:
    """The oracle for one request, and what its drafter is to embed instead of tokens, by place in the prompt."""
    if one.media is None:
        return oracle, {}
    if not isinstance(oracle, CheckpointOracle):
        raise TypeError("a prompt with pictures can be compared with a CheckpointOracle only")
    view = oracle.about(one.media, one.rounded_media)
    return view, view.embeds()


def _cut(drafts: list[list[int]] | None, lengths: Sequence[int]) -> list[list[int]] | None:
    return drafts and [ids[:length] for ids, length in zip(drafts, lengths, strict=True)]


def _count(counts: list[list[int]], drafts: Sequence[int], expected: Sequence[int]) -> None:
    """Count one call's drafts up to the first wrong one: what comes behind that was drafted from another text."""
    for i, (draft, right) in enumerate(zip(drafts, expected, strict=False)):
        if i == len(counts):
            counts.append([0, 0])
        counts[i][0] += draft != right
        counts[i][1] += 1
        if draft != right:
            return


def _whose(
    differing: Sequence[tuple[Oracle, list[int], Call]], boundaries: Sequence[int], bar: float
) -> list[int] | None:
    """Which boundary each column of these calls' rows is; None unless every column is one and some are wrong ones."""
    columns: list[Tensor] = []
    for oracle, tokens, call in differing:
        states = oracle.every(tokens)
        if states is None:
            return None
        kept = [i for i, position in enumerate(call.positions) if position < len(states)][-_ENOUGH:]
        if kept:
            want = states[[call.positions[i] for i in kept]].double()  # (R, L + 1, H)
            got = call.rows[kept].unflatten(1, (len(boundaries), -1)).double()  # (R, n, H)
            away = (got[:, :, None] - want[:, None]).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)[:, None]
            columns.append(away)
    if not columns:
        return None
    error, boundary = torch.cat(columns).amax(0).min(-1)  # over rows, then the nearest boundary
    found: list[int] = boundary.tolist()
    return found if bool((error <= bar).all()) and found != list(boundaries) else None


def _flipped(
    differing: Sequence[tuple[Oracle, list[int], Call, Tensor]],
    boundaries: Sequence[int],
    bars: Sequence[float],
    total: int,
) -> dict[int, list[int]]:
    """By ``id`` of a call, its rows beyond the bars, if all are right but for experts which rounding has changed.

    They may be ``FLIPPED_SHARE`` of ``total`` rows, and one is always allowed.
    """
    bar = torch.tensor(bars, dtype=torch.float64)
    beyond = [(errors > bar).any(1).nonzero().flatten().tolist() for *_, errors in differing]
    if sum(map(len, beyond)) > max(1, FLIPPED_SHARE * total):
        return {}
    found: dict[int, list[int]] = {}
    for (oracle, tokens, call, errors), rows in zip(differing, beyond, strict=True):
        if not rows:
            continue
        want = oracle.features(tokens).unflatten(1, (len(boundaries), -1)).double()  # (T, n, H)
        states = oracle.every(tokens)
        for row in rows:
            position = call.positions[row]
            got = call.rows[row].unflatten(0, (len(boundaries), -1)).double()  # (n, H)
            others = [(got - want).norm(dim=-1)]
            own = others[0][position]
            if states is not None and position < len(states):
                others.append((got[None] - states[position].double()[:, None]).norm(dim=-1))  # (L + 1, n)
            # Not argmin: the embeddings of one token are the same wherever it stands. Written so that NaN fails.
            near = own <= torch.cat(others).amin(0) * (1 + 1e-6)
            if not bool(near.all() and (errors[row] <= FLIPPED).all()):
                return {}
        found[id(call)] = rows
    return found


def _without(errors: Tensor, rows: Sequence[int]) -> Tensor:
    kept = torch.ones(len(errors), dtype=torch.bool)
    kept[list(rows)] = False
    return errors[kept]


def _errors(got: Tensor, want: Tensor, count: int) -> Tensor:
    """(T, n): each row's relative error in each boundary."""
    got, want = (t.unflatten(1, (count, -1)).double() for t in (got, want))
    return (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)


def _add(s: Situation, call: Call, errors: Tensor) -> None:
    s.calls += 1
    s.rows += len(call.positions)
    values: list[list[float]] = errors.tolist()
    s.errors = [_worse(a, b) for a, b in zip(s.errors, errors.amax(0).tolist(), strict=True)]
    for position, row in zip(call.positions, values, strict=True):
        old = s.cells.get(position)
        s.cells[position] = row if old is None else [_worse(a, b) for a, b in zip(old, row, strict=True)]


def _worse(a: float, b: float) -> float:
    """The larger; NaN is the largest of all."""
    return b if b > a or b != b else a


def _embeddings(one: Served, expected: Mapping[int, Tensor], bar: float) -> list[tuple[int, str]]:
    """Where a drafter's row embeds something else than its token, or than the picture that is expected there.

    Args:
        one: the request.
        expected: by place in the prompt.
        bar: largest relative error.
    """
    found: list[tuple[int, str]] = []
    for index, call in enumerate(one.calls):
        if call.embeds is None:
            # Text is not known to be embedded as something else; a picture is not known to be embedded at all.
            if any(position + 1 in expected for position in call.positions):
                found.append((index, f"{one.name}: this runner does not show what its drafter embeds for pictures"))
            continue
        for row, position in enumerate(call.positions):
            given, want = call.embeds.get(row), expected.get(position + 1)
            where = f"{one.name}: the row at position {position}"
            if given is None and want is None:
                continue
            if want is None:
                found.append((index, f"{where} embeds something else than token {call.ids[row]}"))
            elif given is None:
                found.append((index, f"{where} embeds token {call.ids[row]}, expected a picture's embedding"))
            elif not (given.float() - want).norm() <= bar * want.norm():
                found.append((index, f"{where} embeds something else than the picture"))
    return found


def _ids_and_positions(one: Served) -> tuple[list[int], list[tuple[int, str]]]:
    """The whole text, and what is wrong with the ids and positions of a request's calls, by index of the call.

    The text is what the user got, and behind it what the drafter saw of a last step whose output was cut.
    """
    tokens = [*one.prompt_ids, *one.output_ids]
    generated = len(tokens)
    found: list[tuple[int, str]] = []
    next_position: int | None = None
    for index, call in enumerate(one.calls):
        start = call.positions[0]
        if call.positions != list(range(start, start + len(call.positions))):
            found.append((index, f"{one.name}: positions {call.positions[:8]} are not consecutive"))
        elif next_position is None and start >= len(one.prompt_ids):
            found.append((index, f"{one.name}: position {start} comes first, behind the prompt"))
        elif next_position is not None and start != next_position and start > one.calls[index - 1].positions[0]:
            found.append((index, f"{one.name}: position {start} follows {next_position - 1}"))
        next_position = call.positions[-1] + 1
        for position, token in zip(call.positions, call.ids, strict=True):
            if position + 1 == len(tokens) and position + 1 >= generated:
                tokens.append(token)
            elif position + 1 >= len(tokens) or tokens[position + 1] != token:
                expected = tokens[position + 1] if position + 1 < len(tokens) else "none"
                found.append((index, f"{one.name}: token id {token} at position {position}, expected {expected}"))
    return tokens, found
