# SPDX-License-Identifier: Apache-2.0
"""In every situation in which states reach it, the drafter receives the right rows, ids and positions.

The comparison is row by row with an independent reference, and draft by draft. ``test_negative_controls`` shows that
it can fail.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from settings import DTYPE, SETTINGS

from vllm_kimi_eagle3.reference import greedy
from vllm_kimi_eagle3.regression.engine import EngineRun
from vllm_kimi_eagle3.regression.settings import ASIDE, BASIC, RIGHT, SITUATIONS
from vllm_kimi_eagle3.verify.compare import Comparison
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle

pytestmark = pytest.mark.engine
Compared = Callable[..., Comparison]

EXPECTED = {
    "eager": SITUATIONS["eager"],
    "tiny cache": (*SITUATIONS["kimi"], "up to max_model_len"),
    "chunked": SITUATIONS["chunked"],
    "compiled": SITUATIONS["compiled"],
    "short drafter": (*BASIC, "prefix-cache hit", "up to max_model_len"),
    "bf16": BASIC,
    "float16": BASIC,
}


@pytest.mark.parametrize(
    ("setting", "situation"), [(setting, name) for setting, names in EXPECTED.items() for name in names]
)
def test_the_drafter_receives_what_it_should(compared: Compared, setting: str, situation: str) -> None:
    comparison = compared(setting)
    assert situation in comparison.situations, f"the engine never was in it: {sorted(comparison.situations)}"
    found = comparison.situations[situation]
    assert found.ok, found.to_json()
    assert found.rows > 0
    if SETTINGS[setting].dtype == "float32":
        assert found.max_relative_error < 1e-4
        assert found.wrong_drafts == 0


@pytest.mark.parametrize("setting", EXPECTED)
def test_nothing_else_is_wrong_either(compared: Compared, setting: str) -> None:
    comparison = compared(setting)
    assert comparison.problems == []
    assert comparison.ok, [s.to_json() for s in comparison.situations.values() if not s.ok]
    print(setting, {s.name: (s.rows, f"{s.max_relative_error:.1e}") for s in comparison.situations.values()})


def test_a_request_at_its_limit_leaves_the_drafter_to_the_others(compared: Compared) -> None:
    """D24; ``test_negative_controls`` has stock vLLM."""
    beside = compared("eager", SETTINGS["eager"].rounds.index(ASIDE))
    assert beside.problems == []
    assert beside.ok and "up to max_model_len" in beside.situations


@pytest.mark.parametrize("setting", EXPECTED)
def test_the_engine_captures_the_right_boundaries(run: Callable[[str], EngineRun], setting: str) -> None:
    assert run(setting).result["captured"] == list(SETTINGS[setting].boundaries)


@pytest.mark.skipif(DTYPE != "float32", reason="text is only reproducible to the token in float32")
@pytest.mark.parametrize("setting", ["eager", "tiny cache", "chunked", "compiled", "short drafter"])
def test_text_is_the_reference_s(
    run: Callable[[str], EngineRun], oracle: Callable[..., CheckpointOracle], setting: str
) -> None:
    target = oracle("gqa", RIGHT, "float32").target
    for index, got in enumerate(run(setting).result["rounds"]):
        for (prompt, tokens, *_), output in zip(SETTINGS[setting].requests(index), got["output_ids"], strict=True):
            assert output == greedy(target, prompt, tokens, max_model_len=128)
