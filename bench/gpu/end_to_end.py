# SPDX-License-Identifier: Apache-2.0
"""The tiny pair, end to end, on a GPU: what each runner captures and accepts, stock and with the overlay.

Needs a CUDA vLLM, this package installed (its entry point must be found), and one GPU with 2 GB free.

    python bench/gpu/end_to_end.py --out RESULT.json [--cases NAME ...] [--at-once 6] [--seconds 540]

Each engine is a process of its own; several run at once, since nothing is timed. A case is skipped, and said so in the
result, when the time is up. Greedy, k = 3, the 40 held-out prompts in one batch, 64 tokens each; bf16, but for the
cases of TRITON_MLA: those ask for equal text, and float16 has fewer near-ties.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from campaign import count, duration, header, need_gpus, result_file, write
from safetensors.torch import load_file, save_file

from vllm_kimi_eagle3.regression.engine import EngineFailed, run_engine
from vllm_kimi_eagle3.tiny_kimi.materialize import HERE, materialize
from vllm_kimi_eagle3.tiny_kimi.widen import widen

RULE = {"additional_config": {"kimi_eagle3": {"layer_rule": "output"}}}
FORCED = {"attention_config": {"backend": "FLASH_ATTN_MLA"}}
V1, V2 = ({"VLLM_USE_V2_MODEL_RUNNER": which} for which in "01")
TRITON = {
    "attention_config": {"backend": "TRITON_MLA"},
    "dtype": "float16",
    "enforce_eager": False,
    # Without torch.compile: what is asked is whether verify steps in whole graphs write the same text.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}

# name: (target, drafter, overlay, variables, engine arguments)
CASES: dict[str, tuple[str, str | None, str, dict[str, str], dict[str, Any]]] = {
    "no speculation": ("deepseek_v3", None, "on", {}, {}),
    "default runner, stock": ("kimi_k25", "eagle3_gqa_nested", "off", {}, {}),
    "default runner, overlay": ("kimi_k25", "eagle3_gqa_nested", "on", {}, RULE),
    "V1, stock": ("deepseek_v3", "eagle3_gqa_nested", "off", V1, {}),
    "V1, overlay": ("kimi_k25", "eagle3_gqa_nested", "on", V1, RULE),
    "V1, stock, new K2.5 schema": ("kimi_k25", "eagle3_gqa_nested", "off", V1, {}),
    "MLA drafter, overlay": ("kimi_k25", "eagle3_mla_nested", "on", {}, RULE),
    "MLA drafter of type deepseek_v3, stock": ("deepseek_v3", "eagle3_mla_nested_v3", "off", {}, {}),
    "MLA drafter of type deepseek_v3, overlay": ("deepseek_v3", "eagle3_mla_nested_v3", "on", {}, RULE),
    "compiled with graphs, overlay": ("kimi_k25", "eagle3_gqa_nested", "on", {}, {**RULE, "enforce_eager": False}),
    "legacy schema, compiled with graphs": (
        "kimi_k25_legacy",
        "eagle3_gqa_nested",
        "on",
        {},
        {**RULE, "enforce_eager": False},
    ),
    "forced MLA backend, stock": ("deepseek_v3", "eagle3_gqa_boundary", "off", {}, FORCED),
    "forced MLA backend, overlay": ("deepseek_v3", "eagle3_gqa_boundary", "on", {}, FORCED),
    "legacy schema, stock": ("kimi_k25_legacy", "eagle3_gqa_nested", "off", {}, {}),
    "legacy schema, overlay": ("kimi_k25_legacy", "eagle3_gqa_nested", "on", {}, RULE),
    "deepseek_v3, overlay": ("deepseek_v3", "eagle3_gqa_nested", "on", {}, RULE),
    # Below 0.31 this drafter fails on V2 (D13); where V2 is not the default it is asked for.
    "no auxiliary states, V2, stock": ("deepseek_v3", "eagle3_gqa_without_states", "off", V2, {}),
    "no auxiliary states, V2, overlay": ("deepseek_v3", "eagle3_gqa_without_states", "on", V2, {}),
    "V2, stock": ("deepseek_v3", "eagle3_gqa_nested", "off", V2, {}),
    "V2, overlay": ("kimi_k25_legacy", "eagle3_gqa_nested", "on", V2, RULE),
    "TRITON_MLA in graphs, no speculation": ("deepseek_v3", None, "on", {}, TRITON),
    "TRITON_MLA in graphs, overlay": ("deepseek_v3", "eagle3_gqa_boundary", "on", {}, TRITON),
    "TRITON_MLA in graphs, MLA drafter": ("deepseek_v3", "eagle3_mla_boundary", "on", {}, TRITON),
}


def prepare(folder: Path) -> dict[str, Path]:
    """The pair in head sizes that CUDA's kernels take; and a drafter that reads the last hidden state alone."""
    pair = {name: widen(source, folder / name) for name, source in materialize(folder / "narrow").items()}
    without = folder / "eagle3_gqa_without_states"
    shutil.copytree(pair["eagle3_gqa_nested"], without)
    config = json.loads((without / "config.json").read_text())
    config["eagle_config"] = {"use_aux_hidden_state": False}
    (without / "config.json").write_text(json.dumps(config))
    tensors = load_file(without / "model.safetensors")
    (without / "model.safetensors").unlink()
    save_file({n: t for n, t in tensors.items() if not n.startswith("fc.")}, without / "model.safetensors")
    return pair | {without.name: without}


