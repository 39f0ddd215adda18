# SPDX-License-Identifier: Apache-2.0
"""The comparison itself, without an engine: what it calls each situation, and that nothing slips through."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import needs_browser, picture
from torch import Tensor

from vllm_kimi_eagle3.verify.capture import Call
from vllm_kimi_eagle3.verify.compare import Comparison, Situation, _embeddings, compare, rounding, times
from vllm_kimi_eagle3.verify.drive import Served
from vllm_kimi_eagle3.verify.report import Facts, block, html, to_json

BOUNDARIES = (2, 5)
TEXT = [7, 8, 9, 10, 11, 12, 13, 14]
FACTS = Facts(
    version="1",
    vllm="0.32.0",
    torch="2",
    runner="V1",
    device="cpu",
    ranks=1,
    dtype="float32",
    target="T",
    drafter="<script>",
    k=2,
    rule="output",
    decided_by="you",
    boundaries=[2, 5],
    captured=[2, 5],
    reference="hf",
    requests=1,
    tokens=8,
    accepted_per_step=1.0,
    overlay="on",
)


def states(tokens: Sequence[int]) -> Tensor:
    """(T, 8): two boundaries of width 4, made of token and position."""
    at = torch.arange(len(tokens), dtype=torch.float32)
    return torch.stack([torch.tensor(tokens) + 0.5 * i + at for i in range(8)], dim=1)


class Oracle:
    def __init__(self, floor: float | None = None) -> None:
        self.floor = floor

    def features(self, tokens: Sequence[int]) -> Tensor:
        return states(tokens)

    def rounded(self, tokens: Sequence[int]) -> Tensor | None:
        return None if self.floor is None else states(tokens) * (1 + self.floor)

    def drafts(self, features: Tensor, tokens: Sequence[int], calls: Sequence[Call]) -> list[list[int]]:
        return [[1, 2] for _ in calls]

    def every(self, tokens: Sequence[int]) -> Tensor:
        """Seven boundaries; 2 and 5 are those that the columns should hold."""
        right = states(tokens).unflatten(1, (2, 4))
        others = [right[:, 0] * 3, right[:, 0] * 5, right[:, 0], right[:, 0] * 7, right[:, 0] * 9, right[:, 1]]
        return torch.stack([*others, right[:, 1] * 2], dim=1)


def served() -> Served:
    """Prompt of 4, all of two drafts accepted, then one of two, cut at the limit of tokens."""
    rows = states([*TEXT, 15])
    one = Served("r0", TEXT[:4], TEXT[4:])
    for step, (start, end, scheduled) in enumerate([(0, 4, 4), (4, 7, 3), (7, 9, 3)]):
        ids = [*TEXT, 15, 16][start + 1 : end + 1]
        one.calls.append(Call("r0", step, rows[start:end], ids, list(range(start, end)), [1, 2], scheduled))
    return one


def judge(*ones: Served, oracle: Oracle | None = None, **options: Any) -> Comparison:
    options = {"dtype": "float32", "block_size": 16, "max_model_len": 99, **options}
    return compare(ones, oracle or Oracle(), BOUNDARIES, **options)


def test_right_rows_pass_and_situations_have_their_names() -> None:
    found = judge(served())
    assert found.ok, found.problems
    assert set(found.situations) == {"whole prefill", "verify, all accepted", "verify, some accepted"}
    assert {s.name: s.rows for s in found.situations.values()}["verify, some accepted"] == 2


def spoil_row(one: Served) -> None:
    one.calls[1].rows = one.calls[1].rows.clone()
    one.calls[1].rows[0, 5] *= 1.01


def spoil_nan(one: Served) -> None:
    one.calls[1].rows = one.calls[1].rows.clone()
    one.calls[1].rows[2, 0] = math.nan


def spoil_id(one: Served) -> None:
    one.calls[1].ids[1] += 1


def spoil_prompt_id(one: Served) -> None:
    one.calls[0].ids[0] += 1


def spoil_position(one: Served) -> None:
    one.calls[1].positions = [4, 5, 5]


def skip_a_step(one: Served) -> None:
    del one.calls[1]


def skip_the_prompt(one: Served) -> None:
    del one.calls[0]


def never_drafted(one: Served) -> None:
    one.calls.clear()


def narrow_rows(one: Served) -> None:
    one.calls[1].rows = one.calls[1].rows[:, :6]


def swap_boundaries(one: Served) -> None:
    for call in one.calls:
        call.rows = call.rows.roll(4, dims=1)


def other_draft(one: Served) -> None:
    one.calls[2].drafts = [1, 3]


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_row,
        spoil_nan,
        spoil_id,
        spoil_prompt_id,
        spoil_position,
        skip_a_step,
        skip_the_prompt,
        never_drafted,
        narrow_rows,
        swap_boundaries,
        other_draft,
    ],
)
def test_whatever_differs_is_seen_and_printed(spoil: Any) -> None:
    one = served()
    spoil(one)
    found = judge(one)
    assert not found.ok
    assert "WRONG" in block(FACTS, found)
    assert to_json(FACTS, found)["ok"] is False
    if found.situations:
        assert "wrong" in html(FACTS, found)


@pytest.mark.parametrize(
    ("errors", "bars", "shown"),
    [
        ([0.15, 0.12], [0.28, 0.1], (0.12, 0.1)),
        ([0.15, 0.05], [0.28, 0.1], (0.15, 0.28)),
        ([0.0, 0.05], [0.0, 0.1], (0.05, 0.1)),
        ([0.01, 0.05], [0.0, 0.1], (0.01, 0.0)),
        ([0.0], [0.0], (0.0, 0.0)),
    ],
    ids=["beyond its own bar", "nearest to its bar", "an exact boundary", "one that should be exact", "nothing else"],
)
def test_the_boundary_that_decides_is_shown(errors: list[float], bars: list[float], shown: tuple[float, float]) -> None:
    found = Situation("x", (0, 4)[: len(errors)], errors=errors, bars=bars, median=errors, median_bars=bars)
    assert found.worst == found.worst_median == shown
    line = next(line for line in block(FACTS, Comparison({"x": found}, [])).splitlines() if line.startswith("x "))
    assert f"{shown[0]:.1e}   {shown[1]:.1e}" in line and "median {:.1e} of {:.1e}".format(*shown) in line
    assert found.to_json()["bar_by_boundary"] == dict(zip(("0", "4"), bars, strict=False))


def test_nan_is_shown_before_all() -> None:
    error, bar = Situation("x", (0, 4), errors=[9.0, math.nan], bars=[0.1, 0.2]).worst
    assert math.isnan(error) and bar == 0.2
    assert Situation("x", (0, 4), errors=[9.0, math.nan], bars=[0.1, 0.2]).worst_median is None


def test_no_requests_are_no_proof() -> None:
    assert not judge().ok


def test_a_request_that_starts_again_was_preempted() -> None:
    one = served()
    one.calls.append(Call("r0", 9, states(TEXT), [*TEXT[1:], 15], list(range(8)), [1, 2], 8))
    found = judge(one)
    assert found.ok, found.problems
    assert found.situations["resumed after preemption"].rows == 8


@pytest.mark.parametrize(("prompt", "start", "name"), [(8, 4, "prefix-cache hit"), (8, 0, "chunked prefill")])
def test_parts_of_a_prompt(prompt: int, start: int, name: str) -> None:
    one = Served("r0", TEXT[:prompt], [15])
    end = 8 if start else 4
    one.calls.append(
        Call("r0", 0, states(TEXT)[start:end], [*TEXT, 15][start + 1 : end + 1], [*range(start, end)], [1, 2], 4)
    )
    assert set(judge(one).situations) == {name}


def test_batches() -> None:
    first, second = served(), served()
    second.name = "r1"
    for call in second.calls:
        call.step += 1
    names = set(judge(first, second).situations)
    assert {"batch", "batch of prefill and verify", "a request joined", "a request left"} <= names


def test_the_bar_is_twice_the_rounding_of_a_same_dtype_reference() -> None:
    one = served()
    for call in one.calls:
        call.rows = call.rows * 1.003
    assert judge(one, oracle=Oracle(floor=0.002), dtype="bfloat16").ok
    assert not judge(one, oracle=Oracle(floor=0.001), dtype="bfloat16").ok
    assert not judge(one, oracle=Oracle(floor=0.002), dtype="bfloat16", bar=0.001).ok


def test_the_rounding_of_more_requests_may_be_the_bar_of_few() -> None:
    one = served()
    one.calls[1].rows = one.calls[1].rows * 1.003  # three rows: more than rounding flips
    right, coarse = Oracle(floor=0.001), rounding([served(), served()], Oracle(floor=0.002), 2)
    assert coarse is not None and coarse.shape == (2 * 10, 2)
    assert not judge(one, oracle=right, dtype="bfloat16").ok
    assert judge(one, oracle=right, dtype="bfloat16", floor=coarse).ok
    assert not judge(one, oracle=Oracle(floor=0.002), dtype="bfloat16", floor=coarse / 2).ok, "its own does not count"
    # Where a bar is given, or everything is exact, rounding excuses nothing.
    assert not judge(one, oracle=right, dtype="bfloat16", floor=coarse, bar=0.001).ok
    assert not judge(one, floor=coarse).ok
    assert rounding([one], Oracle(), 2) is None and rounding([], right, 2) is None


def test_one_flipped_row_does_not_widen_the_bar_of_all() -> None:
    """The reference's own worst row allows 100 %, its median 0.2 %."""

    class Flipping(Oracle):
        def rounded(self, tokens: Sequence[int]) -> Tensor | None:
            rows = states(tokens) * 1.001
            rows[3] *= 1.5
            return rows

    text = list(range(12))
    one = Served("r0", text, [12])
    one.calls.append(Call("r0", 0, states(text) * 1.0015, [*text[1:], 12], text, [1, 2], 12))
    assert judge(one, oracle=Flipping(), dtype="bfloat16").ok
    one.calls[0].rows = states(text) * 1.1
    found = judge(one, oracle=Flipping(), dtype="bfloat16")
    assert not found.ok and found.max_relative_error < min(found.situations["whole prefill"].bars)


