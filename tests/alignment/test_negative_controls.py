# SPDX-License-Identifier: Apache-2.0
"""The assertions of ``test_situations`` fail on an engine that captures the wrong thing.

Every tamper spoils a real engine, in the same process and with the same requests as the green runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from settings import SETTINGS, TAMPERED

from vllm_kimi_eagle3.regression.engine import EngineRun, served_of
from vllm_kimi_eagle3.regression.settings import RIGHT
from vllm_kimi_eagle3.verify.compare import Comparison, compare
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle

pytestmark = pytest.mark.engine
Compared = Callable[..., Comparison]
EAGER = SETTINGS["eager"]


def round_of(tamper: str | None) -> int:
    return next(i for i, entry in enumerate(EAGER.rounds) if isinstance(entry, dict) and entry["tamper"] == tamper)


@pytest.mark.parametrize("tamper", TAMPERED)
def test_a_wrong_capture_is_seen(compared: Compared, tamper: str) -> None:
    comparison = compared("eager", round_of(tamper))
    wrong = [s for s in comparison.situations.values() if not s.ok]
    assert wrong, "it passed"
    # Stale states are right wherever there was no step before.
    assert tamper == "last step's states" or len(wrong) == len(comparison.situations)
    assert comparison.max_relative_error > 0.05
    assert any(s.wrong_drafts for s in wrong)


def test_the_same_requests_pass_untampered(compared: Compared) -> None:
    """The last round, after all the tampers were taken back."""
    assert compared("eager", len(EAGER.rounds) - 1).ok


@pytest.mark.parametrize("wrong", [(3, 7, 9), (4, 6, 9), (4, 7, 10), (3, 6, 8), (5, 8, 10), (2, 5, 7)])
def test_right_rows_against_a_wrong_oracle(compared: Compared, wrong: tuple[int, ...]) -> None:
    last = len(EAGER.rounds) - 1
    comparison, right = compared("eager", last, wrong), compared("eager", last)
    assert not any(s.ok for s in comparison.situations.values())
    off = [i for i in range(3) if wrong[i] != RIGHT[i]]
    for name, s in comparison.situations.items():
        rounding = right.situations[name].errors
        assert [i for i in range(3) if s.errors[i] > 2 * rounding[i] + 1e-4] == off


@pytest.mark.parametrize(("setting", "index"), [("stock", 2), ("short drafter, stock", 0)])
def test_on_stock_v1_a_long_request_takes_the_drafter_from_the_others(
    compared: Compared, run: Callable[[str], EngineRun], setting: str, index: int
) -> None:
    """D24: the other request's rows of those steps never reach the drafter."""
    beside = compared(setting, index)
    # With the short drafter not even the prompt's rows.
    missed = [p for p in beside.problems if re.fullmatch(r"r1: position \d+ (follows \d+|comes first, .*)", p)]
    assert bool(missed) is (run(setting).result["runner"] == "V1"), beside.problems


STOCK = {"V1": (3, 6, 8), "V2": (2, 5, 7)}
"""What stock vLLM captures for the nested ids: V1 reads them raw (D7), V2 does not read them (D6)."""


def test_stock_vllm_with_the_nested_drafter_is_seen(compared: Compared, run: Callable[[str], EngineRun]) -> None:
    captured = STOCK[run("stock").result["runner"]]
    assert run("stock").result["captured"] == list(captured)
    comparison = compared("stock")
    assert not any(s.ok for s in comparison.situations.values())
    wrong = compared("stock", None, captured)
    assert wrong.max_relative_error < 1e-4 or SETTINGS["stock"].dtype != "float32", "these layers, and exactly those"


def test_stock_vllm_gives_the_end_of_a_chunk_a_wrong_token(compared: Compared, run: Callable[[str], EngineRun]) -> None:
    """D22: on V1 the last row of every chunk but the last one holds the prompt's last token as the next."""
    runner = run("stock").result["runner"]
    early = compared("stock", None, STOCK[runner])
    wrong = {name for name, s in early.situations.items() if s.wrong_ids}
    if runner == "V2":
        assert "chunked prefill" in early.situations
        assert not wrong
        return
    assert "chunked prefill" in wrong
    assert wrong <= {"chunked prefill", "batch", "batch of prefill and verify", "across a block boundary"}
    last = SETTINGS["stock"].requests(1)[0][0][-1]
    assert early.problems and all("token id" in problem for problem in early.problems)
    assert any(f"token id {last} at position 36," in problem for problem in early.problems)


@pytest.mark.parametrize("setting", ["bf16", "float16"])
def test_a_scaled_stream_is_seen_in_half_precision(
    run: Callable[[str], EngineRun], oracle: Callable[..., CheckpointOracle], setting: str
) -> None:
    """As D16 would leave it, at half its size, and at 1.1 of it: the measured bar is narrower than that."""
    s, result = SETTINGS[setting], run(setting).result
    for factor, right in ((1.0, True), (0.5, False), (1.1, False)):
        served = served_of(result["rounds"][0], s.requests(0))
        for call in (call for one in served for call in one.calls):
            call.rows = call.rows * factor
        options = {"dtype": s.dtype, "block_size": 16, "max_model_len": 128}
        assert compare(served, oracle("gqa", s.boundaries, s.dtype), s.boundaries, **options).ok is right
