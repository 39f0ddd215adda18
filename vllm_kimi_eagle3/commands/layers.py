# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3 layers``: which layers, by which rule, who decided, and what stock vLLM would take.

Needs the two configs and nothing else: neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.layers import PlanError, alignment, explain, facts_of, read_headers, resolve, stock_boundaries
from vllm_kimi_eagle3.layers.files import read_config
from vllm_kimi_eagle3.layers.plan import RULES
from vllm_kimi_eagle3.layers.stock import NEWEST
from vllm_kimi_eagle3.patching.release import installed_release

SUMMARY = "Which layers the drafter reads, who says so, and what stock vLLM would take."
RULE_VARIABLE = "VLLM_KIMI_EAGLE3_LAYER_RULE"


def add_parser(subparsers: Any) -> None:
    """Declare the command's options."""
    parser = subparsers.add_parser("layers", help=SUMMARY, description=SUMMARY)
    parser.add_argument("--target", required=True, type=Path, metavar="DIR", help="folder of the target's config.json")
    parser.add_argument(
        "--drafter", required=True, type=Path, metavar="DIR", help="folder of the drafter's config.json"
    )
    parser.add_argument(
        "--vllm", metavar="X.Y.Z", help="compare with this release of vLLM (default: the installed one)"
    )
    parser.add_argument("--rule", choices=RULES, help=f"how to read the ids (default: ${RULE_VARIABLE}, or decide)")
    parser.add_argument("--ids", metavar="I,J,K", help="take these ids (boundaries, unless --rule says output)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan and stock vLLM's reading. ``PlanError`` passes through; the caller words it."""
    target, drafter = read_config(options.target), read_config(options.drafter)
    release, note, warnings = _release(options.vllm)
    facts = facts_of(release)
    folder = options.drafter if options.drafter.is_dir() else options.drafter.parent
    headers = read_headers(folder)
    plan = resolve(
        target,
        drafter,
        layer_rule=options.rule or _rule_from_environment(),
        layer_ids=None if options.ids is None else _parse_ids(options.ids),
        headers=headers,
        alignment=alignment.load(alignment.content_key(target, drafter, headers)),
        last_boundary_capturable=facts.last_boundary,
        fixed_fc_states=None if facts.fc_counts else 3,
    )
    stock = stock_boundaries(release, target, drafter)
    warnings = [*plan.warnings, *warnings, *stock.warnings]
    if options.json:
        data = {**plan.to_json(), "warnings": warnings, "stock": stock.to_json(), "vllm": release}
        print(json.dumps({**data, "differs": explain.differing(plan, stock)}, indent=2))
        return 0
    print(explain.plan_text(plan, headers), explain.stock_text(plan, stock, note), sep="\n\n")
    for warning in warnings:
        print(f"\nwarning: {warning}")
    return 0


def _release(asked: str | None) -> tuple[str, str, list[str]]:
    """The release to compare with, a note on where it comes from, and warnings."""
    if asked is not None:
        return asked, "", []
    installed = installed_release()
    if installed is None:
        return NEWEST, " (the newest known; no vLLM is installed here)", []
    try:
        facts_of(installed)
    except PlanError:
        # Builds from a fork without tags call themselves 0.1.dev1 or the like.
        warning = f"the installed vLLM calls itself {installed}, so {NEWEST} is taken; --vllm names another release"
        return NEWEST, f" (in place of the installed {installed})", [warning]
    return installed, " (installed)", []


def _rule_from_environment() -> str | None:
    rule = os.environ.get(RULE_VARIABLE) or None
    if rule is not None and rule not in RULES:
        raise PlanError(f"{RULE_VARIABLE} is {rule!a}, but output or boundary was expected")
    return rule


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PlanError(f"--ids is {text[:60]!a}, but integers such as 2,30,58 were expected") from None
