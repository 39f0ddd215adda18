# SPDX-License-Identifier: Apache-2.0
"""Which of the two model runners a server has."""

from __future__ import annotations

import os
from typing import Any


def on_v2(vllm_config: Any) -> bool:
    """Whether the server runs on the V2 model runner; older releases know only the user's word."""
    decided = getattr(vllm_config, "use_v2_model_runner", None)
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" if decided is None else bool(decided)
