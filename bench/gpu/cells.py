# SPDX-License-Identifier: Apache-2.0
"""What the drafter is given in each cell of runner, MLA backend, CUDA graph mode, dtype, KV dtype and scheduling.

    python bench/gpu/cells.py --out RESULT.json [--runners V2 V1] [--only TEXT] [--at-once 12] [--seconds 540]

Needs a CUDA vLLM, this package installed (its entry point must be found), and a GPU with 40 GB free. Each cell is an
engine of its own that serves the situations of tests/alignment and a batch of 64; every row, id, position and draft is
compared with the reference, and those of the first round once more with the boundaries one early and one late, which
must be wrong. The cells whose name begins with "cache" start one after another in one cache directory. A backend that
vLLM has for other GPUs only is to be refused by vLLM. Nothing is timed, so engines run side by side. Exit code 1 when a
cell is not as it should be.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from campaign import count, duration, header, need_gpus, pattern, result_file, write

from vllm_kimi_eagle3.regression.engine import EngineFailed, Request, run_engine, served_of
from vllm_kimi_eagle3.regression.runs import Runs, make_pair
from vllm_kimi_eagle3.regression.settings import (
    CHUNKED,
    CROWD,
    EARLY,
    EVERYTHING,
    LATE,
    MAX_MODEL_LEN,
    RIGHT,
    SAME_TWICE,
    TINY_CACHE,
    TO_THE_LIMIT,
    Setting,
    prompt,
)
from vllm_kimi_eagle3.verify.compare import Comparison, compare, times
from vllm_kimi_eagle3.verify.oracle import cache_dtype

RUNNERS = {"V1": "0", "V2": "1"}
BACKENDS = ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
ELSEWHERE = ("CUTLASS_MLA", "FLASHINFER_MLA")
"""Backends of which vLLM itself may say that this GPU is not theirs (they are Blackwell's); else they are judged."""
NOT_VALID = "is not valid for this configuration"
MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
MANY: list[Request] = [(prompt(i % 40, 12 + i), 10, [], i // 8) for i in range(64)]
"""A batch that grows to 64 requests and shrinks again."""
ROUNDS = (*EVERYTHING, CROWD, MANY)
LINES = re.compile(r"Using .*backend|Capturing CUDA graphs|Using V2 Model Runner")


@dataclass(frozen=True)
class Cell:
    """An engine of the table; cells of one ``chain`` share a cache directory and start in their order."""

    name: str
    runner: str
    setting: Setting
    overlay: str = "on"
    """"stock" stands between two runs with the overlay: what these leave in the cache must not reach it."""
    chain: str = ""


def cells(runners: list[str]) -> list[Cell]:
    """Every cell, the quick ones last."""
    found: list[Cell] = []

    def add(name: str, runner: str, options: dict[str, Any], **change: Any) -> None:
        more = {key: change.pop(key) for key in ("overlay", "chain") if key in change}
        env = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner], "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        options = {"max_num_seqs": 64, **options}
        setting = Setting("deepseek_v3", "eagle3_gqa_boundary", 3, ROUNDS, "bfloat16", options, env)
        found.append(Cell(f"{runner}, {name}", runner, replace(setting, **change), **more))

    def graphs(mode: str) -> dict[str, Any]:
        if mode == "NONE":
            return {}
        sizes = [4, 8, 16, 32, 64, 128, 256]
        return {
            "enforce_eager": False,
            "compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes},
        }

    full = graphs("FULL_AND_PIECEWISE")
    for runner in runners:
        for name, overlay in (("cold", "on"), ("warm", "on"), ("off", "stock"), ("on again", "on")):
            # The nested ids that stock reads one early (D7, V1) or not at all (D6, V2).
            options = {**full, "additional_config": {"kimi_eagle3": {"layer_rule": "output"}}}
            add(
                f"cache, {name}",
                runner,
                options if overlay == "on" else full,
                drafter="eagle3_gqa_nested",
                overlay=overlay,
                chain=runner,
            )
    for runner in runners:
        for backend in BACKENDS:
            forced = {"attention_config": {"backend": backend}}
            for mode in reversed(MODES):
                add(f"{backend}, {mode}", runner, {**forced, **graphs(mode)})
            add(f"{backend}, float16", runner, {**forced, **full}, dtype="float16")
            add(f"{backend}, MLA drafter", runner, {**forced, **full}, drafter="eagle3_mla_boundary")
            add(f"{backend}, scheduled synchronously", runner, {**forced, **full, "async_scheduling": False})
            if backend != "FLASH_ATTN_MLA":  # it has no fp8 kernel for Hopper
                add(f"{backend}, KV in fp8", runner, {**forced, **full, "kv_cache_dtype": "fp8"})
            block = {"block_size": 64} if backend == "FLASHMLA" else {}  # all that it takes
            rounds = (CROWD, SAME_TWICE, SAME_TWICE, TO_THE_LIMIT)
            chunked = {**forced, **CHUNKED, "max_num_seqs": 8, **block}
            add(f"{backend}, chunked prefill and prefix cache", runner, chunked, k=1, rounds=rounds)
            pool = {"num_gpu_blocks_override": 8, **block} if block else TINY_CACHE
            tiny = {**forced, **full, **pool, "max_num_seqs": 8}
            add(f"{backend}, tiny cache", runner, tiny, k=5, rounds=(CROWD, TO_THE_LIMIT))
        for backend in ELSEWHERE:
            add(f"{backend}, NONE", runner, {"attention_config": {"backend": backend}})
    return found


def median(comparison: Comparison) -> float:
    """Of all cells of rows and boundaries, the median relative error."""
    return statistics.median(e for s in comparison.situations.values() for row in s.cells.values() for e in row)


def measure(cell: Cell, runs: Runs, root: Path | None) -> dict[str, Any]:
    """Run one cell; an engine that fails is a result too."""
    s = cell.setting
    started = time.monotonic()
    result: dict[str, Any] = {"cell": cell.name, "overlay": cell.overlay, "ok": False}
    try:
        options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "dtype": s.dtype, "overlay": cell.overlay}
        pair, rounds = runs.pair, list(s.rounds)
        run = run_engine(
            pair[s.target], rounds, drafter=pair[s.drafter], k=s.k, env=s.env, cache=root, **options, **s.options
        )
    except subprocess.TimeoutExpired as late:
        result |= {"error": f"the engine did not end within {late.timeout:.0f} s"}
    except EngineFailed as failed:
        result |= {"error": failed.reason, "log": str(failed)[-8000:]}
        if any(backend in cell.name for backend in ELSEWHERE) and NOT_VALID in failed.reason:
            result |= {"ok": True, "refused_by_vllm": True}
    else:
        result["engine_seconds"] = round(time.monotonic() - started, 1)
        captured = run.result["captured"]
        result |= {"runner": run.result["runner"], "captured": captured, "block_size": run.result["block_size"]}
        states = run.result.get("states", {})
        result["applied"] = [fix for fix, state in states.items() if state == "APPLIED"]
        result["lines"] = sorted(
            {line.partition("] ")[2][:160] for line in run.log.splitlines() if LINES.search(line)} - {""}
        )
        counters = [r["counters"] for r in run.result["rounds"]]
        accepted, drafted = (sum(c[f"num_{w}_tokens"][0] for c in counters) for w in ("accepted", "draft"))
        result["acceptance_rate"] = accepted / drafted
        by_round = [served_of(r, s.requests(i)) for i, r in enumerate(run.result["rounds"])]
        cache = cache_dtype(s.options.get("kv_cache_dtype", "auto"), s.dtype)
        kind = s.drafter.split("_")[1]
        median_times, draft_times = times(cache is not None, latents=True)

        def against(boundaries: tuple[int, ...], rounds: int | None = None) -> Comparison:
            return compare(
                [one for served in by_round[:rounds] for one in served],
                runs.oracle(kind, boundaries, s.dtype, cache),
                boundaries,
                dtype=s.dtype,
                block_size=run.result["block_size"],
                max_model_len=MAX_MODEL_LEN,
                median_times=median_times,
                draft_times=draft_times,
            )

        if cell.overlay != "on":
            result |= {"ok": captured != list(RIGHT)}
        else:
            right, early, late = against(RIGHT), against(EARLY, 1), against(LATE, 1)
            result |= {
                "rows": right.rows,
                "situations": len(right.situations),
                "largest_error": right.max_relative_error,
                "flipped_rows": max(x.flipped for x in right.situations.values()),
                "of_bars": {n: (x.worst, x.worst_median) for n, x in right.situations.items()},
                "median_error": median(right),
                "median_error_one_early": median(early),
                "median_error_one_late": median(late),
                "problems": right.problems[:4],
                "not_right": {n: str(x.to_json())[:400] for n, x in right.situations.items() if not x.ok},
                "ok": right.ok and not early.inputs_ok and not late.inputs_ok and captured == list(RIGHT),
            }
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


_WORKER: list[tuple[Runs, float]] = []
"""A worker's pair with its references, and the time (monotonic) from which on it starts no cell."""


def begin(pair: dict[str, Path], until: float) -> None:
    """Make this process a worker."""
    torch.set_num_threads(1)
    _WORKER.append((Runs(pair, {}), until))


def play(group: list[Cell], root: Path | None) -> list[dict[str, Any]]:
    """Run cells one after another, as long as there is time."""
    (runs, until) = _WORKER[0]
    return [measure(cell, runs, root) for cell in group if time.monotonic() < until]


def main() -> int:
    """Run the cells and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_file, required=True, help="where the results go (JSON)")
    parser.add_argument("--runners", nargs="+", default=["V2", "V1"], choices=list(RUNNERS))
    parser.add_argument("--only", type=pattern, default="", metavar="REGEX", help="only the cells whose name it finds")
    parser.add_argument("--at-once", type=count, default=12, help="engines that run at the same time")
    parser.add_argument("--seconds", type=duration, default=1e9, help="start no further cell after this time")
    options = parser.parse_args()
    started = time.monotonic()
    chosen = [cell for cell in cells(options.runners) if re.search(options.only, cell.name)]
    if not chosen:
        parser.error(
            f"--only {options.only}: no cell has such a name; without --only all {len(cells(options.runners))} run"
        )
    need_gpus(parser, 1)
    groups: dict[str, list[Cell]] = {}
    for cell in chosen:
        groups.setdefault(cell.chain or cell.name, []).append(cell)
    report: dict[str, Any] = {
        "not_run": [cell.name for cell in chosen],
        **header("cells.py"),
    }
    results: dict[str, dict[str, Any]] = {}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair = make_pair(folder, wide=True)
        # Comparing a cell takes a core as long as its engine does, so each worker is a process of its own.
        pool = ProcessPoolExecutor(
            options.at_once, multiprocessing.get_context("spawn"), begin, (pair, started + options.seconds)
        )
        running = [
            pool.submit(play, group, folder / f"cache-{group[0].chain}" if group[0].chain else None)
            for group in groups.values()
        ]
        for done in as_completed(running):
            for result in done.result():
                results[result["cell"]] = result
                if "log" in result:
                    with options.out.with_suffix(".log").open("a") as log:
                        log.write(f"==== {result['cell']}\n{result.pop('log')}\n")
                said = result.get("error") or f"{result.get('median_error', float('nan')):.2g}"
                print(
                    f"{'ok ' if result['ok'] else 'NOT'} {result['cell']}: {said[:200]} ({result['seconds']} s)",
                    flush=True,
                )
            report["results"] = [results[cell.name] for cell in chosen if cell.name in results]
            report["not_run"] = [cell.name for cell in chosen if cell.name not in results]
            write(options.out, report)
    return int(bool(report["not_run"]) or not all(r["ok"] for r in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