def measure(pair: dict[str, Path], name: str, requests: list[Any]) -> dict[str, Any]:
    """Run one case; an engine that fails is a result too."""
    target, drafter, overlay, env, arguments = CASES[name]
    options: dict[str, Any] = {"dtype": "bfloat16", **arguments}
    started = time.monotonic()
    result: dict[str, Any] = {"case": name, "target": target, "drafter": drafter, "overlay": overlay, "env": env}
    try:
        run = run_engine(
            pair[target],
            [requests],
            drafter=None if drafter is None else pair[drafter],
            overlay=overlay,
            separate_core=True,
            env={"VLLM_USE_FLASHINFER_SAMPLER": "0", **env},
            max_num_seqs=64,
            # Kimi's processor wants a tokenizer, even for a server that serves text only.
            skip_tokenizer_init="kimi" not in target,
            **options,
        )
    except EngineFailed as failed:
        result["error"] = failed.reason
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
    parser.add_argument("--out", type=result_file, required=True, help="where the results go (JSON)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--at-once", type=count, default=6, help="engines that run at the same time")
    parser.add_argument("--seconds", type=duration, default=1e9, help="start no further case after this time")
    options = parser.parse_args()
    need_gpus(parser, 1)

    started = time.monotonic()
    held_out = json.loads((HERE / "heldout.json").read_text())
    requests = [(list(item["prompt"].encode()), 64, []) for item in held_out]
    report: dict[str, Any] = {
        **header("end_to_end.py"),
        "settings": "bf16 (TRITON_MLA: float16), greedy, k = 3, 40 prompts in one batch, 64 tokens each",
    }
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        pair = prepare(Path(folder))

        def case(name: str) -> dict[str, Any] | None:
            late = time.monotonic() - started > options.seconds
            return None if late else measure(pair, name, requests)

        running = {pool.submit(case, name): name for name in options.cases}
        for done in as_completed(running):
            name, result = running[done], done.result()
            if result is None:
                continue
            results[name] = result
            if "log" in result:
                with options.out.with_suffix(".log").open("a") as log:
                    log.write(f"==== {name}\n{result.pop('log')}\n")
            rate = result.get("acceptance_rate")
            line = result.get("error") or (f"{rate:.2%}" if rate is not None else "ok")
            print(f"{name}: {line} ({result['seconds']} s)", flush=True)
            ordered = [results[n] for n in options.cases if n in results]
            report["results"] = [{k: v for k, v in r.items() if k != "output_ids"} for r in compared(ordered)]
            report["not_run"] = [n for n in options.cases if n not in results]
            write(options.out, report)
    return 0


def compared(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Note how many tokens of each case are those of the first that has any, TRITON_MLA's apart."""
    written = [r for r in results if "output_ids" in r]
    for result in written:
        first = next(r for r in written if ("TRITON" in r["case"]) == ("TRITON" in result["case"]))
        pairs = zip(first["output_ids"], result["output_ids"], strict=True)
        same = [a == b for x, y in pairs for a, b in zip(x, y, strict=True)]
        result["tokens_equal_to_first_case"] = sum(same) / len(same)
    return results


if __name__ == "__main__":
    raise SystemExit(main())
