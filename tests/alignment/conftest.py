# SPDX-License-Identifier: Apache-2.0
"""One engine a setting, many situations in each; every test looks at the runs it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from settings import ENGINE, MAX_MODEL_LEN, ON_GPU, RIGHT, SETTINGS

from vllm_kimi_eagle3.regression.engine import EngineRun, run_engine, served_of
from vllm_kimi_eagle3.tiny_kimi.materialize import materialize
from vllm_kimi_eagle3.tiny_kimi.widen import widen
from vllm_kimi_eagle3.verify.compare import Comparison, compare
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pair = materialize(tmp_path_factory.mktemp("pair"))
    if not ON_GPU:
        return pair
    wide = tmp_path_factory.mktemp("wide")
    return {name: widen(folder, wide / name) for name, folder in pair.items()}


@pytest.fixture(scope="session")
def model_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``VLLM_CACHE_ROOT`` that eager engines share: it saves each a process that only looks at the model's class.

    Nothing compiled is in it, so nothing of one engine can reach another.
    """
    return tmp_path_factory.mktemp("model-records")


@pytest.fixture(scope="session")
def run(pair: dict[str, Path], model_records: Path) -> Iterator[Callable[[str], EngineRun]]:
    """The run of a setting, made once; on a GPU, several at a time."""

    def start(name: str) -> EngineRun:
        s = SETTINGS[name]
        options = {"max_model_len": MAX_MODEL_LEN, "dtype": s.dtype, **ENGINE, **s.options}
        if options.get("enforce_eager", True):
            options["cache"] = model_records
        return run_engine(pair[s.target], s.rounds, drafter=pair[s.drafter], k=s.k, env=s.env, **options)

    with ThreadPoolExecutor(5 if ON_GPU else 1) as pool:

        @cache
        def started(name: str) -> Future[EngineRun]:
            return pool.submit(start, name)

        if ON_GPU:
            for name, s in SETTINGS.items():
                if "proxy" not in s.options:  # those are the CPU's
                    started(name)
        yield lambda name: started(name).result()
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def oracle(pair: dict[str, Path]) -> Callable[..., CheckpointOracle]:
    @cache
    def made(kind: str, boundaries: tuple[int, ...], dtype: str) -> CheckpointOracle:
        drafter = pair[f"eagle3_{kind}_boundary"]
        return CheckpointOracle(pair["deepseek_v3"], drafter, boundaries, getattr(torch, dtype))

    return made


@pytest.fixture(scope="session")
def compared(run: Callable[[str], EngineRun], oracle: Callable[..., CheckpointOracle]) -> Callable[..., Comparison]:
    """A round of a setting against the reference; all untampered rounds together if none is named."""

    @cache
    def made(name: str, index: int | None = None, boundaries: tuple[int, ...] = RIGHT) -> Comparison:
        s, result = SETTINGS[name], run(name).result
        rounds = [i for i, entry in enumerate(s.rounds) if not isinstance(entry, dict)] if index is None else [index]
        served = [one for i in rounds for one in served_of(result["rounds"][i], s.requests(i))]
        return compare(
            served,
            oracle(s.drafter.split("_")[1], boundaries, s.dtype),
            boundaries,
            dtype=s.dtype,
            block_size=result["block_size"],
            max_model_len=MAX_MODEL_LEN,
        )

    return made
