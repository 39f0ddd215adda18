# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: vLLM on a job file, and what its drafter was given and proposed, to a result file.

    python -m vllm_kimi_eagle3.regression.engine_probe JOB.json RESULT.pt

The job: ``engine`` (arguments of LLM), ``rounds``, ``toys`` (see ``tampers.captured_subsets``), ``proxy`` (a target of
the overlay's to replace by a wrapt proxy) and ``timed`` (a list of requests to serve once for each line of stdin). A
round is a list of requests [prompt_ids, max_tokens, stop_token_ids, joins_at, pictures] that run as one batch, of which
the last three may be left out (see ``pictures`` for what describes one); or {"requests": such a list, "tamper": a name
in ``TAMPERS``, "k": how many to draft, "weights": a folder whose drafter to run, "observe": of how many requests to
keep the drafter's calls}. The drafter's calls are recorded where the engine core lives in this process.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from vllm import LLM

from vllm_kimi_eagle3.regression import observe, pictures, tampers
from vllm_kimi_eagle3.verify import capture
from vllm_kimi_eagle3.verify.drive import Driver, Request


def request(entry: list[Any]) -> Request:
    """A job's request."""
    shown: list[pictures.Picture] = entry[4] if len(entry) > 4 else []
    return Request(*entry[:4], media=pictures.vision_chunks(shown) if shown else None)


def counters(llm: Any) -> dict[str, list[int]]:
    """vLLM's own counters of speculation, by what follows ``spec_decode_`` in their names."""
    found = {m.name.split("spec_decode_")[1]: m for m in llm.get_metrics() if "spec_decode_" in m.name}
    return {n: list(m.values) if hasattr(m, "values") else [m.value] for n, m in found.items()}


def model_runner(llm: Any) -> Any:
    """The model runner, or None when the engine core is a process of its own."""
    core: Any = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return core and core.model_executor.driver_worker.worker.model_runner


class Said(logging.Handler):
    """What the overlay warns of, since the last look."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("vllm.kimi_eagle3").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.messages.append(record.getMessage())

    def take(self) -> list[str]:
        """Hand over what was said since the last time."""
        taken, self.messages = self.messages, []
        return taken


def scheduler_methods() -> dict[str, tuple[str, str]]:
    """Of the scheduler's methods that the watch may touch: the type, and the module that wrote what is there."""
    from vllm.v1.core.sched.scheduler import Scheduler

    found = {name: vars(Scheduler)[name] for name in ("__init__", "make_spec_decoding_stats")}
    return {name: (type(function).__name__, function.__module__) for name, function in found.items()}


def spoil(runner: Any, options: dict[str, Any]) -> list[tampers.Undo]:
    """Everything that a round's options change; returns what changes it back."""
    undo: list[tampers.Undo] = []
    if options.get("weights"):
        undo.append(tampers.other_weights(runner, options["weights"]))
    if options.get("k") is not None:
        undo.append(tampers.drafting(runner, options["k"]))
    if options.get("tamper"):
        undo.append(tampers.TAMPERS[options["tamper"]](runner))
    return undo


def serve_on_demand(llm: Any, requests: list[Request]) -> None:
    """For each line of stdin serve the requests, unobserved, and print the processor seconds a step took."""
    driver = Driver(llm.llm_engine, record=False)
    steps = 0
    step = llm.llm_engine.step

    def counting() -> Any:
        nonlocal steps
        steps += 1
        return step()

    llm.llm_engine.step = counting
    for _ in sys.stdin:
        steps = 0
        began = time.process_time()
        driver.run(requests)
        print(f"TIMED {(time.process_time() - began) / steps}", flush=True)


def main(job_file: str, result_file: str) -> None:
    """Run the job and write what was seen."""
    job = json.loads(Path(job_file).read_text())
    began = time.monotonic()
    if job.get("proxy"):
        tampers.replace_by_proxies(job["proxy"])
    llm: Any = LLM(**job["engine"])
    runner = model_runner(llm)
    result: dict[str, Any] = {"rounds": [], "in_process": runner is not None, "start_s": time.monotonic() - began}
    observed = runner is not None and getattr(runner, "drafter", getattr(runner, "speculator", None)) is not None
    driver = Driver(llm.llm_engine, record=observed and not job.get("timed"))
    result |= driver.info
    if runner is not None:
        result["expanded"] = observe.expanded_parameters()
    said = Said()
    for entry in job["rounds"]:
        options: dict[str, Any] = entry if isinstance(entry, dict) else {"requests": entry}
        before = counters(llm)
        undo = spoil(runner, options)
        captured = capture.captured_boundaries(runner) if observed else None
        # Not the clock's: on a busy machine that measures the others' work.
        start = time.process_time() + tampers.SLEPT[0]
        served = driver.run([request(entry) for entry in options["requests"]])
        seconds = time.process_time() + tampers.SLEPT[0] - start
        for mend in reversed(undo):
            mend()
        after = counters(llm)
        result["rounds"].append(
            {
                "prompt_ids": [s.prompt_ids for s in served],
                "output_ids": [s.output_ids for s in served],
                "counters": {n: [int(a - b) for a, b in zip(after[n], before[n], strict=True)] for n in after},
                "calls": [
                    {**vars(call), "of": i} for i, s in enumerate(served[: options.get("observe")]) for call in s.calls
                ],
                "captured": captured,
                "seconds": seconds,
                "said": said.take(),
            }
        )
    if job.get("timed"):
        serve_on_demand(llm, [request(entry) for entry in job["timed"]])
    if job.get("toys"):
        result["toys"] = tampers.captured_subsets(llm, runner, **job["toys"])
    if runner is not None and job["engine"].get("dtype") == "float16":
        result["embeddings change"] = observe.embeddings_change(runner)
    if runner is not None:
        result["scheduler"] = scheduler_methods()
        result["placeholders"] = observe.placeholders(runner)
    activation = sys.modules.get("vllm_kimi_eagle3.activation")
    result["overlay_loaded"] = activation is not None
    if activation is not None:
        result["states"] = {s.fix.id: s.state.value for s in activation.ENGINE.statuses()}
        result["patched"] = activation.ENGINE.patcher.patched()
    result["compute_hash"] = llm.llm_engine.vllm_config.compute_hash()
    result["total_s"] = time.monotonic() - began
    torch.save(result, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
