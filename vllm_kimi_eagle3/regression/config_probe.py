# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: vLLM builds the configurations of servers that speculate, and its runners read them.

    python -m vllm_kimi_eagle3.regression.config_probe JOB.json RESULT.pt

The job: ``configs``, by name {"engine": arguments of EngineArgs, "env": variables}. The result has for each either
``error`` or: ``architectures`` of the drafter as vLLM understood it, ``positions``, how many its rotary embedding is
built for, ``hash`` of the whole configuration, and ``readers``, the layer ids that each runner's own function takes of
it: a list, None, or a sentence where there is no such function. No engine starts, and no GPU is touched.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs

READERS = {
    "V1": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._get_eagle3_aux_layers_from_config"),
    "V2": ("vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils", "get_eagle3_aux_layers_from_config"),
}
"""Where the runners read the drafter's layer ids."""


def read(runner: str, speculative_config: Any) -> list[int] | str | None:
    """What a runner's function takes of a configuration."""
    module, name = READERS[runner]
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    given = SimpleNamespace(speculative_config=speculative_config) if runner == "V1" else speculative_config
    found = function(given)
    return None if found is None else [int(i) for i in found]


def look(engine: dict[str, Any]) -> dict[str, Any]:
    """Build one configuration and see what vLLM makes of it."""
    try:
        config: Any = EngineArgs(**engine).create_engine_config()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    speculative = config.speculative_config
    return {
        "architectures": list(speculative.draft_model_config.hf_config.architectures or []),
        "positions": speculative.draft_model_config.hf_config.max_position_embeddings,
        "hash": config.compute_hash(),
        "readers": {runner: read(runner, speculative) for runner in READERS},
    }


def main(job_file: str, result_file: str) -> None:
    """Run the job and write what was seen."""
    job = json.loads(Path(job_file).read_text())
    result: dict[str, Any] = {}
    for name, wanted in job["configs"].items():
        os.environ.update(wanted["env"])
        result[name] = look(wanted["engine"])
        for variable in wanted["env"]:
            del os.environ[variable]
    torch.save(result, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
