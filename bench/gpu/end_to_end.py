# SPDX-License-Identifier: Apache-2.0
"""The tiny pair, end to end, on a GPU: what each runner captures and accepts, stock and with the overlay.

Needs a CUDA vLLM, this package installed (its entry point must be found), and one GPU with 2 GB free.

    python bench/gpu/end_to_end.py --out RESULT.json [--cases NAME ...] [--seconds 540]

Engines start one after another, each in a process of its own; a case is skipped, and said so in the result, when the
time is up. bf16, greedy, k = 3, the 40 held-out prompts in one batch, 64 tokens each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "examples")]

from engine import EngineFailed, run_engine  # noqa: E402
from tiny_kimi.materialize import materialize  # noqa: E402
from widen import widen  # noqa: E402

RULE = {"additional_config": {"kimi_eagle3": {"layer_rule": "output"}}}
FORCED = {"attention_config": {"backend": "FLASH_ATTN_MLA"}}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}

# name: (target, drafter, overlay, variables, engine arguments)
CASES: dict[str, tuple[str, str | None, str, dict[str, str], dict[str, Any]]] = {
    "no speculation": ("kimi_k25", None, "on", {}, {}),
    "default runner, stock": ("kimi_k25", "eagle3_gqa_nested", "off", {}, {}),
    "default runner, overlay": ("kimi_k25", "eagle3_gqa_nested", "on", {}, RULE),
    "V1, stock": ("deepseek_v3", "eagle3_gqa_nested", "off", V1, {}),
    "V1, overlay": ("kimi_k25", "eagle3_gqa_nested", "on", V1, RULE),
    "V1, stock, new K2.5 schema": ("kimi_k25", "eagle3_gqa_nested", "off", V1, {}),
    "MLA drafter, overlay": ("kimi_k25", "eagle3_mla_nested", "on", {}, RULE),
    "MLA drafter of type deepseek_v3, stock": ("deepseek_v3", "eagle3_mla_nested_v3", "off", {}, {}),
    "MLA drafter of type deepseek_v3, overlay": ("deepseek_v3", "eagle3_mla_nested_v3", "on", {}, RULE),
    "compiled with graphs, overlay": ("kimi_k25", "eagle3_gqa_nested", "on", {}, {**RULE, "enforce_eager": False}),
    "forced MLA backend, stock": ("deepseek_v3", "eagle3_gqa_boundary", "off", {}, FORCED),
    "forced MLA backend, overlay": ("deepseek_v3", "eagle3_gqa_boundary", "on", {}, FORCED),
    "legacy schema, stock": ("kimi_k25_legacy", "eagle3_gqa_nested", "off", {}, {}),
    "legacy schema, overlay": ("kimi_k25_legacy", "eagle3_gqa_nested", "on", {}, RULE),
    "deepseek_v3, overlay": ("deepseek_v3", "eagle3_gqa_nested", "on", {}, RULE),
}


def prepare(folder: Path) -> dict[str, Path]:
    """The pair in head sizes that CUDA's kernels take."""
    return {name: widen(source, folder / name) for name, source in materialize(folder / "narrow").items()}


def summary(log: str) -> str:
    """The last line of an error that says what it was."""
    lines = [
        line for line in log.splitlines() if re.search(r"(Error|Exception|assert)", line) and "Traceback" not in line
    ]
    return lines[-1][-400:] if lines else log[-400:]


def measure(pair: dict[str, Path], name: str, requests: list[Any]) -> dict[str, Any]:
    """Run one case; an engine that fails is a result too."""
    target, drafter, overlay, env, arguments = CASES[name]
    started = time.monotonic()
    result: dict[str, Any] = {"case": name, "target": target, "drafter": drafter, "overlay": overlay, "env": env}
    try:
        run = run_engine(
            pair[target],
            [requests],
            drafter=drafter and pair[drafter],
            overlay=overlay,
            separate_core=True,
            env={"VLLM_USE_FLASHINFER_SAMPLER": "0", **env},
            dtype="bfloat16",
            max_num_seqs=64,
            gpu_memory_utilization=0.2,
            **arguments,
        )
    except EngineFailed as failed:
        result["error"] = summary(str(failed))
        result["log"] = str(failed)[-6000:]
    else:
        (batch,) = run.result["rounds"]
        counts = {key: value[0] for key, value in batch["counters"].items() if key != "num_accepted_tokens_per_pos"}
        result |= {"output_ids": batch["output_ids"], "counters": batch["counters"]}
        if counts.get("num_drafts"):
            result["acceptance_rate"] = counts["num_accepted_tokens"] / counts["num_draft_tokens"]
            result["acceptance_length"] = 1 + counts["num_accepted_tokens"] / counts["num_drafts"]
        result["lines"] = (
            run.log_lines("vllm-kimi-eagle3") + run.log_lines("uxiliary layers") + run.log_lines("Runner V2")
        )
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def main() -> int:
    """Run the cases and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the results go (JSON)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this time")
    options = parser.parse_args()

    import importlib.metadata

    import torch

    started = time.monotonic()
    held_out = json.loads((ROOT / "examples/tiny_kimi/heldout.json").read_text())
    requests = [(list(item["prompt"].encode()), 64, []) for item in held_out]
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name(),
        "vllm": importlib.metadata.version("vllm"),
        "torch": torch.__version__,
        "settings": "bf16, greedy, k = 3, 40 prompts in one batch, 64 tokens each",
        "command": "python bench/gpu/end_to_end.py --out RESULT.json",
        "results": [],
        "not_run": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        pair = prepare(Path(folder))
        plain: list[list[int]] | None = None
        for name in options.cases:
            if time.monotonic() - started > options.seconds:
                report["not_run"].append(name)
                continue
            result = measure(pair, name, requests)
            outputs = result.pop("output_ids", None)
            if "log" in result:
                (options.out.parent / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.log").write_text(result.pop("log"))
            if outputs is not None:
                plain = plain or outputs
                equal = sum(a == b for x, y in zip(plain, outputs, strict=True) for a, b in zip(x, y, strict=True))
                result["tokens_equal_to_first_case"] = equal / sum(map(len, outputs))
            report["results"].append(result)
            options.out.write_text(json.dumps(report, indent=1))
            rate = result.get("acceptance_rate")
            print(
                f"{name}: {result.get('error') or (f'{rate:.2%}' if rate else 'ok')} ({result['seconds']} s)",
                flush=True,
            )
    options.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
