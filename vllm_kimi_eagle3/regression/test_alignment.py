# SPDX-License-Identifier: Apache-2.0
"""In every situation in which states reach it, the drafter receives the right rows, ids and positions.

Row by row and draft by draft against an independent reference in plain torch. The engines here are given layer ids in
the one form that every vLLM reads alike, so that what fails is a situation; other forms are ``test_defects``'.
"""

from __future__ import annotations

import pytest

from vllm_kimi_eagle3.reference import greedy
from vllm_kimi_eagle3.regression.environment import Environment
from vllm_kimi_eagle3.regression.runs import Suite
from vllm_kimi_eagle3.regression.settings import DEFAULT, EARLY, LATE, MAX_MODEL_LEN, RIGHT, SITUATIONS

ENGINES = [pytest.param(name, marks=[pytest.mark.slow] if name == "compiled" else []) for name in SITUATIONS]


@pytest.fixture(autouse=True)
def speculates(environment: Environment) -> None:
    """These tests need an engine that speculates."""
    if not environment.speculates:
        pytest.skip("this vLLM's CPU engine asserts that there is no speculation; see test_defects for its target")


@pytest.mark.parametrize(
    ("engine", "situation"),
    [
        pytest.param(engine, name, marks=[pytest.mark.slow] if engine == "compiled" else [])
        for engine, names in SITUATIONS.items()
        for name in names
    ],
)
def test_alignment(suite: Suite, engine: str, situation: str) -> None:
    """The rows that a drafter was given in one situation."""
    comparison = suite.compared(engine)
    if situation not in comparison.situations and suite.environment.device == "gpu":
        size = suite.run(engine).result["block_size"]
        pytest.skip(
            f"the engine never came into it; it met {sorted(comparison.situations)} with blocks of {size} tokens"
        )
    assert situation in comparison.situations, f"the engine never was in it: {sorted(comparison.situations)}"
    found = comparison.situations[situation]
    assert found.rows > 0
    assert found.ok, found.to_json()


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_else_differs(suite: Suite, engine: str) -> None:
    """Whatever else these engines came into, and what the model says that it captures."""
    comparison = suite.compared(engine)
    assert comparison.problems == []
    assert comparison.ok, [s.to_json() for s in comparison.situations.values() if not s.ok]
    assert suite.run(engine).result["captured"] in (list(RIGHT), None)


@pytest.mark.parametrize("engine", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_text(suite: Suite, engine: str) -> None:
    """Speculation changes no text: it is the reference's greedy one."""
    s = suite.settings[engine]
    if s.dtype != "float32":
        pytest.skip(f"text is reproducible to the token in float32 only, and this engine runs in {s.dtype}")
    target = suite.oracle("gqa", RIGHT, "float32").target
    for index, got in enumerate(suite.run(engine).result["rounds"]):
        for (prompt, tokens, *_), output in zip(s.requests(index), got["output_ids"], strict=True):
            assert output == greedy(target, prompt, tokens, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("wrong", [EARLY, LATE, DEFAULT, (4, 6, 9)], ids=lambda b: "-".join(map(str, b)))
def test_control_other_boundaries_are_seen(suite: Suite, wrong: tuple[int, ...]) -> None:
    """The same rows against a reference of other layers: every situation has to be wrong."""
    comparison = suite.compared("eager", 0, wrong)
    assert comparison.situations
    assert not any(s.ok for s in comparison.situations.values())


def test_control_rows_of_another_position_are_seen(suite: Suite) -> None:
    """Rows one position late, as a buffer that was written too late would have them."""
    comparison = suite.compared("eager", 0, shift=1)
    assert not comparison.situations["whole prefill"].ok
    assert not comparison.situations["verify, all accepted"].ok
