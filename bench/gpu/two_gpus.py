# SPDX-License-Identifier: Apache-2.0
"""Tensor, expert, data and pipeline parallel on two GPUs: every rank is given what one GPU gives, or it is refused.

    python bench/gpu/two_gpus.py --out RESULT.json [--at-once 1] [--seconds 540]

Needs a CUDA vLLM, this package installed (its entry point must be found), and two GPUs. Most cases are the command
``verify``: every row of rank 0, and the norm of every row of rank 1, against the reference. Data parallel runs behind
``vllm serve``: acceptance and greedy text of both engines against one's, also behind prompts of one token. Ray's
executor is a case where Ray is installed, and tensor, data and experts parallel together where there are four GPUs.
Nothing is timed, but ranks that wait for each other keep their GPUs busy, so cases run one by one. Exit code 1 when a
case is not as it should be or was not run for want of time; cases that can't run here are listed as not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from campaign import count, duration, header, need_gpus, pattern, result_file, write

from vllm_kimi_eagle3.bench.client import Answer, Client, ServerError
from vllm_kimi_eagle3.bench.serve import serve
from vllm_kimi_eagle3.regression.engine import fresh_cache
from vllm_kimi_eagle3.regression.runs import make_pair
from vllm_kimi_eagle3.regression.settings import RIGHT
from vllm_kimi_eagle3.tiny_kimi import held_out_prompts

RUNNERS = {"V1": "0", "V2": "1"}
RULE = json.dumps({"kimi_eagle3": {"layer_rule": "output"}})
COMMON = ["--dtype", "bfloat16", "--max-model-len", "256", "--max-num-seqs", "8", "--additional-config", RULE]
SMALL = ["--gpu-memory-utilization", "0.06", "--kv-cache-memory-bytes", str(1 << 30)]
TP, EP = ["--tensor-parallel-size", "2"], ["--enable-expert-parallel"]
EAGER = ["--enforce-eager"]
GQA, MLA = "eagle3_gqa_nested", "eagle3_mla_nested"

# name: (runner, target, drafter, further arguments)
VERIFIED: dict[str, tuple[str, str, str, list[str]]] = {
    f"{runner}, {name}": (runner, target, drafter, arguments)
    for runner in RUNNERS
    for name, target, drafter, arguments in (
        ("one GPU", "kimi_k25", GQA, EAGER),
        ("TP 2", "kimi_k25", GQA, [*TP, *EAGER]),
        ("TP 2, compiled with graphs", "deepseek_v3", GQA, TP),
        ("TP 2, MLA drafter", "deepseek_v3", MLA, [*TP, *EAGER]),
        ("TP 2, drafter on one rank", "deepseek_v3", GQA, [*TP, *EAGER, "draft"]),
        ("TP 2, experts parallel", "kimi_k25", GQA, [*TP, *EP, *EAGER]),
        ("TP 2, sequence parallel", "deepseek_v3", GQA, [*TP, *EP, *EAGER]),
        # One token in a step is as many rows as a rank's shard of them (D26).
        ("TP 2, sequence parallel, a prompt of one token", "deepseek_v3", GQA, [*TP, *EP, *EAGER]),
        ("TP 2, sequence parallel, a prompt of one token, compiled", "deepseek_v3", GQA, [*TP, *EP]),
        ("TP 2, Ray", "deepseek_v3", GQA, [*TP, *EAGER, "--distributed-executor-backend", "ray"]),
        ("PP 2", "deepseek_v3", GQA, ["--pipeline-parallel-size", "2", *EAGER]),
    )
}
SHARDED = Path(__file__).parents[2] / "tests/support/sharded"
"""In PYTHONPATH it makes vLLM shard the states between layers without data parallel, which would take four GPUs."""
ONE_TOKEN = "abcdefgh"
"""Prompts whose step is as many rows as a rank's shard of it."""
TEXTS = {"text": "tokens_equal_to_one", "text_behind_one_token": "tokens_equal_behind_one_token"}
"""What servers have written, and under which name its share of tokens that are one engine's is kept."""
SECONDS = 400
"""How long a case may take."""
RAY = importlib.util.find_spec("ray") is not None
SERVED: dict[str, tuple[str, list[str]]] = {
    f"{runner}, {name}": (runner, arguments)
    for runner in RUNNERS
    for name, arguments in (
        ("served by one", []),
        ("DP 2", ["--data-parallel-size", "2"]),
        ("DP 2, experts parallel", ["--data-parallel-size", "2", *EP]),
        # Here vLLM shards the states between layers by itself.
        ("four GPUs, TP 2 and DP 2, experts parallel", [*TP, "--data-parallel-size", "2", *EP]),
    )
}


