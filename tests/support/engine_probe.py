# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: vLLM on a job file, and what its drafter was given and proposed, to a result file.

    python engine_probe.py JOB.json RESULT.pt

The job: ``engine`` (arguments of LLM), ``rounds``, each a list of requests [prompt_ids, max_tokens, stop_token_ids]
that run as one batch, and ``revert`` (take the overlay back at the end and report what is left). The drafter's calls
are recorded where the model lives in this process, for rounds of one request; calls of batches are kept whole.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams


def counters(llm: LLM) -> dict[str, list[int]]:
    found = {m.name.split("spec_decode_")[1]: m for m in llm.get_metrics() if "spec_decode_" in m.name}
    return {n: list(m.values) if hasattr(m, "values") else [m.value] for n, m in found.items()}


def model_runner(llm: LLM) -> Any:
    """The model runner, or None when the engine core is a process of its own."""
    core: Any = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return core and core.model_executor.driver_worker.worker.model_runner


def record_calls(runner: Any, calls: list[dict[str, Any]]) -> None:
    """Append every call of the drafter to ``calls``."""
    propose = runner.drafter.propose

    def recording(*args: Any, **kw: Any) -> torch.Tensor:
        # The engine reuses its buffers: copy before it runs.
        seen = {n: kw[n].clone() for n in ("target_hidden_states", "target_token_ids", "target_positions")}
        newest = kw["next_token_ids"].tolist()
        starts = kw["common_attn_metadata"].query_start_loc.tolist()
        drafts = propose(*args, **kw)
        at = kw["token_indices_to_sample"]
        for i, token in enumerate(newest):
            end = starts[i + 1] if at is None else int(at[i]) + 1
            calls.append(
                {
                    "batch": len(newest),
                    "rows": seen["target_hidden_states"][starts[i] : end],
                    "ids": [*seen["target_token_ids"][starts[i] + 1 : end].tolist(), token],
                    "positions": seen["target_positions"][starts[i] : end].tolist(),
                    "drafts": drafts[i].tolist(),
                }
            )
        return drafts

    runner.drafter.propose = recording


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    llm = LLM(**job["engine"])
    runner, calls = model_runner(llm), list[dict[str, Any]]()
    result: dict[str, Any] = {"rounds": [], "in_process": runner is not None}
    if runner is not None and getattr(runner, "drafter", None) is not None:
        record_calls(runner, calls)
        result["drafter"] = type(runner.drafter.model).__name__
        result["drafter_max_model_len"] = getattr(runner, "effective_drafter_max_model_len", None)
    for requests in job["rounds"]:
        calls.clear()
        before = counters(llm)
        params = [
            SamplingParams(temperature=0, max_tokens=n, stop_token_ids=stop, ignore_eos=True, detokenize=False)
            for _, n, stop in requests
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p, _, _ in requests], params, use_tqdm=False)
        after = counters(llm)
        result["rounds"].append(
            {
                "output_ids": [list(o.outputs[0].token_ids) for o in outputs],
                "counters": {n: [int(a - b) for a, b in zip(after[n], before[n], strict=True)] for n in after},
                "calls": list(calls),
            }
        )
    activation = sys.modules.get("vllm_kimi_eagle3.activation")
    result["overlay_loaded"] = activation is not None
    if activation is not None:
        result["states"] = {s.fix.id: s.state.value for s in activation.ENGINE.statuses()}
        result["patched"] = activation.ENGINE.patcher.patched()
    result["compute_hash"] = llm.llm_engine.vllm_config.compute_hash()
    torch.save(result, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
