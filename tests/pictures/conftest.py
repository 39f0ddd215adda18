# SPDX-License-Identifier: Apache-2.0
"""Prompts with pictures on the real engine: one engine a setting, many situations in each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from settings_pictures import BOUNDARIES, MAX_MODEL_LEN, OPTIONS, SETTINGS, TARGET, Setting

from vllm_kimi_eagle3.reference import Vision
from vllm_kimi_eagle3.regression.engine import EngineRun, run_engine, served_of
from vllm_kimi_eagle3.tiny_kimi.materialize import materialize_pictures
from vllm_kimi_eagle3.verify.compare import Comparison, compare
from vllm_kimi_eagle3.verify.drive import Served
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle


@pytest.fixture(scope="session")
def pictures_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return materialize_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def vision(pictures_pair: dict[str, Path]) -> Vision:
    return Vision.load(pictures_pair["pictures"])


@pytest.fixture(scope="session")
def shown(pictures_pair: dict[str, Path]) -> Callable[[str], EngineRun]:
    """The run of a setting, made once."""
    made = dict[str, EngineRun]()

    def run(name: str) -> EngineRun:
        if name not in made:
            s: Setting = SETTINGS[name]
            options = {**OPTIONS, **s.options}
            options["additional_config"] = {"kimi_eagle3": {"layer_rule": "output", **s.choice}}
            made[name] = run_engine(
                pictures_pair[TARGET],
                list(s.rounds.values()),
                drafter=pictures_pair[s.drafter],
                k=s.k,
                env=s.env,
                **options,
            )
        return made[name]

    return run


@pytest.fixture(scope="session")
def served(shown: Callable[[str], EngineRun], vision: Vision) -> Callable[[str, str], list[Served]]:
    """What came of one round of a setting, with the reference's rows of its pictures."""

    def of(name: str, situation: str) -> list[Served]:
        rounds = SETTINGS[name].rounds
        result = shown(name).result["rounds"][list(rounds).index(situation)]
        return served_of(result, rounds[situation], vision)

    return of


@pytest.fixture(scope="session")
def oracle(pictures_pair: dict[str, Path]) -> Callable[[str, str], CheckpointOracle]:
    """The reference for a drafter that sees pictures in one of the ways."""
    made: dict[tuple[str, str], CheckpointOracle] = {}

    def of(drafter: str, media: str) -> CheckpointOracle:
        if (drafter, media) not in made:
            folders = pictures_pair["pictures"], pictures_pair[drafter]
            made[drafter, media] = CheckpointOracle(*folders, BOUNDARIES, drafter_media=media)
        return made[drafter, media]

    return of


@pytest.fixture(scope="session")
def judged(
    shown: Callable[[str], EngineRun],
    served: Callable[[str, str], list[Served]],
    oracle: Callable[[str, str], CheckpointOracle],
) -> Callable[..., Comparison]:
    """A round of a setting against the reference, or against a reference that sees pictures in another way."""

    def judge(name: str, situation: str, media: str | None = None, of: list[Served] | None = None) -> Comparison:
        s = SETTINGS[name]
        return compare(
            served(name, situation) if of is None else of,
            oracle(s.drafter, media or s.media),
            BOUNDARIES,
            dtype="float32",
            block_size=shown(name).result["block_size"],
            max_model_len=MAX_MODEL_LEN,
        )

    return judge
