# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM with the source patches and *without* the overlay, on the real engine: the reference's own drafts.

The reference is the one that ``test_pair.py`` holds the overlay to.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patched_vllm import patched_copy

from vllm_kimi_eagle3.reference import Drafter, Target, speculate
from vllm_kimi_eagle3.regression.engine import EngineFailed, EngineRun, Request, counters, run_engine

pytestmark = pytest.mark.engine
RIGHT, EARLY = (4, 7, 9), (3, 6, 8)
OUTPUT = {"VLLM_KIMI_EAGLE3_LAYER_RULE": "output"}
Serve = Callable[..., EngineRun]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return patched_copy(tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="module")
def serve(pair: dict[str, Path], requests: list[Request], patched: dict[str, str]) -> Serve:
    def run(drafter: Path, *, env: dict[str, str] | None = None, **options: Any) -> EngineRun:
        environment = {**patched, **(env or {})}
        options.setdefault("overlay", "off")
        rounds = [[request] for request in requests[:2]]
        return run_engine(pair["kimi_k25"], rounds, drafter=drafter, k=3, max_model_len=512, env=environment, **options)

    return run


@pytest.fixture(scope="module")
def check(pair: dict[str, Path], requests: list[Request], target: Target) -> Callable[..., None]:
    def equal(run: EngineRun, kind: str, boundaries: tuple[int, ...]) -> None:
        """Text, counters and every draft."""
        drafter = Drafter.load(pair[f"eagle3_{kind}_boundary"], target)
        for got, (prompt, tokens, *_) in zip(run.result["rounds"], requests, strict=False):
            trace = speculate(target, drafter, prompt, boundaries, 3, tokens, max_model_len=512)
            assert got["output_ids"] == [trace.output_ids]
            assert got["counters"] == counters(trace)
            proposed = [step.proposal.token_ids for step in trace.steps if step.proposal is not None]
            assert [call["drafts"] for call in got["calls"]] == proposed

    return equal


def test_the_drafter_gets_its_layers(
    serve: Serve, check: Callable[..., None], pair: dict[str, Path], tmp_path: Path
) -> None:
    """Also behind the length that its configuration says (D24): without that patch, nothing more is drafted there."""
    drafter = tmp_path / "drafter"
    shutil.copytree(pair["eagle3_gqa_nested"], drafter)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    run = serve(drafter, env=OUTPUT)
    assert not run.result["overlay_loaded"]
    check(run, "gqa", RIGHT)


def test_nothing_is_guessed(serve: Serve, check: Callable[..., None], pair: dict[str, Path]) -> None:
    """The negative control: without a word on the rule, ids are boundaries, and these are one early."""
    check(serve(pair["eagle3_gqa_nested"]), "gqa", EARLY)


def test_an_mla_drafter_whose_checkpoint_says_its_rule(
    serve: Serve, check: Callable[..., None], pair: dict[str, Path], tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(pair["eagle3_mla_nested"], drafter)
    config = json.loads((drafter / "config.json").read_text())
    config["eagle_config"]["layer_rule"] = "output"
    (drafter / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    check(serve(drafter), "mla", RIGHT)


def test_stock_does_not_even_start(serve: Serve, pair: dict[str, Path]) -> None:
    with pytest.raises(EngineFailed):
        serve(pair["eagle3_gqa_nested"], env={**OUTPUT, "PYTHONPATH": ""})


def test_the_overlay_finds_its_fixes_in_place(
    serve: Serve, check: Callable[..., None], pair: dict[str, Path], by_rule: dict[str, Any]
) -> None:
    """Both at once: the plan is written all the same, and nothing is shifted twice."""
    run = serve(pair["eagle3_gqa_nested"], env={**OUTPUT, "VLLM_PLUGINS": "kimi_eagle3"}, overlay="on", **by_rule)
    assert run.result["overlay_loaded"]
    states = run.result["states"]
    # What no patch carries: the key cannot know plugins (D8), and D21 is for those who ask for it.
    overlay_only = {"D8": "APPLIED", "D21": "PENDING"}
    assert {state for name, state in states.items() if name not in overlay_only} <= {"RETIRED", "NOT_APPLICABLE"}
    assert {name: states[name] for name in overlay_only} == overlay_only
    check(run, "gqa", RIGHT)
