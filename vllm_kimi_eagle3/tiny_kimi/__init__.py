# SPDX-License-Identifier: Apache-2.0
"""A Kimi-K2.5 of 6.7 M parameters and two EAGLE-3 drafters for it, really trained: what tests and the demo run.

``materialize`` writes the runnable folders, ``widen`` gives one the head sizes that CUDA's MLA kernels take. How the
pair was made is told in the repository, in ``examples/tiny_kimi``.
"""

from __future__ import annotations

import json
from pathlib import Path


def held_out_prompts() -> list[list[int]]:
    """40 prompts from files that the training never saw, as token ids: the tokens are bytes."""
    held_out = json.loads((Path(__file__).parent / "heldout.json").read_text("utf-8"))
    return [list(item["prompt"].encode()) for item in held_out]
