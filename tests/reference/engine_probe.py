# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: stock vLLM on a job file, and what its drafter was given and proposed, to a result file.

    python engine_probe.py JOB.json RESULT.pt

The job: ``engine`` (arguments of LLM) and ``rounds``, each a list of requests [prompt_ids, max_tokens, stop_token_ids]
that run as one batch. Calls of the drafter are recorded for rounds of one request.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams


def counters(llm: LLM) -> dict[str, list[int]]:
    found = {m.name.split("spec_decode_")[1]: m for m in llm.get_metrics() if "spec_decode_" in m.name}
    return {n: list(m.values) if hasattr(m, "values") else [m.value] for n, m in found.items()}


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    llm = LLM(**job["engine"])
    core: Any = llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    propose, calls = runner.drafter.propose, []

    def recording(*args: Any, **kw: Any) -> torch.Tensor:
        # The engine reuses its buffers: copy before it runs.
        seen = {n: kw[n].clone() for n in ("target_hidden_states", "target_token_ids", "target_positions")}
        newest = kw["next_token_ids"].tolist()
        drafts = propose(*args, **kw)
        if len(newest) == 1:
            at = kw["token_indices_to_sample"]
            n = len(seen["target_token_ids"]) if at is None else int(at[0]) + 1
            calls.append(
                {
                    "rows": seen["target_hidden_states"][:n],
                    "ids": seen["target_token_ids"][1:n].tolist() + newest,
                    "positions": seen["target_positions"][:n].tolist(),
                    "drafts": drafts[0].tolist(),
                }
            )
        return drafts

    runner.drafter.propose = recording
    result: dict[str, Any] = {
        "drafter": type(runner.drafter.model).__name__,
        "drafter_max_model_len": runner.effective_drafter_max_model_len,
        "rounds": [],
    }
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
    torch.save(result, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
