# SPDX-License-Identifier: Apache-2.0
"""``bench`` on real servers of the tiny pair: its numbers are the engine's, and the verdict follows from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kimi_eagle3.regression.engine import fresh_cache
from vllm_kimi_eagle3.tiny_kimi.materialize import HERE

pytestmark = pytest.mark.engine


def test_baseline_and_drafter(pair: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    held_out = json.loads((HERE / "heldout.json").read_text())
    prompts.write_text(json.dumps([item["prompt"] for item in held_out[:8]]))
    command = [sys.executable, "-m", "vllm_kimi_eagle3.cli", "bench", "--json", "--html", str(tmp_path / "r.html")]
    command += ["--target", str(pair["kimi_k25"]), "--drafter", str(pair["eagle3_gqa_boundary"])]
    command += ["--prompts", str(prompts), "--tokens", "96", "--repeats", "1", "--ignore-eos"]
    command += ["--serve", "--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 4"]
    environment = {
        **os.environ,
        "VLLM_CACHE_ROOT": str(fresh_cache(tmp_path / "cache")),
        "VLLM_KIMI_EAGLE3_CACHE": str(tmp_path / "records"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.stdout, done.stderr[-3000:]
    data = json.loads(done.stdout)
    runs = {(run["name"], run["setting"]): run for run in data["runs"]}
    assert set(runs) == {(name, mode) for name in ("baseline", "drafter") for mode in ("greedy", "T=0.6")}
    greedy, sampled = runs["drafter", "greedy"], runs["drafter", "T=0.6"]
    assert greedy["acceptance_rate"] > 0.6 and greedy["per_position"][0] > 0.7 and greedy["drafts"] > 200
    assert data["same_text"] == [8, 8] and data["warnings"] == []
    assert sampled["acceptance_rate"] > 0.35, "C5: sampled drafts verified at undefined temperatures"
    assert all(row["tokens"] == 96 for run in data["runs"] for row in run["prompts"])
    # Whether speculation pays on two busy cores is not the point; what is said of it has to fit.
    assert data["verdict"] in ("healthy", "throughput wall", "not enough evidence")
    assert (data["verdict"] == "throughput wall") == (data["speedup"] < 0.97)
    assert "<svg" in (tmp_path / "r.html").read_text()
