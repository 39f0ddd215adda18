# SPDX-License-Identifier: Apache-2.0
"""Run the real engine in a process of its own, on a job, and read what came out.

Each run has its own ``VLLM_CACHE_ROOT``, so that no compiled graph and no model record reaches another test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_kimi_eagle3.reference import SpeculationTrace

PROBE = Path(__file__).with_name("engine_probe.py")
Request = tuple[Sequence[int], int, Sequence[int]]
"""Prompt ids, max_tokens, stop token ids."""


class EngineFailed(AssertionError):
    """The engine ended with an error; the message is its output."""


@dataclass
class EngineRun:
    """What an engine did: ``result`` as engine_probe.py wrote it, ``log`` as vLLM did."""

    result: dict[str, Any]
    log: str

    def log_lines(self, word: str) -> list[str]:
        return [line for line in self.log.splitlines() if word in line]


def run_engine(
    target: Path,
    rounds: Sequence[Sequence[Request]],
    *,
    drafter: Path | None = None,
    k: int = 3,
    overlay: str = "on",
    separate_core: bool = False,
    cache: Path | None = None,
    env: dict[str, str] | None = None,
    speculative: dict[str, Any] | None = None,
    **engine: Any,
) -> EngineRun:
    """Start an engine, run the rounds one after another, and return what it produced.

    Args:
        target: the target's folder.
        rounds: each a batch of requests.
        drafter: the drafter's folder; None for no speculation.
        k: num_speculative_tokens.
        overlay: ``VLLM_KIMI_EAGLE3``.
        separate_core: whether the engine core is a spawned process, as a server has it.
        cache: ``VLLM_CACHE_ROOT``; a fresh one by default.
        env: further variables.
        speculative: further keys of the speculative configuration.
        engine: further arguments of ``LLM``.

    Raises:
        EngineFailed: it ended with an error.
    """
    arguments: dict[str, Any] = {
        "model": str(target),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        "limit_mm_per_prompt": {"image": 0, "video": 0, "vision_chunk": 0},
    }
    if drafter is not None:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": k,
            **(speculative or {}),
        }
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "result.pt"
        job.write_text(json.dumps({"engine": {**arguments, **engine}, "rounds": rounds}))
        done = subprocess.run(
            [sys.executable, str(PROBE), str(job), str(out)],
            env={
                **os.environ,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(separate_core)),
                "VLLM_CACHE_ROOT": str(cache or Path(folder) / "cache"),
                "VLLM_KIMI_EAGLE3": overlay,
                **(env or {}),
            },
            capture_output=True,
            text=True,
            timeout=600,
        )
        log = done.stdout + done.stderr
        if done.returncode != 0:
            raise EngineFailed(log)
        return EngineRun(torch.load(out, weights_only=True), log)


def counters(*traces: SpeculationTrace) -> dict[str, list[int]]:
    """Several requests' counters, added up and named as vLLM's metrics are."""
    return {
        "num_drafts": [sum(t.drafts for t in traces)],
        "num_draft_tokens": [sum(t.drafted for t in traces)],
        "num_accepted_tokens": [sum(t.accepted for t in traces)],
        "num_accepted_tokens_per_pos": [sum(c) for c in zip(*(t.accepted_per_position for t in traces), strict=True)],
    }
