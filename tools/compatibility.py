# SPDX-License-Identifier: Apache-2.0
"""Where every fix stands on every release of vLLM, from the probes; and what a new release changed.

    python -m tools.compatibility write          # docs/COMPATIBILITY.md
    python -m tools.compatibility diff OLD NEW   # verdicts and source that a release changed; exit 1 if any

Run in the repository's root. Releases are fetched and cached as by the drift tests; torch and vLLM are not needed.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.drift.expected import RELEASES
from tests.releases import tree
from vllm_kimi_eagle3.fixes import _boundaries
from vllm_kimi_eagle3.patching.engine import probe
from vllm_kimi_eagle3.patching.source import SourceMissing, SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Verdict
from vllm_kimi_eagle3.registry import ELSEWHERE, FIXES, UNDONE

PAGE = Path("docs/COMPATIBILITY.md")
RUNS = Path("docs/engine_runs.json")
MARKS = {Need.APPLY: "●", Need.RETIRED: "·", Need.NOT_APPLICABLE: " ", Need.REFUSED: "✗"}


def sources(release: str) -> SourceTree:
    """A release's source tree; parsed modules are shared while it is held."""
    return SourceTree(tree(release))


@functools.cache
def verdicts(release: str) -> dict[str, Verdict]:
    """Every fix's verdict on a release; kept, while the parsed source is let go."""
    source = sources(release)
    return {fix.label: probe(fix, source) for fix in FIXES}


# ---------------------------------------------------------------------------------------------------------------------
# What a release changed


def watched(old: SourceTree, new: SourceTree) -> Iterable[str]:
    """Every definition that a fix names as its target and that either tree has."""
    names = {target for fix in FIXES for target in fix.targets} | {_boundaries.V1_READER, _boundaries.V2_READER}
    return sorted(name for name in names if old.has(name) or new.has(name))


def changes(old: SourceTree, new: SourceTree) -> list[str]:
    """One entry for each verdict and each watched definition that differs; empty when nothing does."""
    found: list[str] = []
    for fix in FIXES:
        before, after = probe(fix, old), probe(fix, new)
        if (before.need, before.reason) != (after.need, after.reason):
            found.append(f"{fix.label}: {before.need.value} ({before.reason}) -> {after.need.value} ({after.reason})")
    for name in watched(old, new):
        before_text, after_text = _text(old, name), _text(new, name)
        if before_text != after_text:
            lines = difflib.unified_diff(before_text.splitlines(), after_text.splitlines(), lineterm="", n=1)
            body = "\n    ".join(line for line in lines if not line.startswith(("---", "+++")))
            found.append(f"{name}:\n    {body}")
    return found


def _text(source: SourceTree, name: str) -> str:
    try:
        return source.text(name)
    except SourceMissing:
        return "(not there)"


# ---------------------------------------------------------------------------------------------------------------------
# The page


def page(runs: list[dict[str, Any]]) -> str:
    """``docs/COMPATIBILITY.md``, whole."""
    lines = [
        "# Compatibility",
        "",
        "Made by `python -m tools.compatibility write` from the fixes' own probes, run over the source of every",
        "release; `tests/drift` keeps it in step. Do not edit it.",
        "",
        "● the defect is there and the fix is applied · upstream is right ✗ unknown shape: EAGLE-3 on our targets is",
        "refused (blank) the release has no such code. What a server really gets also depends on its platform, runner,",
        "dtype and target: `vllm-kimi-eagle3 doctor` says.",
        "",
    ]
    lines += _matrix()
    lines += ["", "## What each fix mends", ""]
    lines += ["| fix | what a user sees without it | upstream | deleted when |", "|---|---|---|---|"]
    lines += [f"| {f.label} | {f.why} | {f.upstream} | {f.retire} |" for f in FIXES]
    lines += ["", "## Met without a fix of their own", ""]
    lines += [f"* **{name}**: {how}." for name, how in ELSEWHERE.items()]
    lines += ["", "## Known and not mended", ""]
    lines += [f"* **{name}**: {reason}." for name, reason in UNDONE.items()]
    lines += ["", "## Run on real engines", ""]
    lines += ["| vLLM | engine | what ran | result | when |", "|---|---|---|---|---|"]
    lines += [f"| {r['vllm']} | {r['engine']} | {r['what']} | {r['result']} | {r['when']} |" for r in runs]
    return "\n".join(lines) + "\n"


def _matrix() -> list[str]:
    """Releases down, fixes across: there will be more releases than fixes."""
    lines = ["| vLLM | " + " | ".join(_short(fix) for fix in FIXES) + " |", "|---|" + ":-:|" * len(FIXES)]
    for release in RELEASES:
        marks = [MARKS[verdicts(release)[fix.label].need] for fix in FIXES]
        lines.append(f"| {release} | {' | '.join(marks)} |")
    return lines


def _short(fix: Fix) -> str:
    same = [other for other in FIXES if other.id == fix.id]
    return fix.id if len(same) == 1 else f"{fix.id} {'ab'[same.index(fix)]}"


def read_runs() -> list[dict[str, Any]]:
    """The record of engine runs that ``nox`` sessions and people write."""
    return json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else []


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write")
    diff = commands.add_parser("diff")
    diff.add_argument("old")
    diff.add_argument("new")
    chosen = parser.parse_args(arguments)
    if chosen.command == "diff":
        found = changes(sources(chosen.old), sources(chosen.new))
        print("\n".join(found) or f"nothing that a fix looks at differs between {chosen.old} and {chosen.new}")
        return 1 if found else 0
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(read_runs()), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
