# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3 patches``: the fixes as patches to vLLM's source, for those who build it themselves.

Needs a source tree and nothing else: neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.patching.release import installed_release
from vllm_kimi_eagle3.source_patches import series
from vllm_kimi_eagle3.source_patches.checkout import CheckoutError, uncommitted
from vllm_kimi_eagle3.source_patches.plan import Plan, Standing, State, choose, examine
from vllm_kimi_eagle3.source_patches.series import Series, SeriesError
from vllm_kimi_eagle3.source_patches.tree import Tree, TreeError

SUMMARY = "The fixes as patches to vLLM's source: list them, check a tree, apply them all or none."
_FIELDS = ("Description", "Upstream", "Applied-Upstream", "Drop-When", "Last-Update")


class _BadInput(Exception):
    """What the user asked for cannot be done at all. One sentence."""


class _Refused(Exception):
    """The tree is not one that may be patched now. One sentence."""


def add_parser(subparsers: Any) -> None:
    """Declare the command's options."""
    parser = subparsers.add_parser("patches", help=SUMMARY, description=SUMMARY)
    parser.add_argument(
        "--vllm", metavar="X.Y.Z", help="the release (default: the tree's; without a tree, the installed or newest one)"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", type=Path, metavar="DIR", help="what a tree needs, has, or conflicts with")
    action.add_argument("--apply", type=Path, metavar="DIR", help="apply them all or none; DIR holds the vllm package")
    parser.add_argument("--dirty", action="store_true", help="apply although git has uncommitted changes there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """List, check or apply. 0: good; 1: the tree is not fully patched, or may not be; 2: bad input."""
    folder: Path | None = options.check or options.apply
    try:
        if folder is None:
            return _list(options)
        with _opened(folder) as tree:
            return _check(tree, options) if options.check else _apply(tree, options)
    except (SeriesError, _BadInput) as error:
        print(f"vllm-kimi-eagle3 patches: {error}", file=sys.stderr)
        return 2
    except (TreeError, CheckoutError, _Refused) as error:
        print(f"vllm-kimi-eagle3 patches: {error}", file=sys.stderr)
        return 1


def _opened(folder: Path) -> Tree:
    try:
        return Tree(folder)
    except TreeError as error:
        raise _BadInput(str(error)) from None


def _list(options: argparse.Namespace) -> int:
    if options.dirty:
        raise _BadInput("--dirty goes with --apply")
    chosen = _listed(options.vllm)
    if options.json:
        listed = [{**_record(Standing(patch, State.NEEDED)), "state": None} for patch in chosen.patches]
        print(json.dumps({"range": chosen.name, "series": listed, "state": None}, indent=2))
        return 0
    print(f"vLLM {chosen.first} to {chosen.last}: {len(chosen.patches)} patches, in {chosen.patches[0].path.parent}\n")
    for patch in chosen.patches:
        print(f"  {patch.name:36} {patch.defect:4} {patch.title}")
    return 0


def _listed(asked: str | None) -> Series:
    """The series of the release asked for, of the installed one, or the newest."""
    if asked is not None:
        return series.for_release(asked)
    installed = installed_release()
    if installed is not None:
        try:
            return series.for_release(installed)
        except SeriesError:
            pass  # a fork's own number, or a release without a series: show the newest
    return series.load(*series.ranges()[-1])


def _check(tree: Tree, options: argparse.Namespace) -> int:
    if options.dirty:
        raise _BadInput("--dirty goes with --apply")
    plan = examine(tree, choose(tree, options.vllm))
    _show(plan, tree, options)
    return 0 if plan.state is State.HAS else 1


def _apply(tree: Tree, options: argparse.Namespace) -> int:
    plan = examine(tree, choose(tree, options.vllm))
    if plan.state in (State.NEEDED, State.PARTIAL):
        if not options.dirty and (changed := uncommitted(tree.root)):
            raise _Refused(
                f"{tree.root} has uncommitted changes, such as {changed[0][:120]!a}; commit them, or say --dirty"
            )
        tree.replace(plan.texts)
        plan = examine(tree, plan.series)
    _show(plan, tree, options)
    if plan.state is State.CONFLICTS:
        print("vllm-kimi-eagle3 patches: nothing was changed, because a patch conflicts", file=sys.stderr)
    return 0 if plan.state is State.HAS else 1


def _show(plan: Plan, tree: Tree, options: argparse.Namespace) -> None:
    if options.json:
        listed = [_record(standing) for standing in plan.standings]
        data = {"range": plan.series.name, "directory": str(tree.root), "series": listed, "state": plan.state.value}
        print(json.dumps(data, indent=2))
        return
    print(f"{tree.root} against the series for vLLM {plan.series.first} to {plan.series.last}: {plan.state.value}\n")
    for standing in plan.standings:
        reason = f" ({standing.reason})" if standing.reason else ""
        print(f"  {standing.patch.name:36} {standing.patch.defect:4} {standing.state.value}{reason}")


def _record(standing: Standing) -> dict[str, Any]:
    patch = standing.patch
    return {
        "name": patch.name,
        "id": patch.defect,
        "title": patch.title,
        "state": standing.state.value,
        "reason": standing.reason,
        "files": [change.path for change in patch.changes],
        "header": {key: patch.fields[key] for key in _FIELDS if key in patch.fields},
    }
