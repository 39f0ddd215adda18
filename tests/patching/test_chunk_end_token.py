# SPDX-License-Identifier: Apache-2.0
"""D22's probe over the releases, and that its remedy leaves the batch as it was; the engine is in tests/alignment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from tests import releases
from vllm_kimi_eagle3.fixes import chunk_end_token
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Need


@pytest.mark.parametrize(
    ("release", "need"),
    [("0.18.1", Need.RETIRED), ("0.19.0", Need.APPLY), ("0.26.0", Need.APPLY), ("0.33.0", Need.APPLY)],
)
def test_the_fault_came_with_0_19(release: str, need: Need) -> None:
    assert chunk_end_token.probe(SourceTree(releases.tree(release))).need is need


class Installer:
    """Holds what the fix installs, around a function that shows what it saw."""

    def original(self, target: str) -> Any:
        def propose(runner: Any, scheduler_output: Any, *args: Any) -> Any:
            if args == ("fail",):
                raise RuntimeError("on purpose")
            return (runner.input_batch.num_tokens_no_spec - 1).tolist()

        return propose

    def replace(self, target: str, new: Any) -> None:
        self.new = new


@pytest.mark.parametrize(("partial", "seen"), [([False, False], [99, 49]), ([True, False], [37, 49])])
def test_only_a_partly_prefilled_request_is_looked_up_elsewhere(partial: list[bool], seen: list[int]) -> None:
    installer: Any = Installer()
    chunk_end_token.install(installer)
    batch = SimpleNamespace(
        num_reqs=2,
        req_ids=["a", "b"],
        num_tokens_no_spec=numpy.array([100, 50]),
        num_computed_tokens_cpu=numpy.array([0, 50]),
    )
    runner = SimpleNamespace(input_batch=batch, discard_request_mask=SimpleNamespace(np=numpy.array([*partial, True])))
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 37, "b": 1})
    assert installer.new(runner, scheduled) == seen
    with pytest.raises(RuntimeError):
        installer.new(runner, scheduled, "fail")
    assert batch.num_tokens_no_spec.tolist() == [100, 50]