LONG = [*range(3, 40)]


def flip(*rows: int, by: float = 0.2) -> Any:
    """These rows are off by a share of their length, away from all other states."""

    def spoil(call: Call) -> None:
        aside = torch.tensor([1.0, 1.0, -1.0, -1.0] * 2) / 8**0.5
        for row in rows:
            call.rows[row] += by * call.rows[row].norm() * aside

    return spoil


def another_position(call: Call) -> None:
    call.rows[30] = call.rows[34]


ASIDE = torch.tensor([1.0, -1.0, 1.0, -1.0]) / 2
"""Of length 1, and across from where one position differs from the next."""


def another_boundary(call: Call) -> None:
    """Almost what ``Dense`` has between the two, and as near as a flipped row."""
    call.rows[30, 4:] += 0.28 * call.rows[30, 4:].norm() * ASIDE


class Dense(Oracle):
    """Has a boundary that is near to one of the two."""

    def every(self, tokens: Sequence[int]) -> Tensor:
        found = super().every(tokens)
        found[:, 3] = found[:, 5] + 0.25 * found[:, 5].norm(dim=-1, keepdim=True) * ASIDE
        return found


@pytest.mark.parametrize(
    ("spoil", "right"),
    [
        (flip(30), True),
        (flip(3, 30), False),
        (flip(30, by=0.35), False),
        (flip(30, by=math.nan), False),
        (another_position, False),
        (another_boundary, False),
    ],
    ids=["one of 37", "two", "too far", "nan", "another position's", "another boundary's"],
)
def test_one_row_in_a_hundred_may_have_flipped(spoil: Any, right: bool) -> None:
    one = Served("r0", LONG, [40])
    one.calls.append(Call("r0", 0, states(LONG) * 1.001, [*LONG[1:], 40], [*range(len(LONG))], [1, 2], len(LONG)))
    assert judge(one, oracle=Dense(floor=0.001), dtype="bfloat16").ok
    spoil(one.calls[0])
    found = judge(one, oracle=Dense(floor=0.001), dtype="bfloat16")
    assert found.ok is right and found.situations["whole prefill"].flipped == int(right)
    assert ("1 flipped" in block(FACTS, found)) is right
    # Where a bar is given, or everything is exact, there is no such row.
    assert not judge(one, oracle=Dense(floor=0.001), dtype="bfloat16", bar=0.1).ok
    assert not judge(one).ok


