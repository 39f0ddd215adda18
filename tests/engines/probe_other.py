# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: a model that is none of our targets, with or without a drafter.

    python -m tests.engines.probe_other JOB.json RESULT.pt

Writes its tokens, its compile-cache key and what the overlay has patched. With ``only_config`` the engine is not
started: the CPU engine of 0.15 to 0.19 refuses every speculation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs


def main(job_file: str, result_file: str) -> None:
    """Run the job and write what was seen."""
    job = json.loads(Path(job_file).read_text())
    result: dict[str, Any] = {}
    if job["only_config"]:
        vllm_config: Any = EngineArgs(**job["engine"]).create_engine_config()
    else:
        llm = LLM(**job["engine"])
        vllm_config = llm.llm_engine.vllm_config
        params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": job["prompt"]}], params, use_tqdm=False)
        result["output_ids"] = list(outputs[0].outputs[0].token_ids)
    result["compute_hash"] = vllm_config.compute_hash()
    result["additional_config"] = dict(vllm_config.additional_config)
    gates, activation = (sys.modules.get(f"vllm_kimi_eagle3.{name}") for name in ("gates", "activation"))
    result["overlay"] = gates is not None or activation is not None
    if activation is not None:
        result["patched"] = activation.ENGINE.patcher.patched()
        result["applied"] = [s.fix.label for s in activation.ENGINE.statuses() if s.state.value == "APPLIED"]
    torch.save(result, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