def nccl() -> dict[str, str]:
    """vLLM asks for NCCL by its bare name, and goes without where torch has it in a package of its own."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    places = (spec and spec.submodule_search_locations) or ()
    found = [str(path) for place in places for path in Path(place).glob("lib/libnccl.so.2")]
    return {"VLLM_NCCL_SO_PATH": found[0]} if found and "VLLM_NCCL_SO_PATH" not in os.environ else {}


def environment(runner: str, cache: Path) -> dict[str, str]:
    """What an engine of the campaign runs with."""
    return {
        **nccl(),
        "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner],
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CACHE_ROOT": str(fresh_cache(cache)),
        "VLLM_KIMI_EAGLE3": "on",
        # All-reduces by multicast are not what this is about, and some hosts must not be asked for them.
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def ended(command: list[str], env: dict[str, str], cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, whose ranks end with it.

    Raises:
        TimeoutExpired: it did not end.
    """
    process = subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        # A rank that waits for one that is gone would keep its GPU busy for the cases to come.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, out, err


def verified(name: str, pair: dict[str, Path], folder: Path) -> dict[str, Any]:
    """One case of ``verify``."""
    runner, target, drafter, arguments = VERIFIED[name]
    command = [sys.executable, "-m", "vllm_kimi_eagle3.cli", "verify", "--json", "--reference", "hf"]
    prompts = folder / ("one token" if "one token" in name else "prompts")
    command += ["--target", str(pair[target]), "--drafter", str(pair[drafter]), "--prompts", str(prompts)]
    if "draft" in arguments:
        drafted = {"method": "eagle3", "model": str(pair[drafter]), "num_speculative_tokens": 3}
        arguments = [a for a in arguments if a != "draft"]
        arguments += ["--speculative-config", json.dumps(drafted | {"draft_tensor_parallel_size": 1})]
    env = {**os.environ, **environment(runner, folder / f"cache {name}")}
    if sharded := "sequence parallel" in name:
        env["PYTHONPATH"] = os.pathsep.join([str(SHARDED), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command += [*COMMON, *SMALL, *arguments]
    code, out, err = ended(command, env, folder)
    result: dict[str, Any] = {"exit_code": code, "log": err[-6000:]}
    if out.strip():
        found = json.loads(out)
        keys = ("ok", "rows", "max_relative_error", "captured", "ranks", "runner", "problems")
        result |= {key: found.get(key) for key in keys}
        result["situations"] = len(found["situations"])
    else:
        result["said"] = (err.strip().splitlines() or [""])[-1][-600:]
    if sharded:
        result["sharded"] = "a layer leaves a shard" in err
        result["ok"] = result.get("ok", False) and result["sharded"]
    refused = "PP 2" in name
    result["ok"] = code == 2 and "pipeline" in result.get("said", "") if refused else result.get("ok", False)
    return result


def served(name: str, pair: dict[str, Path], folder: Path) -> dict[str, Any]:
    """One server: its acceptance over the held-out prompts, and what it said."""
    runner, arguments = SERVED[name]
    drafter = {"method": "eagle3", "model": str(pair[GQA]), "num_speculative_tokens": 3}
    arguments = [*COMMON, *SMALL, *EAGER, "--speculative-config", json.dumps(drafter), *arguments]
    log = folder / f"log {name}"
    result: dict[str, Any] = {}
    try:
        with serve(
            str(pair["deepseek_v3"]), arguments, log, environment=environment(runner, folder / f"cache {name}")
        ) as url:
            client = Client(url, timeout=120)
            prompts = [bytes(p).decode() for p in held_out_prompts()] + list(ONE_TOKEN)

            def ask(text: str) -> Answer:
                return client.complete(text[-120:], 64)

            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(ask, prompts))
            counters = client.counters()
            result |= {"acceptance_rate": counters.accepted / max(1, counters.drafted), "drafted": counters.drafted}
            result["text"] = [a.token_ids for a in answers[: -len(ONE_TOKEN)]]
            result["text_behind_one_token"] = [a.token_ids for a in answers[-len(ONE_TOKEN) :]]
    except ServerError as error:
        result["error"] = str(error)[-600:]
    lines = log.read_text(errors="replace").splitlines()
    wanted = str(RIGHT)
    said = {line.partition(")")[0].lstrip("(") for line in lines if f"boundaries {wanted}" in line}
    # What a worker ended with stands before what the processes around it say of it.
    reason = [line for line in lines if "Error" in line][:20]
    result |= {"boundaries_said_by": sorted(said), "log": "\n".join([*reason, "..."]) + "\n".join(lines)[-6000:]}
    result["ok"] = "error" not in result and bool(said) and result["drafted"] > 0
    return result


def main() -> int:
    """Run the cases and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_file, required=True, help="where the results go (JSON)")
    parser.add_argument(
        "--at-once",
        type=count,
        default=1,
        help="cases at the same time; ranks that wait for each other keep a GPU busy, so more is slower",
    )
    parser.add_argument("--seconds", type=duration, default=1e9, help="start no further case after this time")
    parser.add_argument("--only", type=pattern, default="", metavar="REGEX", help="only the cases whose name it finds")
    options = parser.parse_args()
    names = [name for name in (*SERVED, *VERIFIED) if re.search(options.only, name)]
    if not names:
        parser.error(f"--only {options.only}: no case has such a name; without --only all run")
    need_gpus(parser, 2)
    here = [n for n in names if (RAY or "Ray" not in n) and (torch.cuda.device_count() >= 4 or "four GPUs" not in n)]
    if not here:
        parser.error(f"{', '.join(names)} can't run here: Ray is not installed, or there are fewer than four GPUs")
    started = time.monotonic()
    report: dict[str, Any] = {
        **header("two_gpus.py"),
        "ray": importlib.metadata.version("ray") if RAY else "not installed",
    }
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.at_once) as pool:
        folder = Path(name)
        pair = make_pair(folder, wide=True)
        (folder / "prompts").write_text(json.dumps([bytes(p).decode() for p in held_out_prompts()[::4]]))
        (folder / "one token").write_text(json.dumps([[held_out_prompts()[0][0]]]))

        def case(name: str) -> dict[str, Any] | None:
            if time.monotonic() - started > options.seconds:
                return None
            began = time.monotonic()
            try:
                result = (served if name in SERVED else verified)(name, pair, folder)
            except subprocess.TimeoutExpired:
                result = {"ok": False, "error": f"did not end within {SECONDS} s"}
            return {"case": name, **result, "seconds": round(time.monotonic() - began, 1)}

        running = {pool.submit(case, name): name for name in here}
        for done in as_completed(running):
            result = done.result()
            if result is None:
                continue
            results[result["case"]] = result
            log = result.pop("log", "")
            if not result["ok"]:
                with options.out.with_suffix(".log").open("a") as file:
                    file.write(f"==== {result['case']}\n{log}\n")
            short = {k: v for k, v in result.items() if k not in ("case", *TEXTS, "ok")}
            print(f"{'ok ' if result['ok'] else 'NOT'} {result['case']}: {str(short)[:400]}", flush=True)
            compared(results)
            ordered = [results[n] for n in names if n in results]
            report["results"] = [{k: v for k, v in r.items() if k not in TEXTS} for r in ordered]
            report["not_run"] = [n for n in names if n not in results]
            write(options.out, report)
    return int(any(n not in results for n in here) or not all(r["ok"] for r in results.values()))


def compared(results: dict[str, dict[str, Any]]) -> None:
    """Hold each server to the one with one engine: acceptance within two points, and most of the greedy text.

    In bf16 another batch takes another turn at a near-tie; a wrong model's text is another one from the start.
    """
    for name, result in results.items():
        one = results.get(f"{name[:2]}, served by one", {})
        if "text" not in result or "text" not in one:
            continue
        for key, share in TEXTS.items():
            both = zip(one[key], result[key], strict=True)
            pairs = [(a, b) for x, y in both for a, b in zip(x, y, strict=False)]
            result[share] = sum(a == b for a, b in pairs) / len(pairs)
        away = abs(result["acceptance_rate"] - one["acceptance_rate"])
        engines = 4 if "four GPUs" in name else 2 if "DP 2" in name else 1
        # Each rank loads its model in a process of its own: its engine's, or a worker's.
        said = len([s for s in result["boundaries_said_by"] if re.match("EngineCore|VllmWorker", s)])
        alike = away < 0.02 and all(result[share] > 0.5 for share in TEXTS.values())
        result["ok"] = alike and said == engines and result["drafted"] > 0


if __name__ == "__main__":
    raise SystemExit(main())