def test_a_hundred_rows_make_room_for_another_flip() -> None:
    text = [*range(3, 223)]
    one = Served("r0", text, [40])
    one.calls.append(Call("r0", 0, states(text), [*text[1:], 40], [*range(len(text))], [1, 2], len(text)))
    flip(30, 70)(one.calls[0])
    assert judge(one, oracle=Oracle(floor=0.001), dtype="bfloat16").ok
    flip(90)(one.calls[0])
    assert not judge(one, oracle=Oracle(floor=0.001), dtype="bfloat16").ok


def test_kernels_may_round_a_small_cache_twice_as_much() -> None:
    """The median four times, but the worst row, which a flip makes, no more than ever."""
    one = Served("r0", LONG, [40])
    one.calls.append(Call("r0", 0, states(LONG) * 1.003, [*LONG[1:], 40], [*range(len(LONG))], [1, 2], len(LONG)))

    class Worse(Oracle):
        def rounded(self, tokens: Sequence[int]) -> Tensor | None:
            rows = states(tokens) * 1.001
            rows[3] *= 1.01
            return rows

    assert not judge(one, oracle=Worse(), dtype="bfloat16").ok
    assert judge(one, oracle=Worse(), dtype="bfloat16", median_times=4.0).ok
    one.calls[0].rows[7:9] *= 1.03  # three times the worst row, and more rows than may have flipped
    assert not judge(one, oracle=Worse(), dtype="bfloat16", median_times=4.0).ok
    one.calls[0].rows = states(LONG) * 1.005
    assert not judge(one, oracle=Worse(), dtype="bfloat16", median_times=4.0).ok
    assert not judge(one, oracle=Oracle(floor=0.001), dtype="bfloat16", median_times=4.0).ok


