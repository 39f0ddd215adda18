# SPDX-License-Identifier: Apache-2.0
"""Eager equals compiled, and the compiled graph holds the overlay's function.

The overlay's rotary function (C2) is traced by Dynamo here. The negative control installs the same function behind a
wrapt proxy: right in eager mode, and bypassed silently once compiled, so that the old fault is back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine import EngineRun
from settings import DTYPE, ON_GPU

from vllm_kimi_eagle3.verify.compare import Comparison

Compared = Callable[..., Comparison]
Run = Callable[[str], EngineRun]
pytestmark = pytest.mark.engine
on_cpu = pytest.mark.skipif(ON_GPU, reason="the traced fix is for the CPU's rotary kernel")


@pytest.mark.skipif(DTYPE != "float32", reason="equal to the token only in float32")
def test_eager_equals_compiled(run: Run) -> None:
    eager, compiled = (run(name).result["rounds"][0] for name in ("eager", "compiled"))
    assert eager["output_ids"] == compiled["output_ids"]
    assert eager["counters"] == compiled["counters"]
    for a, b in zip(eager["calls"], compiled["calls"], strict=True):
        assert (a["ids"], a["positions"], a["drafts"]) == (b["ids"], b["positions"], b["drafts"])
        assert ((a["rows"] - b["rows"]).norm(dim=-1) / a["rows"].norm(dim=-1)).max() < 1e-4


def test_it_was_compiled(run: Run) -> None:
    words = "torch.compile took" if ON_GPU else "Warming up model for the compilation"
    assert run("compiled").log_lines(words), "nothing was compiled"
    assert not run("eager").log_lines(words)


@on_cpu
def test_dynamo_traced_our_function(compared: Compared) -> None:
    assert compared("compiled").ok


@on_cpu
def test_a_proxy_is_as_good_in_eager_mode(compared: Compared) -> None:
    assert compared("eager proxy").ok


@on_cpu
def test_dynamo_bypasses_a_proxy(compared: Compared, run: Run) -> None:
    assert run("compiled proxy").result["states"]["C2"] == "APPLIED", "nothing told that it had no effect"
    comparison = compared("compiled proxy")
    assert not comparison.ok
    assert comparison.situations["whole prefill"].max_relative_error > 1e-2
