# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3 doctor``: is the overlay in place, and do this drafter and target fit?

Works without vLLM and with a broken one: what can't run is reported, the rest still is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3 import __version__
from vllm_kimi_eagle3.doctor import Finding, block, exit_status
from vllm_kimi_eagle3.doctor.checkpoint import check_pair, read_pair
from vllm_kimi_eagle3.doctor.environment import ask, judge
from vllm_kimi_eagle3.layers import PlanError, facts_of
from vllm_kimi_eagle3.patching.release import installed_release

SUMMARY = "Is the overlay in place in a server's processes, and do drafter and target fit each other?"


def add_parser(subparsers: Any) -> None:
    """Declare the command's options."""
    parser = subparsers.add_parser("doctor", help=SUMMARY, description=SUMMARY)
    parser.add_argument("--target", type=Path, metavar="DIR", help="folder of the target; needs --drafter")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="folder of the drafter; needs --target")
    parser.add_argument(
        "--files-only", action="store_true", help="check the two folders, and start no child process that loads vLLM"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the findings. ``PlanError`` (bad input) passes through; the caller words it."""
    if (options.target is None) != (options.drafter is None):
        raise PlanError("--target and --drafter belong together; give both, or neither")
    if options.files_only and options.target is None:
        raise PlanError("--files-only checks two folders; give --target and --drafter")
    release = installed_release()
    findings: list[Finding] = []
    report: dict[str, Any] = {}
    server: dict[str, Any] | None = None
    if options.target is not None:
        rule = os.environ.get("VLLM_KIMI_EAGLE3_LAYER_RULE") or None
        findings += check_pair(read_pair(options.target, options.drafter, vllm=_known(release), layer_rule=rule))
        if options.target.is_dir() and options.drafter.is_dir():
            server = server_arguments(options.target, options.drafter)
    if not options.files_only:
        report = ask(server)
        findings = judge(report) + findings
    status = exit_status(findings)
    fixes: list[dict[str, Any]] = report.get("fixes") or []
    if options.json:
        data = {
            "vllm": release,
            "fixes": fixes,
            "checks": [finding.to_json() for finding in findings],
            "version": __version__,
            "python": platform.python_version(),
            "platform": report.get("platform"),
            "needed": report.get("needed") or {},
            "plugins": report.get("plugins") or [],
            "server": report.get("server"),
            "worker": (report.get("worker") or {}).get("fixes"),
        }
        print(json.dumps(data, indent=2))
        return status
    print(_text(release, report, fixes, findings))
    return status


def server_arguments(target: Path, drafter: Path) -> dict[str, Any]:
    """The smallest server that speculates with this pair; no weight is read to configure it."""
    return {
        "model": str(target),
        "speculative_config": {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3},
        "trust_remote_code": False,
    }


def _known(release: str | None) -> str | None:
    """The release, if the table of releases knows it."""
    if release is None:
        return None
    try:
        facts_of(release)
    except PlanError:
        return None
    return release


def _text(release: str | None, report: dict[str, Any], fixes: list[dict[str, Any]], findings: list[Finding]) -> str:
    """One block to paste into a bug report."""
    lines = [
        f"vllm-kimi-eagle3 {__version__} doctor",
        f"vLLM {release or 'not installed'}, Python {platform.python_version()}, {sys.platform}"
        + (f", device {report['platform']}" if report.get("platform") else ""),
    ]
    others = [p["name"] for p in report.get("plugins") or [] if p["name"] != "kimi_eagle3"]
    if others:
        lines.append(f"other general plugins: {', '.join(others)}")
    if fixes:
        needed = {label for labels in (report.get("needed") or {}).values() for label in labels}
        lines += ["", "fix                            state           what that means here"]
        for fix in fixes:
            label = f"{fix['id']} {fix['name']}"
            meaning = fix["reason"]
            if fix["state"] == "PENDING":
                will = "will be applied when a server needs it: " if label in needed else "not needed on this device: "
                meaning = will + meaning
            lines.append(f"{label:30} {fix['state']:15} {meaning}")
    count = {level: sum(f.level == level for f in findings) for level in ("error", "warning")}
    lines += ["", block(findings), ""]
    lines.append(
        "verdict: nothing is wrong that can be told without serving"
        if not any(count.values())
        else f"verdict: {count['error']} error{'s' * (count['error'] != 1)},"
        f" {count['warning']} warning{'s' * (count['warning'] != 1)}"
    )
    return "\n".join(lines)
