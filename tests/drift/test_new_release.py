# SPDX-License-Identifier: Apache-2.0
"""A release that nobody has looked at fails loudly, with what it changed. BUILD.md says what to do then."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.drift.expected import RELEASES, number
from tests.releases import DISTRIBUTIONS
from tools import compatibility
from vllm_kimi_eagle3.layers import stock


def published() -> set[str]:
    """Every final release on the index, of either distribution, from the oldest that is supported."""
    found: set[str] = set()
    for distribution in DISTRIBUTIONS:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", distribution]
        done = subprocess.run(command, capture_output=True, text=True)
        listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
        assert listed, f"the index does not answer for {distribution}: {done.stderr.strip()}"
        found |= {v.strip() for v in listed[1].split(",") if re.fullmatch(r"\d+\.\d+\.\d+", v.strip())}
    return {release for release in found if number(release) >= number(RELEASES[0])}


def test_every_published_release_is_in_the_table() -> None:
    report = []
    for release in sorted(published() - set(RELEASES), key=number):
        before = max((r for r in RELEASES if number(r) < number(release)), key=number)
        found = compatibility.changes(compatibility.sources(before), compatibility.sources(release))
        report.append(
            f"vLLM {release} is not in tests/drift/expected.py. Against {before}: "
            + ("\n  ".join(["", *found]) if found else "nothing that a fix looks at changed.")
        )
    assert not report, "\n".join(report)


def test_changes_names_verdicts_and_source_that_moved() -> None:
    """The newest release, treated as unseen."""
    found = compatibility.changes(compatibility.sources("0.32.0"), compatibility.sources("0.33.0"))
    assert any(entry.startswith("D13 use-aux-flag: APPLY") and "-> RETIRED" in entry for entry in found)
    assert any("load_eagle_model" in entry and "quantized_lm_head_copy" in entry for entry in found)
    assert not compatibility.changes(compatibility.sources("0.22.0"), compatibility.sources("0.22.1"))


def test_the_newest_release_is_the_one_assumed_for_unknown_ones() -> None:
    assert RELEASES[-1] == stock.NEWEST


def test_compatibility_page_is_in_step() -> None:
    shown = Path("docs/COMPATIBILITY.md").read_text(encoding="utf-8")
    assert shown == compatibility.page(compatibility.read_runs()), "run `python -m tools.compatibility write`"
