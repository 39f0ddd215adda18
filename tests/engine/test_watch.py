# SPDX-License-Identifier: Apache-2.0
"""The run-time watch on the real engine: one warning for wrong layers, none for right ones or for few drafts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3 import watch
from vllm_kimi_eagle3.regression.engine import EngineRun, Request, run_engine

pytestmark = pytest.mark.engine
WATCHED = {watch.SWITCH: "1", watch.BELOW: "0.7", watch.MINUTES: "0.01"}
"""The tiny pair's first position is accepted in .89 of the cases, with default layers in .53."""


@pytest.fixture(scope="module")
def run(pair: dict[str, Path], requests: list[Request]) -> EngineRun:
    many = [(list(prompt)[-64:], 64, []) for prompt, _, _ in requests[:14]]
    wrong: dict[str, Any] = {"requests": many, "tamper": "default boundaries"}
    few = {**wrong, "requests": [(prompt, 24, []) for prompt, _, _ in many[:3]]}
    return run_engine(
        pair["deepseek_v3"],
        [few, many, wrong, wrong],
        drafter=pair["eagle3_gqa_boundary"],
        env=WATCHED,
        max_num_seqs=16,
        max_model_len=256,
        disable_log_stats=False,
    )


def test_one_warning_for_a_misaligned_drafter_with_the_command_to_run(run: EngineRun, pair: dict[str, Path]) -> None:
    few, healthy, wrong, again = (entry["said"] for entry in run.result["rounds"])
    assert few == [] and healthy == [] and again == []
    assert len(wrong) == 1 and len(run.log_lines("hardly any draft is accepted")) == 1
    command = f"vllm-kimi-eagle3 bench --base-url http://127.0.0.1:PORT --target {pair['deepseek_v3']} --drafter "
    assert command + str(pair["eagle3_gqa_boundary"]) in wrong[0]
    assert watch.BELOW in wrong[0] and "less than 70%" in wrong[0]


def test_rounds_were_what_they_are_taken_for(run: EngineRun) -> None:
    few, healthy, wrong, again = (entry["counters"] for entry in run.result["rounds"])
    assert few["num_drafts"][0] < 100 and all(c["num_drafts"][0] > 200 for c in (healthy, wrong, again))
    first = [c["num_accepted_tokens_per_pos"][0] / c["num_drafts"][0] for c in (few, healthy, wrong, again)]
    assert first[1] > 0.8 and max(first[0], *first[2:]) < 0.65


def test_on_wraps_two_methods_and_off_none(run: EngineRun, served: Any) -> None:
    assert run.result["scheduler"] == {
        "__init__": ("FunctionWrapper", watch.MODULE),
        "make_spec_decoding_stats": ("function", watch.__name__),
    }
    off = served("kimi_k25", "eagle3_gqa_boundary")
    assert off.result["scheduler"] == {
        "__init__": ("function", watch.MODULE),
        "make_spec_decoding_stats": ("function", watch.MODULE),
    }


def test_it_costs_less_than_a_thousandth_of_a_step(run: EngineRun, benchmark: Any) -> None:
    """Of the tiny pair's, shared by as many requests as ran in it: what is counted is counted a request."""

    class Scheduler:
        log_stats = False

        def make_spec_decoding_stats(
            self, spec_decoding_stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **_: Any
        ) -> Any:
            return None

    holder: Any = type("Installer", (), {})()
    holder.original = lambda _: Scheduler.make_spec_decoding_stats
    holder.replace = lambda _, new: setattr(holder, "new", new)
    watch.install(holder)
    scheduler: Any = Scheduler()
    scheduler._kimi_eagle3_watch = watch.Watch(watch.Settings(), lambda *_: None)

    def seconds(function: Any) -> float:
        best = 1.0
        for _ in range(20):
            start = time.perf_counter()
            for accepted in (0, 1, 2, 3) * 250:
                function(scheduler, None, num_draft_tokens=3, num_accepted_tokens=accepted, request_id="r")
            best = min(best, (time.perf_counter() - start) / 1000)
        return best

    cost = benchmark.pedantic(lambda: seconds(holder.new) - seconds(Scheduler.make_spec_decoding_stats), rounds=1)
    healthy = run.result["rounds"][1]
    step = healthy["seconds"] / healthy["counters"]["num_drafts"][0]
    share = cost / step
    benchmark.extra_info.update(observation_us=1e6 * cost, step_ms=1e3 * step, share=share)
    print(f"an observation takes {1e6 * cost:.2f} us, a request's part of a step {1e3 * step:.1f} ms: {share:.4%}")
    assert share < 0.001
