# SPDX-License-Identifier: Apache-2.0
"""For all tests: one thread for torch, the same generated examples, one look at each of vLLM's model classes, and one
import of what engines have in common.

The reference runs tiny matrices, for which a second thread costs more than it brings, and much more than that on a busy
machine, where it waits spinning.
"""

import importlib.util
import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run: a test that found a new one would fail a change that has nothing to do with it. New
# ones are looked for by `HYPOTHESIS_PROFILE=search pytest tests/layers` and by `make fuzz`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session", autouse=True)
def model_records_are_shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines with a cache of their own look up what an earlier one found out about a model class."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ.setdefault("KIMI_EAGLE3_MODEL_RECORDS", str(shared / "model-records"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with engines first: at the end, short files fill the time in which one process would wait for the other."""
    slow = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def engines_are_forked() -> None:
    """On a CPU; one that has touched a GPU can't be forked."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    from zygote import Zygote

    from vllm_kimi_eagle3.regression import engine

    engine.start = Zygote().start
