# SPDX-License-Identifier: Apache-2.0
"""Prompts with pictures on the real engine: one engine a setting, many situations in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from settings_pictures import (
    BOUNDARIES,
    DTYPE,
    EMBEDDING_BAR,
    MAX_MODEL_LEN,
    MEASURED,
    ON_GPU,
    OPTIONS,
    SETTINGS,
    TARGET,
)
from torch import Tensor

from vllm_kimi_eagle3.reference import Vision
from vllm_kimi_eagle3.regression.engine import EngineRun, run_engine, served_of
from vllm_kimi_eagle3.tiny_kimi.materialize import materialize_pictures
from vllm_kimi_eagle3.tiny_kimi.widen import widen
from vllm_kimi_eagle3.verify.compare import Comparison, compare, rounding
from vllm_kimi_eagle3.verify.drive import Served
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle


@pytest.fixture(scope="session")
def pictures_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pictures")
    pair = materialize_pictures(folder / "pair")
    return {name: widen(source, folder / "wide" / name) for name, source in pair.items()} if ON_GPU else pair


@pytest.fixture(scope="session")
def vision(pictures_pair: dict[str, Path]) -> Vision:
    return Vision.load(pictures_pair["pictures"])


@pytest.fixture(scope="session")
def rounded_vision(pictures_pair: dict[str, Path]) -> Vision | None:
    """The same in the engine's dtype, where that is another."""
    return None if DTYPE == "float32" else Vision.load(pictures_pair["pictures"], dtype=getattr(torch, DTYPE))


@pytest.fixture(scope="session")
def shown(pictures_pair: dict[str, Path]) -> Iterator[Callable[[str], EngineRun]]:
    """The run of a setting, made once; on a GPU, several at a time."""

    def start(name: str) -> EngineRun:
        s = SETTINGS[name]
        options = {**OPTIONS, **s.options}
        options["additional_config"] = {"kimi_eagle3": {"layer_rule": "output", **s.choice}}
        drafter = pictures_pair[s.drafter]
        return run_engine(pictures_pair[TARGET], list(s.rounds.values()), drafter=drafter, k=s.k, env=s.env, **options)

    with ThreadPoolExecutor(len(SETTINGS) if ON_GPU else 1) as pool:
        begun: dict[str, Future[EngineRun]] = {}

        def run(name: str) -> EngineRun:
            for one in SETTINGS if ON_GPU else [name]:
                if one not in begun:
                    begun[one] = pool.submit(start, one)
            return begun[name].result()

        yield run


@pytest.fixture(scope="session")
def served(
    shown: Callable[[str], EngineRun], vision: Vision, rounded_vision: Vision | None
) -> Callable[[str, str], list[Served]]:
    """What came of one round of a setting, with the reference's rows of its pictures."""

    def of(name: str, situation: str) -> list[Served]:
        rounds = SETTINGS[name].rounds
        result = shown(name).result["rounds"][list(rounds).index(situation)]
        return served_of(result, rounds[situation], vision, rounded_vision)

    return of


@pytest.fixture(scope="session")
def oracle(pictures_pair: dict[str, Path]) -> Callable[[str, str], CheckpointOracle]:
    """The reference for a drafter that sees pictures in one of the ways."""
    made: dict[tuple[str, str], CheckpointOracle] = {}

    def of(drafter: str, media: str) -> CheckpointOracle:
        if (drafter, media) not in made:
            folders = pictures_pair["pictures"], pictures_pair[drafter]
            made[drafter, media] = CheckpointOracle(*folders, BOUNDARIES, getattr(torch, DTYPE), drafter_media=media)
        return made[drafter, media]

    return of


@pytest.fixture(scope="session")
def rounding_of() -> Callable[[list[Served], CheckpointOracle], Tensor | None]:
    """What half precision costs the reference on some requests; None in float32."""

    def of(requests: list[Served], reference: CheckpointOracle) -> Tensor | None:
        found = rounding(requests, reference, len(BOUNDARIES))
        # vLLM's vision tower rounds in more places than the reference's: its embeddings are twice as far away.
        return None if found is None else 1.5 * found

    return of


@pytest.fixture(scope="session")
def floor(
    served: Callable[[str, str], list[Served]],
    oracle: Callable[[str, str], CheckpointOracle],
    rounding_of: Callable[[list[Served], CheckpointOracle], Tensor | None],
) -> Callable[[str], Tensor | None]:
    """What half precision costs the reference in a setting: one prompt alone has too few rows to tell."""

    @cache
    def of(name: str) -> Tensor | None:
        s = SETTINGS[name]
        every = [one for situation in s.rounds if situation not in MEASURED for one in served(name, situation)]
        return rounding_of(every, oracle(s.drafter, s.media))

    return of


@pytest.fixture(scope="session")
def judged(
    shown: Callable[[str], EngineRun],
    served: Callable[[str, str], list[Served]],
    oracle: Callable[[str, str], CheckpointOracle],
    floor: Callable[[str], Tensor | None],
) -> Callable[..., Comparison]:
    """A round of a setting against the reference, or against a reference that sees pictures in another way."""

    def judge(name: str, situation: str, media: str | None = None, of: list[Served] | None = None) -> Comparison:
        s = SETTINGS[name]
        return compare(
            served(name, situation) if of is None else of,
            oracle(s.drafter, media or s.media),
            BOUNDARIES,
            dtype=DTYPE,
            embedding_bar=EMBEDDING_BAR,
            floor=floor(name),
            block_size=shown(name).result["block_size"],
            max_model_len=MAX_MODEL_LEN,
        )

    return judge
