# SPDX-License-Identifier: Apache-2.0
"""Wherever a picture is in a prompt: states, ids, positions, embeddings and drafts are the reference's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from settings_pictures import CACHED, CHUNKS, MEASURED, SETTINGS, SITUATIONS

from vllm_kimi_eagle3.fixes.drafter_media import CHOICES
from vllm_kimi_eagle3.regression.engine import EngineRun
from vllm_kimi_eagle3.verify.compare import Comparison
from vllm_kimi_eagle3.verify.drive import Served

pytestmark = pytest.mark.engine
EVERY = [(name, situation) for name, s in SETTINGS.items() for situation in s.rounds]
WITH_PICTURES = [
    (name, situation) for name, situation in EVERY if situation not in ("told", "a placeholder typed as text")
]


@pytest.mark.parametrize(("name", "situation"), EVERY, ids=[f"{n}-{s}" for n, s in EVERY])
def test_the_drafter_receives_what_it_should(name: str, situation: str, judged: Callable[..., Comparison]) -> None:
    found = judged(name, situation)
    assert found.ok, found.problems or {n: s.to_json() for n, s in found.situations.items() if not s.ok}


@pytest.mark.parametrize(("name", "situation"), WITH_PICTURES, ids=[f"{n}-{s}" for n, s in WITH_PICTURES])
def test_another_way_to_see_pictures_would_be_noticed(
    name: str, situation: str, judged: Callable[..., Comparison]
) -> None:
    # All but the one row that is a picture's only: then the drafter has no row in which it sees one.
    if situation == "nothing but a picture" or situation in MEASURED:
        pytest.skip("too slow for what it shows, or shown by the others")
    for other in CHOICES.keys() - {SETTINGS[name].media}:
        assert not judged(name, situation, media=other).inputs_ok


@pytest.mark.parametrize("situation", ["several", "next to each other", "picture and video chunk"])
def test_pictures_in_each_other_s_place_would_be_noticed(
    situation: str, judged: Callable[..., Comparison], served: Callable[[str, str], list[Served]]
) -> None:
    swapped = []
    for one in served("embedding", situation):
        assert one.media
        rows = list(one.media.values())
        rows = rows[16:] + rows[:16]
        swapped.append(replace(one, media=dict(zip(one.media, rows, strict=True))))
    assert not judged("embedding", situation, of=swapped).inputs_ok


def test_a_placeholder_stands_as_often_as_its_picture_has_tokens(served: Callable[[str, str], list[Served]]) -> None:
    counts = {situation: [len(one.media or ()) for one in served("embedding", situation)] for situation in SITUATIONS}
    assert counts["one picture"] == [16]
    assert counts["several"] == [48]
    assert counts["other sizes"] == [2 * 4 + 1]
    assert counts["video chunk"] == [16]  # frames are averaged
    assert counts["a placeholder typed as text"] == [0]


def test_the_default_shows_the_placeholder_s_id_at_every_place_of_a_picture(
    served: Callable[[str, str], list[Served]],
) -> None:
    """What stock vLLM does, in words: the id stays, its embedding is used, and the states are the picture's."""
    (one,) = served("placeholder", "one picture")
    (prefill, *_) = one.calls
    places = [position for position, token in enumerate(one.prompt_ids) if token == 266]
    assert [prefill.ids[place - 1] for place in places] == [266] * 16
    assert prefill.embeds == {}
    assert prefill.positions == list(range(len(one.prompt_ids)))


@pytest.mark.parametrize("name", ["embedding, chunked", "last-token, chunked"])
def test_chunks_end_where_they_should(name: str, served: Callable[[str, str], list[Served]]) -> None:
    for situation in CHUNKS:
        (one,) = served(name, situation)
        assert one.calls[0].positions[-1] <= 63 < one.calls[1].positions[-1] < len(one.prompt_ids) + 20, situation


@pytest.mark.parametrize("name", ["embedding, chunked", "last-token, chunked"])
def test_a_cached_prefix_is_that_of_the_same_picture(name: str, served: Callable[[str, str], list[Served]]) -> None:
    starts = {situation: [one.calls[0].positions[0] for one in served(name, situation)] for situation in CACHED}
    assert starts["first time"] == [0]
    assert starts["the same again"] == [32]
    assert starts["another picture in the same place"] == [32]  # only what stands before the picture


def test_the_choice_is_said_and_travels(shown: Callable[[str], EngineRun]) -> None:
    said = {name: "\n".join(shown(name).log_lines("where a prompt has a picture")) for name in SETTINGS}
    for name, setting in SETTINGS.items():
        assert CHOICES[setting.media] in said[name]
    states = {name: shown(name).result["states"]["D21"] for name in SETTINGS}
    assert {state for name, state in states.items() if SETTINGS[name].media != "placeholder"} == {"APPLIED"}
    assert states["placeholder"] == "PENDING"  # nothing is touched where nobody asks for it
    hashes = {shown(name).result["compute_hash"] for name in ("embedding", "placeholder")}
    assert len(hashes) == 2
