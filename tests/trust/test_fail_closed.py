# SPDX-License-Identifier: Apache-2.0
"""With any single fix failing in any way: our server refuses in one sentence, or says so; nobody else notices.

And whatever was applied, or half applied, can be taken back in any order without a trace. One process on the real vLLM
goes through all of it (``failing_fixes.py``); the tests here look at what it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3.registry import FIXES

pytestmark = pytest.mark.engine
FAILURES = (
    "unknown shape",
    "exception in probe",
    "missing module",
    "exception in apply",
    "half applied",
    "exception in configure",
)
REASON = {
    "unknown shape": "shape of another world",
    "exception in probe": "the probe failed: ZeroDivisionError: on purpose",
    "missing module": "module vllm.no_such_module is not part of this vLLM",
    "exception in apply": "FAILED: ZeroDivisionError: on purpose",
    "half applied": "FAILED: PatchConflict: vllm.config.vllm:VllmConfig.no_such_method does not exist",
    "exception in configure": "FAILED: for this server: ZeroDivisionError: on purpose",
}


@pytest.fixture(scope="module")
def seen(answer: Callable[..., Any], models: dict[str, str]) -> dict[str, Any]:
    return answer("failing_fixes.py", models)


def sentences(text: str) -> list[str]:
    return [line for line in text.splitlines() if "vllm-kimi-eagle3" in line]


def test_without_a_failure_the_server_starts_in_silence(seen: dict[str, Any]) -> None:
    """The negative control of all that follows."""
    assert seen["sound"] == [{"error": None, "warnings": []}] * 2


@pytest.mark.parametrize("failure", FAILURES)
def test_every_fix_closes_the_door(seen: dict[str, Any], failure: str) -> None:
    cases = [case for case in seen["cases"] if case["failure"] == failure]
    assert [case["fix"] for case in cases] == [fix.label for fix in FIXES]
    for case in cases:
        for start in case["on"]:
            assert start["error"] is not None, f"{case['fix']} failed and the server started"
            (sentence,) = sentences(start["error"])
            assert f"{case['fix']} is " in sentence and REASON[failure] in sentence
            assert "VLLM_KIMI_EAGLE3=warn" in sentence
        # With warn it starts, and says so on every start.
        for start in case["warn"]:
            assert start["error"] is None
            said = [line for line in start["warnings"] if f"{case['fix']} is " in line and REASON[failure] in line]
            assert said and "\n" not in said[0]


def test_a_failure_leaves_nothing_behind(seen: dict[str, Any]) -> None:
    assert seen["changed"] == {fix.label: [] for fix in FIXES}


@pytest.mark.parametrize("name", ["plain", "plain with eagle3"])
def test_others_start_untouched_while_every_fix_fails(seen: dict[str, Any], name: str) -> None:
    with_gates, without = seen["others"][name]
    assert with_gates == without
    assert with_gates["additional"] == {} and with_gates["patched"] == [] and with_gates["said"] == []


def test_any_order_of_undoing_leaves_every_namespace_as_it_was(seen: dict[str, Any]) -> None:
    fixes, orders = seen["reversible"]["fixes"], seen["reversible"]["orders"]
    assert len(fixes) >= 5 and len(orders) == 12
    for order in orders:
        assert order["applied"] == fixes
        assert order["touched"] > len(fixes), "nothing was replaced: the test would prove nothing"
        assert order["changed"] == [] and order["described"]


def test_a_configuration_that_fails_is_one_server_s(seen: dict[str, Any]) -> None:
    first, second, third = seen["configure"]["answers"]
    assert first is None and third is None
    assert "D6 nested-layer-ids is FAILED: for this server: KeyError: 'only here'" in second
    assert seen["configure"]["installed"] == ["vllm.config.speculative:SpeculativeConfig.compute_hash"]


def test_uninstalling_leaves_no_cached_artefact(
    seen: dict[str, Any], answer: Callable[..., Any], models: dict[str, str], vllm_cache: Path, tmp_path: Path
) -> None:
    """What vLLM caches of model classes is, byte for byte, what it caches without the overlay.

    Compiled graphs are another matter: their key knows the plan, ``tests/engine/test_cache_key.py``.
    """
    off = answer("configure.py", models, VLLM_KIMI_EAGLE3="off", VLLM_CACHE_ROOT=str(tmp_path / "off"))
    assert off == {"overlay": False}
    with_overlay, without = (
        {f.relative_to(r): f.read_bytes() for f in r.rglob("*.json")} for r in (vllm_cache, tmp_path)
    )
    without = {path.relative_to("off"): content for path, content in without.items()}
    assert len(without) >= 2, "nothing was cached: the test would prove nothing"
    assert {path: with_overlay.get(path) for path in without} == without
    kinds = {path.parts[0] for path in with_overlay}
    assert kinds == {path.parts[0] for path in without}, "the overlay has a cache of its own there"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("a word", "is 'output'; it must be a dictionary"),
        ("an unknown key", "has unknown keys ['layers']"),
        ("a key that is no word", "has unknown keys ['7', 'x']"),
        ("a plan from elsewhere", "has unknown keys ['fixes', 'plan', 'version']"),
        ("an object", "additional_config is a Hashed"),
    ],
)
def test_what_is_no_choice_stops_eagle3_and_nothing_else(seen: dict[str, Any], name: str, word: str) -> None:
    eagle3, plain = (seen["odd additional_config"][f"{name}, {kind}"] for kind in ("eagle3", "plain"))
    assert eagle3["error"] is not None and len(sentences(eagle3["error"])) == 1 and word in eagle3["error"]
    assert plain["error"] is None and plain["applied"]
    assert len(plain["warnings"]) == 1 and word in plain["warnings"][0]
