# SPDX-License-Identifier: Apache-2.0
"""What the overlay costs: a step of the engine, against stock vLLM that captures the same layers.

Both engines are up, one waits while the other runs, and they take turns, so that a machine that slows down slows both.
Processor time of the engine's process is compared, not the clock, and the best turn of each: other load only adds. What
a neighbour on the same processor takes is in it all the same, so a series above the bar is repeated: noise passes, and
a cost does not.
The drafter names its layers at the top level, under the boundary rule, which stock vLLM reads right.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from vllm_kimi_eagle3.regression.engine import timed_engine
from vllm_kimi_eagle3.tiny_kimi import held_out_prompts
from vllm_kimi_eagle3.tiny_kimi.materialize import materialize

pytestmark = pytest.mark.engine
TURNS = 24
SERIES = 3
BAR = 1.02


def test_step_time_is_stock_s(benchmark: Any, tmp_path: Path) -> None:
    pair = materialize(tmp_path)
    prompts = held_out_prompts()[:4]
    requests = [(prompt, 32, []) for prompt in prompts]
    drafter = pair["eagle3_gqa_boundary"]
    times: dict[str, list[float]] = {}
    ratios: list[float] = []
    with (
        timed_engine(pair["deepseek_v3"], requests, drafter=drafter, overlay="stock") as stock,
        timed_engine(pair["deepseek_v3"], requests, drafter=drafter, overlay="on") as on,
    ):
        for serve in (stock, on, stock, on):
            serve()  # warm up

        def series() -> float:
            times["stock"], times["on"] = [], []
            for _ in range(TURNS):
                times["stock"].append(stock())
                times["on"].append(on())
            # Two estimates of the same: noise rarely spoils both.
            found = min(times["on"]) / min(times["stock"])
            paired = median(b / a for a, b in zip(times["stock"], times["on"], strict=True))
            print(f"stock {1000 * min(times['stock']):.2f} ms, ratio {found:.3f}, paired {paired:.3f}")
            ratios.append(min(found, paired))
            return ratios[-1]

        benchmark.pedantic(series, rounds=1, iterations=1)
        while ratios[-1] > BAR and len(ratios) < SERIES:
            series()
    benchmark.extra_info.update(ratios=ratios)
    assert ratios[-1] <= BAR, ratios
