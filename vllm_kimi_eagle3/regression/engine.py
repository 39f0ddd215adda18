# SPDX-License-Identifier: Apache-2.0
"""Run the real engine in a process of its own, on a job, and read what came out.

Each run has its own ``VLLM_CACHE_ROOT``, so that no compiled graph reaches another test. What vLLM notes of its model
classes, which costs a process of many seconds each, may be shared: see ``fresh_cache``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_kimi_eagle3.reference import SpeculationTrace, Vision
from vllm_kimi_eagle3.regression.pictures import Picture, media
from vllm_kimi_eagle3.verify.capture import Call
from vllm_kimi_eagle3.verify.drive import Served

PROBE = "vllm_kimi_eagle3.regression.engine_probe"
TARGET_PROBE = "vllm_kimi_eagle3.regression.target_probe"
_WARNING = re.compile(r"\b(WARNING|INFO)\b|\[W\d")
_ERROR = re.compile(r"^(\([^)]*\) )?(\w+ [\d:. -]+\[\S+\] )?[\w.]*(Error|Exception)\b")
Request = (
    tuple[Sequence[int], int, Sequence[int]]
    | tuple[Sequence[int], int, Sequence[int], int]
    | tuple[Sequence[int], int, Sequence[int], int, Sequence[Picture]]
)
"""Prompt ids, max_tokens, stop token ids, the step before which it joins, and the prompt's pictures."""
Round = Sequence[Request] | dict[str, Any]
"""A batch; or one that something spoils, {"requests": …, "tamper": …}, see engine_probe.py."""


RECORDS = "KIMI_EAGLE3_MODEL_RECORDS"
"""Names a folder in which fresh caches share vLLM's records of its model classes; unset, none is shared."""


def fresh_cache(root: Path, overlay: str = "on") -> Path:
    """A ``VLLM_CACHE_ROOT`` with nothing compiled in it.

    The shared records hold flags of classes, by a hash of their source. They are apart by what the overlay is told and
    by what is on the path, so that neither a fix nor a patched vLLM reaches another run.
    """
    root.mkdir(parents=True, exist_ok=True)
    shared = os.environ.get(RECORDS)
    if shared and not (root / "modelinfos").exists():
        path = hashlib.sha256(os.environ.get("PYTHONPATH", "").encode()).hexdigest()[:12]
        records = Path(shared).resolve() / f"{overlay}-{path}"
        records.mkdir(parents=True, exist_ok=True)
        (root / "modelinfos").symlink_to(records, target_is_directory=True)
    return root


class EngineFailed(AssertionError):
    """The engine ended with an error; the message is its output."""

    @property
    def reason(self) -> str:
        """The line that says what was wrong: the last one that looks like it."""
        lines = [line.strip() for line in str(self).splitlines() if not _WARNING.search(line)]
        errors = [line for line in lines if _ERROR.search(line)]
        # The wrapping errors of a server's processes come last and say nothing.
        own = [line for line in errors if "Engine core init" not in line and "See stack trace" not in line]
        return (own or errors or lines or [""])[-1][:400]


@dataclass
class EngineRun:
    """What an engine did: ``result`` as the probe wrote it, ``log`` as vLLM did."""

    result: dict[str, Any]
    log: str

    def log_lines(self, word: str) -> list[str]:
        """The log's lines that have a word in them."""
        return [line for line in self.log.splitlines() if word in line]