@pytest.mark.parametrize(
    ("rounded", "latents", "median", "drafts"),
    [(False, True, 2, 2), (False, False, 2, 2), (True, True, 2, 4), (True, False, 4, 4)],
)
def test_four_times_the_median_is_for_keys_and_values_alone(
    rounded: bool, latents: bool, median: float, drafts: float
) -> None:
    assert times(rounded, latents) == (median, drafts)


def test_float32_is_not_exact_over_a_cache_that_rounds() -> None:
    one = served()
    for call in one.calls:
        call.rows = call.rows * 1.003
    one.calls[0].drafts = [1, 9]
    assert judge(one, oracle=Oracle(floor=0.002)).ok
    assert not judge(one, oracle=Oracle(floor=0.001)).ok
    assert not judge(one).ok


@pytest.mark.parametrize(
    ("wrong", "most", "right"), [(6, 2.0, True), (7, 2.0, False), (10, 4.0, True), (11, 4.0, False)]
)
def test_as_many_times_the_reference_s_own_wrong_drafts(wrong: int, most: float, right: bool) -> None:
    """It drafts otherwise in 2 of 40 calls; 5 % of the calls, 2, come on top."""

    class Undecided(Oracle):
        def drafts(self, features: Tensor, tokens: Sequence[int], calls: Sequence[Call]) -> list[list[int]]:
            off = 0 if torch.equal(features, states(tokens)) else 2
            return [[9, 9]] * off + [[1, 2]] * (len(calls) - off)

    text = [*range(3, 44)]
    one = Served("r0", text[:1], text[1:])
    for i in range(40):
        drafts = [7, 7] if i >= 40 - wrong else [1, 2]
        one.calls.append(Call("r0", i, states(text)[i : i + 1], text[i + 1 : i + 2], [i], drafts, 3))
    found = judge(one, oracle=Undecided(floor=0.001), dtype="bfloat16", draft_times=most)
    assert found.ok is right, found.problems


def test_the_page_holds_everything_and_escapes() -> None:
    page = html(FACTS, judge(served()))
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    assert page.count("<rect") > 2 * 9
    assert "boundary 5, position 3" in page


