# SPDX-License-Identifier: Apache-2.0
"""The alignment suite on a GPU, on both model runners and on each attention backend that is asked for.

    python bench/gpu/alignment.py --out RESULT.json [--runners V2 V1] [--backends default TRITON_MLA]

The tests are tests/alignment, unchanged. The result tells, for each runner and backend, how each test ended, and the
largest relative error of every situation. Exit code 1 when any failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from campaign import header, need_gpus, result_file, write

ROOT = Path(__file__).resolve().parent.parent.parent
RUNNERS = {"V1": "0", "V2": "1"}
DEFAULT = "default"


def suite(runner: str, backend: str) -> dict[str, Any]:
    """Run the suite once, and return what came of it."""
    engine = {} if backend == DEFAULT else {"attention_config": {"backend": backend}}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = {
            **os.environ,
            "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner],
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "ALIGNMENT_ENGINE": json.dumps(engine),
        }
        command = [sys.executable, "-m", "pytest", "tests/alignment", "-q", f"--junitxml={report}"]
        command += ["-o", "junit_logging=system-out"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(f"pytest wrote no report ({runner}, {backend}):\n{done.stdout}{done.stderr}")
        cases = list(ET.parse(report).iter("testcase"))
    result: dict[str, Any] = {"runner": runner, "backend": backend, "passed": 0, "failed": {}, "skipped": {}}
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        ended = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if ended is None:
            result["passed"] += 1
        elif ended.tag == "skipped":
            result["skipped"].setdefault(ended.get("message", ""), []).append(name)
        else:
            result["failed"][name] = re.sub(r"\s+", " ", ended.get("message", ""))[:600]
    # What test_situations prints for each setting: rows and largest relative error.
    result["errors"] = re.findall(r"^\w[\w ]* \{'.*\}$", "\n".join(_printed(cases)), flags=re.MULTILINE)
    result["log"] = done.stdout[-200_000:]
    return result


def _printed(cases: list[ET.Element]) -> list[str]:
    return [out.text or "" for case in cases for out in case.iter("system-out")]


def main() -> int:
    """Run the suites, all at once, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_file, required=True, help="where the results go (JSON)")
    parser.add_argument("--runners", nargs="+", default=["V2", "V1"], choices=list(RUNNERS))
    parser.add_argument("--backends", nargs="+", default=[DEFAULT], metavar="NAME", help="of vLLM's MLA backends")
    options = parser.parse_args()
    need_gpus(parser, 1)
    cells: list[tuple[str, str]] = list(product(options.runners, options.backends))
    with ThreadPoolExecutor(len(cells)) as pool:
        results = list(pool.map(suite, *zip(*cells, strict=True)))
    with options.out.with_suffix(".log").open("w") as log:
        for result in results:
            log.write(f"==== {result['runner']}, {result['backend']}\n{result.pop('log')}\n")
            skipped = sum(map(len, result["skipped"].values()))
            counts = f"{result['passed']} passed, {len(result['failed'])} failed, {skipped} skipped"
            print(f"{result['runner']}, {result['backend']}: {counts}", flush=True)
    report = {
        **header("alignment.py"),
        "results": results,
    }
    write(options.out, report)
    return int(any(result["failed"] for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