def start_interpreter(command: list[str], env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh interpreter to its end."""
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=600)


start: Callable[[list[str], dict[str, str], Path], subprocess.CompletedProcess[str]] = start_interpreter
"""How ``run_probe`` starts its process. The project's own tests fork instead, which saves them half of an import."""


def run_engine(
    target: Path,
    rounds: Sequence[Round],
    *,
    drafter: Path | None = None,
    k: int = 3,
    overlay: str = "on",
    separate_core: bool = False,
    cache: Path | None = None,
    env: dict[str, str] | None = None,
    speculative: dict[str, Any] | None = None,
    toys: dict[str, Any] | None = None,
    proxy: str | None = None,
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
        toys: arguments of ``tampers.captured_subsets``, to run it at the end.
        proxy: what the overlay is to replace by a wrapt proxy; see ``tampers.replace_by_proxies``.
        engine: further arguments of ``LLM``.

    Raises:
        EngineFailed: it ended with an error.
    """
    arguments = {**_arguments(target, drafter, k, speculative), **engine}
    job = {"rounds": rounds, "toys": toys, "proxy": proxy, "engine": arguments}
    return run_probe(PROBE, job, overlay=overlay, separate_core=separate_core, cache=cache, env=env)


def run_probe(
    module: str,
    job: dict[str, Any],
    *,
    overlay: str = "on",
    separate_core: bool = False,
    cache: Path | None = None,
    env: dict[str, str] | None = None,
) -> EngineRun:
    """Run a module on a job, in a process of its own; the arguments are those of ``run_engine``.

    Raises:
        EngineFailed: it ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        command, environment = _write(
            where, module, job, overlay=overlay, separate_core=separate_core, cache=cache, env=env
        )
        # In its folder, so that no package of the current one stands before the installed vLLM.
        done = start(command, environment, where)
        log = done.stdout + done.stderr
        if done.returncode != 0:
            raise EngineFailed(log)
        return EngineRun(torch.load(where / "result.pt", weights_only=True), log)


@contextmanager
def timed_engine(
    target: Path, requests: Sequence[Request], *, drafter: Path, k: int = 3, overlay: str = "on", **engine: Any
) -> Generator[Callable[[], float]]:
    """An engine that waits; each call of what this yields serves the requests once.

    Yields:
        A function that returns the processor seconds a step of the engine took.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = {**_arguments(target, drafter, k, None), **engine}
        job = {"rounds": [], "timed": requests, "engine": arguments}
        command, environment = _write(Path(folder), PROBE, job, overlay=overlay)
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def serve() -> float:
            stdin.write("go\n")
            stdin.flush()
            for line in stdout:
                if line.startswith("TIMED "):
                    return float(line.split()[1])
            raise EngineFailed(log.read_text())

        try:
            yield serve
        finally:
            stdin.close()
            stdout.read()
            process.wait(timeout=60)


def _arguments(target: Path, drafter: Path | None, k: int, speculative: dict[str, Any] | None) -> dict[str, Any]:
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
    if torch.cuda.is_available():
        # A cache of a given size, so that engines that run at once don't disturb each other's memory profiling.
        arguments |= {"gpu_memory_utilization": 0.04, "kv_cache_memory_bytes": 1 << 30}
    if drafter is not None:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": k,
            **(speculative or {}),
        }
    return arguments


def _write(
    folder: Path,
    module: str,
    job: dict[str, Any],
    *,
    overlay: str,
    separate_core: bool = False,
    cache: Path | None = None,
    env: dict[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Write the job; returns the probe's command line and environment."""
    (folder / "job.json").write_text(json.dumps(job))
    path = os.pathsep.join(str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)
    return [sys.executable, "-m", module, "job.json", "result.pt"], {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(separate_core)),
        "VLLM_CACHE_ROOT": str(cache or fresh_cache(folder / "cache", overlay)),
        "VLLM_KIMI_EAGLE3": overlay,
        **(env or {}),
    }


def counters(*traces: SpeculationTrace) -> dict[str, list[int]]:
    """Several requests' counters, added up and named as vLLM's metrics are."""
    return {
        "num_drafts": [sum(t.drafts for t in traces)],
        "num_draft_tokens": [sum(t.drafted for t in traces)],
        "num_accepted_tokens": [sum(t.accepted for t in traces)],
        "num_accepted_tokens_per_pos": [sum(c) for c in zip(*(t.accepted_per_position for t in traces), strict=True)],
    }


def served_of(
    round_result: dict[str, Any],
    requests: Sequence[Request],
    vision: Vision | None = None,
    rounded: Vision | None = None,
) -> list[Served]:
    """A round's requests with what came of them, as the comparison takes them.

    Args:
        round_result: as the probe wrote it.
        requests: what was asked.
        vision: embeds their pictures.
        rounded: the same in the engine's dtype.
    """
    # Only some of a round's requests may be asked for: its first ones.
    served = [
        Served(f"r{i}", round_result["prompt_ids"][i], round_result["output_ids"][i]) for i in range(len(requests))
    ]
    for one, request in zip(served, requests, strict=True):
        if len(request) == 5 and request[4] and vision is not None:
            one.media = media(vision, request[0], one.prompt_ids, request[4])
            if rounded is not None:
                one.rounded_media = media(rounded, request[0], one.prompt_ids, request[4])
    for call in round_result["calls"]:
        served[call["of"]].calls.append(Call(**{n: v for n, v in call.items() if n != "of"}))
    return served
