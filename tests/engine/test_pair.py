# SPDX-License-Identifier: Apache-2.0
"""The trained tiny pair on the real CPU engine: right layers, right text, right acceptance; and red on stock vLLM.

Every number is compared with an independent torch reference of the whole speculative loop, draft for draft. The
acceptance bars are the difference that a user feels: right layers at least 70 %, one layer off at least 6 points less,
the default layers at least 15 points less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_kimi_eagle3.reference import SpeculationTrace, Target, greedy
from vllm_kimi_eagle3.regression.engine import EngineFailed, EngineRun, Request, counters, run_engine

pytestmark = pytest.mark.engine
RIGHT, EARLY, LATE, DEFAULT = (4, 7, 9), (3, 6, 8), (5, 8, 10), (2, 5, 7)
Predict = Callable[..., list[SpeculationTrace]]
Served = Callable[..., EngineRun]


def rate(traces: list[SpeculationTrace]) -> float:
    return sum(t.accepted for t in traces) / sum(t.drafted for t in traces)


def assert_equal(run: EngineRun, traces: list[SpeculationTrace]) -> None:
    """Text, counters, and every draft and drafter input of every single request; text and counters of the batch."""
    *single, batch = run.result["rounds"]
    for got, trace in zip(single, traces, strict=True):
        assert got["output_ids"] == [trace.output_ids]
        assert got["counters"] == counters(trace)
        if run.result["in_process"]:
            steps = [step for step in trace.steps if step.proposal is not None]
            assert [call["drafts"] for call in got["calls"]] == [s.proposal.token_ids for s in steps if s.proposal]
            assert [call["ids"] for call in got["calls"]] == [s.drafter_ids for s in steps]
            assert [call["positions"] for call in got["calls"]] == [s.drafter_positions for s in steps]
            for call, step in zip(got["calls"], steps, strict=True):
                error = (call["rows"] - step.drafter_rows).norm() / step.drafter_rows.norm()
                assert error < 1e-4, f"drafter input off by {error:.1e} at position {step.start}"
    assert batch["output_ids"] == [trace.output_ids for trace in traces[:4]]
    assert batch["counters"] == counters(*traces[:4])


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_the_pair_tells_right_layers_from_wrong_ones(predict: Predict, kind: str) -> None:
    rates = {b: rate(predict(kind, b)) for b in (RIGHT, EARLY, LATE, DEFAULT)}
    print({str(b): f"{r:.1%}" for b, r in rates.items()})
    assert rates[RIGHT] >= 0.70
    assert rates[RIGHT] - rates[EARLY] >= 0.06
    assert rates[RIGHT] - rates[LATE] >= 0.06
    assert rates[RIGHT] - rates[DEFAULT] >= 0.15


@pytest.mark.parametrize("name", ["kimi_k25", "deepseek_v3"])
def test_text_without_speculation_is_the_reference_s(
    served: Served, target: Target, requests: list[Request], name: str
) -> None:
    run = served(name, None)
    assert {run.result["states"][c] for c in ("C2",)} == {"APPLIED"}
    for got, (prompt, tokens, _) in zip(run.result["rounds"], requests, strict=False):
        assert got["output_ids"] == [greedy(target, prompt, tokens)]


def test_text_is_transformers_own(pair: dict[str, Any], predict: Predict, requests: list[Request]) -> None:
    import torch
    from transformers import DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM.from_pretrained(pair["deepseek_v3"], dtype=torch.float32).eval()
    for (prompt, tokens, _), trace in zip(requests[:6], predict("gqa", RIGHT), strict=False):
        options = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(torch.tensor([prompt]), **options)
        assert out[0, len(prompt) :].tolist() == trace.output_ids


@pytest.mark.parametrize("name", ["kimi_k25", "deepseek_v3"])
def test_the_overlay_captures_the_layers_the_drafter_was_trained_on(
    served: Served, predict: Predict, by_rule: dict[str, Any], name: str
) -> None:
    run = served(name, "eagle3_gqa_nested", **by_rule)
    assert_equal(run, predict("gqa", RIGHT))
    assert any("boundaries (4, 7, 9) = outputs of layers 3, 6, 8" in line for line in run.log_lines("vllm-kimi-eagle3"))
    assert "FAILED" not in run.result["states"].values() and "REFUSED" not in run.result["states"].values()


def test_the_boundary_rule_s_config_needs_no_word_from_the_user(served: Served, predict: Predict) -> None:
    assert_equal(served("kimi_k25", "eagle3_gqa_boundary"), predict("gqa", RIGHT))


def test_a_spawned_engine_core_does_the_same(served: Served, predict: Predict, by_rule: dict[str, Any]) -> None:
    run = served("kimi_k25", "eagle3_gqa_nested", separate_core=True, env={"VLLM_KIMI_EAGLE3_WATCH": "1"}, **by_rule)
    assert not run.result["in_process"]
    watching = run.log_lines("watching acceptance")
    assert len(watching) == 1 and "MainProcess" not in watching[0], "the watch sits where the scheduler is"
    assert not run.log_lines("hardly any draft")
    assert_equal(run, predict("gqa", RIGHT))
    lines = run.log_lines("boundaries (4, 7, 9)")
    assert any("MainProcess" not in line for line in lines), "the worker did not say what it captures"
    assert any("MainProcess" in line for line in lines), "the process that planned did not say so"


def test_stock_takes_every_feature_one_layer_early(served: Served, predict: Predict) -> None:
    """Red without the overlay: V1 reads the nested ids raw (D7). The legacy schema keeps D11 out of the way."""
    run = served("kimi_k25_legacy", "eagle3_gqa_nested", overlay="stock")
    assert_equal(run, predict("gqa", EARLY))
    with pytest.raises(AssertionError):
        assert_equal(run, predict("gqa", RIGHT))


@pytest.mark.parametrize("boundaries", [LATE, DEFAULT])
def test_explicit_layers_are_what_is_captured(served: Served, predict: Predict, boundaries: tuple[int, ...]) -> None:
    choice = {"kimi_eagle3": {"layer_ids": list(boundaries), "layer_rule": "boundary"}}
    run = served("deepseek_v3", "eagle3_gqa_nested", additional_config=choice)
    assert_equal(run, predict("gqa", boundaries))


def test_mla_drafter(served: Served, predict: Predict, by_rule: dict[str, Any]) -> None:
    assert_equal(served("kimi_k25", "eagle3_mla_nested", **by_rule), predict("mla", RIGHT))


def test_mla_drafter_that_calls_itself_deepseek_v3(
    pair: dict[str, Any], served: Served, predict: Predict, by_rule: dict[str, Any]
) -> None:
    """D18: refused by stock vLLM as an MTP head, served with the overlay."""
    with pytest.raises(EngineFailed, match="Eagle3DeepSeekMTPModel"):
        run_engine(pair["deepseek_v3"], [], drafter=pair["eagle3_mla_nested_v3"], overlay="stock")
    assert_equal(served("deepseek_v3", "eagle3_mla_nested_v3", **by_rule), predict("mla", RIGHT))


def test_new_schema_of_kimi_k25_crashes_stock_and_serves_with_the_overlay(pair: dict[str, Any], served: Served) -> None:
    """D11; the green half is every test above that serves ``kimi_k25``."""
    with pytest.raises(EngineFailed, match="has no attribute 'media_placeholder_token_id'"):
        run_engine(pair["kimi_k25"], [], drafter=pair["eagle3_gqa_boundary"], overlay="stock")
    assert served("kimi_k25", "eagle3_gqa_boundary").result["states"]["D11"] == "APPLIED"


def test_without_any_mending_the_cpu_engine_fails_in_the_known_ways(
    pair: dict[str, Any], target: Target, requests: list[Request]
) -> None:
    """C1, C2 and C3, red: what the fixes that only act on CPU are for."""
    with pytest.raises(EngineFailed, match="'_lib_fn_wrapper' object has no attribute 'get'"):
        run_engine(pair["kimi_k25"], [], overlay="off")
    with pytest.raises(EngineFailed, match="No common block size for 16"):
        run_engine(pair["deepseek_v3"], [], drafter=pair["eagle3_gqa_boundary"], overlay="off")
    wrong = run_engine(pair["deepseek_v3"], [requests[:1]], overlay="off")
    assert wrong.result["rounds"][0]["output_ids"] != [greedy(target, *requests[0][:2])]
