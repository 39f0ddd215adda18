# SPDX-License-Identifier: Apache-2.0
"""For all tests: one thread for torch, the same generated examples, and one look at each of vLLM's model classes.

The reference runs tiny matrices, for which a second thread costs more than it brings, and much more than that on a busy
machine, where it waits spinning.
"""

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