def test_the_page_draws_nan_and_long_texts() -> None:
    one = Served("r0", list(range(700)), [5])
    one.calls.append(Call("r0", 0, states(range(700)), [*range(1, 700), 5], list(range(700)), [1, 2], 700))
    one.calls[0].rows[650, 1] = math.nan
    found = judge(one)
    assert not found.ok
    page = html(FACTS, found)
    assert "#ffd600" in page
    assert page.count("<rect") <= 2 * 2 * 160 + 8, "two panels of two boundaries"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(tmp_path: Path, scheme: str) -> None:
    """Wrong rows are drawn in red, beside the scale's; the background is the scheme's."""
    red: dict[str, int] = {}
    for name, factor in (("right", 1.0), ("wrong", 2.0)):
        one = served()
        one.calls[0].rows = one.calls[0].rows * factor
        page = tmp_path / f"{name}.html"
        page.write_text(html(FACTS, judge(one)))
        image = picture(page, scheme)
        assert image.getpixel((2, 2)) == ((255, 255, 255) if scheme == "light" else (22, 22, 26))
        red[name] = sum(count for count, (r, g, b) in image.getcolors(1 << 20) if r > 185 and g < 90 and b < 90)
    assert red["right"] > 0, "the scale"
    assert red["wrong"] > 2 * red["right"]


def test_wrong_rows_that_are_another_boundary_s_are_told_so() -> None:
    early = served()
    for call in early.calls:
        call.rows = torch.cat([call.rows[:, :4] * 3, call.rows[:, 4:]], dim=-1)  # boundary 0 instead of 2
    found = judge(early)
    assert not found.ok and not found.inputs_ok and found.rows_are == [0, 5]
    assert "the rows are the states of boundaries [0, 5], not of [2, 5]" in found.problems[0]
    swapped = served()
    for call in swapped.calls:
        call.rows = call.rows.roll(4, dims=1)
    assert judge(swapped).rows_are == [5, 2]
    noise = served()
    for call in noise.calls:
        call.rows = call.rows * torch.linspace(0.5, 2, 8)
    assert judge(noise).rows_are is None and judge(served()).rows_are is None


def test_drafts_are_counted_up_to_the_first_wrong_one() -> None:
    one = served()
    assert judge(one).drafts == [[0, 3], [0, 3]]
    one.calls[0].drafts, one.calls[1].drafts = [1, 9], [9, 9]
    found = judge(one)
    assert found.drafts == [[1, 3], [1, 2]] and found.inputs_ok and not found.ok


@pytest.mark.parametrize(
    ("longest", "drafts", "right"),
    [(9, [1, 9], True), (9, [9, 2], False), (10, [1, 9], False), (10, [1, 2], True)],
)
def test_drafts_end_with_the_longest_request(longest: int, drafts: list[int], right: bool) -> None:
    """The last row's position is 8, so that the second draft is the drafter's at position 9."""
    one = served()
    one.calls[2].drafts = drafts
    assert judge(one, max_model_len=longest).ok is right


PICTURE = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("given", "expected", "word"),
    [
        ({}, {}, None),
        (None, {}, None),
        ({1: PICTURE}, {2: PICTURE}, None),
        ({1: PICTURE}, {}, "embeds something else than token"),
        ({}, {2: PICTURE}, "expected a picture's embedding"),
        ({1: PICTURE * 1.01}, {2: PICTURE}, "something else than the picture"),
        ({1: PICTURE * float("nan")}, {2: PICTURE}, "something else than the picture"),
        (None, {2: PICTURE}, "does not show"),
    ],
)
def test_what_the_drafter_embeds(
    given: dict[int, Tensor] | None, expected: dict[int, Tensor], word: str | None
) -> None:
    one = served()
    one.calls[0].embeds = given
    found = [sentence for _, sentence in _embeddings(one, expected, 1e-4)]
    assert len(found) == (word is not None) and (word is None or word in found[0]), found


def test_a_wrong_embedding_of_text_is_not_right() -> None:
    one = served()
    one.calls[1].embeds = {0: PICTURE}
    assert not judge(one).ok
