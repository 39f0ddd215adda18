# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: configure our server, and fill vLLM's caches as that does.

python configure.py MODELS.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs


def main(models_file: str, result_file: str) -> None:
    """Configure, and say whether the overlay was there."""
    models = json.loads(Path(models_file).read_text())
    speculative = {"method": "eagle3", "model": models["drafter"], "num_speculative_tokens": 3}
    common = {"dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.1}
    EngineArgs(model=models["ours"], speculative_config=speculative, **common).create_engine_config()
    Path(result_file).write_text(json.dumps({"overlay": "vllm_kimi_eagle3.activation" in sys.modules}))


if __name__ == "__main__":
    main(*sys.argv[1:])
