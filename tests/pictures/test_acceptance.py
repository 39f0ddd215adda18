# SPDX-License-Identifier: Apache-2.0
"""What a choice is worth, on scenes that nobody was trained on: answers are right, and pictures cost no acceptance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from settings_pictures import COUNTED, HELD_OUT, MEASURED, SETTINGS

from vllm_kimi_eagle3.regression.engine import EngineRun
from vllm_kimi_eagle3.tiny_kimi.scenes import ORDERS, Scene

pytestmark = pytest.mark.engine


def accepted(run: EngineRun, name: str, half: str) -> float:
    counters = run.result["rounds"][list(SETTINGS[name].rounds).index(half)]["counters"]
    assert counters["num_draft_tokens"][0] > 500
    return counters["num_accepted_tokens"][0] / counters["num_draft_tokens"][0]


@pytest.mark.parametrize("half", MEASURED)
def test_the_pair_says_what_is_in_a_scene(half: str, shown: Callable[[str], EngineRun]) -> None:
    answers = shown("embedding").result["rounds"][list(SETTINGS["embedding"].rounds).index(half)]["output_ids"]
    right = [Scene.random(HELD_OUT + 100 + i).answer(list(ORDERS)[i % 3]) for i in range(COUNTED)]
    said = [bytes(token for token in ids if token < 256).decode() for ids in answers]
    assert sum(a == b for a, b in zip(said, right, strict=True)) >= 0.9 * COUNTED


def test_pictures_cost_no_acceptance(shown: Callable[[str], EngineRun]) -> None:
    """The bar is three points; docs/PICTURES.md has the other drafters and choices."""
    rates = {half: accepted(shown("embedding"), "embedding", half) for half in MEASURED}
    assert rates["told"] > 0.7
    assert rates["shown"] > rates["told"] - 0.03
