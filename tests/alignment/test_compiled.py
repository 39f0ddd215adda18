# SPDX-License-Identifier: Apache-2.0
"""Eager equals compiled, and the compiled graph holds the overlay's function.

The overlay's rotary function (C2) is traced by Dynamo here. The negative control puts the same function behind a wrapt
proxy: right in eager mode, and then either refused by Dynamo or bypassed without a word, by where the proxy stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import wrapt
from settings import DTYPE, ON_GPU

from vllm_kimi_eagle3.regression.engine import EngineFailed, EngineRun
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
def test_dynamo_stops_at_a_proxy_that_the_graph_calls(run: Run) -> None:
    """So the graph does call what the overlay put there: a plain function passes, its proxy does not."""
    with pytest.raises(EngineFailed, match="__call__` of class `BoundFunctionWrapper"):
        run("compiled proxy")


class Doubling(torch.nn.Module):
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(x)


def replaced(replacement: Callable[..., Any]) -> torch.nn.Module:
    return type("Replaced", (Doubling,), {"twice": replacement})()


def test_dynamo_bypasses_a_proxy_that_traced_code_calls() -> None:
    """Silently: eager runs the replacement and the compiled graph the original. A plain function is right in both."""
    original, x = Doubling.twice, torch.ones(2)

    def plain(self: Any, x: torch.Tensor) -> torch.Tensor:
        return original(self, x) + 100

    proxy = wrapt.FunctionWrapper(original, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs) + 100)
    assert replaced(proxy)(x).tolist() == replaced(plain)(x).tolist() == [102, 102]
    assert torch.compile(replaced(plain), backend="eager")(x).tolist() == [102, 102]
    assert torch.compile(replaced(proxy), backend="eager")(x).tolist() == [2, 2]
