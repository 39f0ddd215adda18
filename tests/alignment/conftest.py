# SPDX-License-Identifier: Apache-2.0
"""One engine a setting, many situations in each; every test looks at the runs it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from settings import ENGINE, ON_GPU, SETTINGS

from vllm_kimi_eagle3.regression.engine import EngineRun
from vllm_kimi_eagle3.regression.runs import Runs, make_pair, more_drafters
from vllm_kimi_eagle3.verify.compare import Comparison
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pair")
    pair = make_pair(folder, wide=ON_GPU)
    return {**pair, **more_drafters(pair["eagle3_gqa_nested"], folder)}


@pytest.fixture(scope="session")
def runs(pair: dict[str, Path]) -> Iterator[Runs]:
    """The runs; on a GPU, several at a time."""
    settings = {name: replace(s, options={**ENGINE, **s.options}) for name, s in SETTINGS.items()}
    with Runs(pair, settings, at_once=5 if ON_GPU else 1) as made:
        if ON_GPU:
            made.begin(name for name, s in settings.items() if "proxy" not in s.options)  # those are the CPU's
        yield made


@pytest.fixture(scope="session")
def run(runs: Runs) -> Callable[[str], EngineRun]:
    """The run of a setting, made once."""
    return runs.run


@pytest.fixture(scope="session")
def oracle(runs: Runs) -> Callable[..., CheckpointOracle]:
    return runs.oracle


@pytest.fixture(scope="session")
def compared(runs: Runs) -> Callable[..., Comparison]:
    """A round of a setting against the reference; all untampered rounds together if none is named."""
    return runs.compared
