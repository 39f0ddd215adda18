# SPDX-License-Identifier: Apache-2.0
"""The installed suite, run as a user runs it: on stock vLLM exactly the tests of the table fail, and else none.


``stock`` mends the CPU engine alone (C1 to C3, C5, C6), without which these targets do not run there; ``off`` mends
nothing. What is skipped is in the table, too: nothing is left out without a word.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from patched_vllm import patched_copy

from tests.engines.conftest import RELEASE
from tests.engines.regression_expected import FAILS, SKIPS
from vllm_kimi_eagle3.registry import FIXES
from vllm_kimi_eagle3.regression.engine import EngineFailed
from vllm_kimi_eagle3.regression.settings import UNTESTED

pytestmark = pytest.mark.engine
known = pytest.mark.skipif(RELEASE not in FAILS, reason=f"the table has no column for {RELEASE}")


class Ended(dict[str, str]):
    """How each test ended: passed, failed or skipped."""

    output: str
    status: int
    reasons: dict[str, str]
    properties: dict[str, str]

    def which(self, how: str) -> set[str]:
        """The tests that ended so."""
        return {name for name, ended in self.items() if ended == how}


def run_suite(folder: Path, *arguments: str, **environment: str) -> Ended:
    """Run the installed suite in a process of its own."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "--pyargs", "vllm_kimi_eagle3.regression", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    ended = Ended()
    ended.output, ended.status, ended.reasons = done.stdout + done.stderr, done.returncode, {}
    assert report.exists(), ended.output[-4000:]
    root = ET.parse(report).getroot()
    ended.properties = {p.get("name", ""): p.get("value", "") for p in root.iter("property")}
    for case in root.iter("testcase"):
        name = case.get("name", "")
        kinds = {child.tag: child for child in case if child.tag in ("failure", "error", "skipped")}
        ended[name] = "skipped" if "skipped" in kinds else "failed" if kinds else "passed"
        for child in kinds.values():
            ended.reasons[name] = child.get("message", "")
    return ended


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """The suite without its slow tests, in a state of vLLM; each state once."""

    @cache
    def run(state: str) -> Ended:
        environment: dict[str, str] = {"VLLM_KIMI_EAGLE3": {"overlay": "on", "patched": "off"}.get(state, state)}
        if state == "patched":
            environment |= patched_copy(tmp_path_factory.mktemp("patched"))
        return run_suite(tmp_path_factory.mktemp(state), "-m", "not slow", **environment)

    return run


more = pytest.mark.skipif(
    not os.environ.get("ALL_STATES"), reason="minutes more: nox runs it, and ALL_STATES=1 says so here"
)


@known
@pytest.mark.parametrize(
    "state", ["stock", "overlay", pytest.param("off", marks=more), pytest.param("patched", marks=more)]
)
def test_it_fails_where_vllm_is_wrong_and_nowhere_else(ended: Callable[[str], Ended], state: str) -> None:
    if state == "off" and state not in FAILS[RELEASE]:
        pytest.skip(f"the CPU engine of {RELEASE} does not run these targets at all without C1 to C3")
    run = ended(state)
    wanted = FAILS[RELEASE].get(state, frozenset[str]())
    assert run.which("failed") == wanted, run.output[-6000:]
    assert run.which("skipped") == SKIPS[RELEASE], run.reasons
    assert all(len(run.reasons[name]) > 20 for name in run.which("skipped"))
    assert len(run.which("passed")) == len(run) - len(wanted) - len(SKIPS[RELEASE]) > 0
    assert run.status == (1 if wanted else 0)


@known
def test_the_report_says_what_was_tested(ended: Callable[[str], Ended]) -> None:
    for state, overlay in (("stock", "stock"), ("overlay", "on")):
        run = ended(state)
        assert RELEASE in run.properties["vllm"]
        assert run.properties["overlay"] == overlay
        assert f"overlay: {overlay}; source patches: none of" in run.output
        assert re.search(rf"regression suite: vLLM {re.escape(RELEASE)}\S* in ", run.output)


def test_the_reason_of_a_failed_engine() -> None:
    """The traceback's own error, not a warning about one, and not that the core could not start."""
    log = (
        "(EngineCore pid=7) ERROR 11-29 22:49:30 [core.py:1584] AttributeError: no media_placeholder_token_id\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
        "(MainProcess pid=1) WARNING 11-29 22:49:31 [base.py:383] ValueError: Tokenizer not available\n"
        "[rank0]:[W1130 00:21:00.650 ProcessGroupNCCL.cpp:1575] Warning: an Error that is none\n"
    )
    assert EngineFailed(log).reason.endswith("AttributeError: no media_placeholder_token_id")


def test_skips_alone_are_no_success(tmp_path: Path) -> None:
    run = run_suite(tmp_path, "-m", "gpu")
    assert run.which("skipped") and not run.which("passed")
    assert run.status == 1
    assert "nothing was checked" in run.output


def collected(folder: Path, *arguments: str) -> list[str]:
    """What a user may select: the names of the suite's tests."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "vllm_kimi_eagle3.regression", "--collect-only", "-q"]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)
    return [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_markers_and_ids(tmp_path: Path) -> None:
    assert len(collected(tmp_path, "-m", "cpu")) == 6
    assert collected(tmp_path, "-k", "D18") == ["test_defect[D18-mla-drafter]"]


def test_every_fix_has_a_check(tmp_path: Path) -> None:
    names = collected(tmp_path)
    assert {"test_defect[D7-output-rule-engine]", "test_alignment[chunked-prefix-cache hit]"} <= set(names)
    checked = {found[1] for name in names if (found := re.match(r"test_defect\[([A-Z]\d+)-", name))}
    assert checked | UNTESTED.keys() == {fix.id for fix in FIXES}
    assert not checked & UNTESTED.keys()
