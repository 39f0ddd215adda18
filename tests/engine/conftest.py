# SPDX-License-Identifier: Apache-2.0
"""The tiny trained pair, its held-out prompts, and the engine runs that several tests look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3.reference import Drafter, SpeculationTrace, Target, speculate
from vllm_kimi_eagle3.regression.engine import EngineRun, Request, run_engine
from vllm_kimi_eagle3.tiny_kimi.materialize import HERE, materialize

K = 3
TOKENS = 48
MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return materialize(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    """Held-out prompts of four lengths, as byte tokens."""
    prompts = [item["prompt"] for item in json.loads((HERE / "heldout.json").read_text())]
    return [(list(prompt.encode()), TOKENS, []) for prompt in prompts[::2]]


@pytest.fixture(scope="session")
def target(pair: dict[str, Path]) -> Target:
    return Target.load(pair["deepseek_v3"])


@pytest.fixture(scope="session")
def predict(pair: dict[str, Path], target: Target, requests: list[Request]) -> Callable[..., list[SpeculationTrace]]:
    """The independent reference's speculative loop over all requests, for a drafter kind and boundaries."""

    @cache
    def predicted(kind: str, boundaries: tuple[int, ...]) -> list[SpeculationTrace]:
        drafter = Drafter.load(pair[f"eagle3_{kind}_boundary"], target)
        return [
            speculate(target, drafter, prompt, boundaries, K, tokens, max_model_len=MAX_MODEL_LEN)
            for prompt, tokens, _ in requests
        ]

    return predicted


@pytest.fixture(scope="session")
def served(pair: dict[str, Path], requests: list[Request]) -> Callable[..., EngineRun]:
    """An engine run over all requests, one at a time and then four at once; the same run is made once."""
    runs: dict[str, EngineRun] = {}

    def run(target: str, drafter: str | None, **options: Any) -> EngineRun:
        key = json.dumps([target, drafter, options], sort_keys=True)
        if key not in runs:
            rounds = [*([request] for request in requests), list(requests[:4])]
            options.setdefault("max_model_len", MAX_MODEL_LEN)
            runs[key] = run_engine(pair[target], rounds, drafter=drafter and pair[drafter], k=K, **options)
        return runs[key]

    return run


@pytest.fixture(scope="session")
def by_rule() -> dict[str, Any]:
    """Engine arguments that say what the nested ids mean."""
    return {"additional_config": {"kimi_eagle3": {"layer_rule": "output"}}}
