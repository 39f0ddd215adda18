# SPDX-License-Identifier: Apache-2.0
"""The engines of the alignment suite, and what each is asked to do.

On a GPU the same tests run in bf16, because MLA has no float32 kernels there. ``ALIGNMENT_DTYPE`` says otherwise, and
``ALIGNMENT_ENGINE`` holds further engine arguments as JSON, {"attention_config": {"backend": "TRITON_MLA"}} for one.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

import torch

from vllm_kimi_eagle3.regression.settings import (
    ASIDE,
    BESIDE_THE_LIMIT,
    CHUNKED,
    CROWD,
    EVERYTHING,
    JOINING,
    SAME_TWICE,
    SHORT,
    TINY_CACHE,
    TO_THE_LIMIT,
    Request,
    Setting,
    prompt,
)

ON_GPU = torch.cuda.is_available()
DTYPE = os.environ.get("ALIGNMENT_DTYPE", "bfloat16" if ON_GPU else "float32")
ENGINE: dict[str, Any] = json.loads(os.environ.get("ALIGNMENT_ENGINE", "{}"))
BY_RULE = {"kimi_eagle3": {"layer_rule": "output"}}
TAMPERED = (
    "one boundary early",
    "one boundary late",
    "permuted states",
    "post-norm states",
    "residual left out",
    "last step's states",
)

# With this custom operator on, the compiled graph holds the overlay's own rotary function (C2).
ROTARY = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu"
COMPILED: dict[str, Any] = {
    "additional_config": BY_RULE,
    "enforce_eager": False,
    "compilation_config": {"custom_ops": ["none", "+rotary_embedding"]},
}
# The CPU platform switches chunked prefill and prefix caching off with MLA (C4), but not with ordinary attention.
WITHOUT_MLA = {} if ON_GPU else {"VLLM_MLA_DISABLE": "1"}
ALL_TO_THE_LIMIT: list[Request] = [(prompt(21, 105 + i), 500, []) for i in range(8)]
"""Eight lengths, so that last steps begin at each distance from the limit; the second time, prompts are cached."""
setting = partial(Setting, dtype=DTYPE)
SETTINGS: dict[str, Setting] = {
    "eager": setting(
        "kimi_k25",
        "eagle3_gqa_nested",
        3,
        (
            *EVERYTHING,
            ASIDE,
            *({"requests": SHORT, "tamper": name} for name in TAMPERED),
            SHORT,
        ),
        options={"additional_config": BY_RULE},
    ),
    "tiny cache": setting(
        "deepseek_v3",
        "eagle3_mla_nested",
        5,
        (CROWD, TO_THE_LIMIT),
        options={"additional_config": BY_RULE, **TINY_CACHE},
    ),
    "chunked": setting(
        "deepseek_v3",
        "eagle3_gqa_nested",
        1,
        (CROWD, SAME_TWICE, SAME_TWICE, TO_THE_LIMIT),
        options={"additional_config": BY_RULE, **CHUNKED},
        env=WITHOUT_MLA,
    ),
    "bf16": setting(
        "kimi_k25", "eagle3_gqa_nested", 3, (JOINING,), dtype="bfloat16", options={"additional_config": BY_RULE}
    ),
    # vLLM divides the whole stream by routed_scaling_factor in float16; the overlay hands over the undivided one (D16),
    # and the embeddings (D23) as they were before they were divided in place (D17).
    "float16": setting(
        "kimi_k25",
        "eagle3_gqa_nested",
        3,
        (JOINING,),
        dtype="float16",
        options={"additional_config": {"kimi_eagle3": {"layer_ids": [0, 7, 9]}}},
        boundaries=(0, 7, 9),
    ),
    # Stock vLLM reads the nested ids raw, one boundary early (D7); the legacy schema keeps D11 out of the way.
    "stock": setting(
        "kimi_k25_legacy",
        "eagle3_gqa_nested",
        3,
        (SHORT, SAME_TWICE, ASIDE),
        options={"overlay": "stock", **CHUNKED},
        env=WITHOUT_MLA,
    ),
    # Its own configuration says 64 tokens, of 128 that a request may have. Drafts go several steps beyond those; the
    # second time, prompts come from the cache in which such steps must have left no trace.
    "short drafter": setting(
        "kimi_k25",
        "eagle3_gqa_short",
        6,
        (BESIDE_THE_LIMIT, ALL_TO_THE_LIMIT, ALL_TO_THE_LIMIT, JOINING),
        options={"enable_prefix_caching": True, "block_size": 32},
        env=WITHOUT_MLA,
    ),
    "short drafter, stock": setting(
        "kimi_k25_legacy", "eagle3_gqa_short", 3, (BESIDE_THE_LIMIT,), options={"overlay": "stock"}
    ),
    "compiled": setting("kimi_k25", "eagle3_gqa_nested", 3, (JOINING, TO_THE_LIMIT), options=COMPILED),
    "compiled proxy": setting("kimi_k25", "eagle3_gqa_nested", 3, (SHORT,), options={**COMPILED, "proxy": ROTARY}),
    "eager proxy": setting(
        "kimi_k25", "eagle3_gqa_nested", 3, (SHORT,), options={"additional_config": BY_RULE, "proxy": ROTARY}
    ),
}
