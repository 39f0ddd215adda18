# SPDX-License-Identifier: Apache-2.0
"""The engines of the alignment suite, and what each is asked to do.

On a GPU the same tests run in bf16, because MLA has no float32 kernels there. ``ALIGNMENT_DTYPE`` says otherwise, and
``ALIGNMENT_ENGINE`` holds further engine arguments as JSON, {"attention_config": {"backend": "TRITON_MLA"}} for one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_kimi_eagle3.regression.engine import Request, Round
from vllm_kimi_eagle3.tiny_kimi import held_out_prompts

RIGHT = (4, 7, 9)
ON_GPU = torch.cuda.is_available()
DTYPE = os.environ.get("ALIGNMENT_DTYPE", "bfloat16" if ON_GPU else "float32")
ENGINE: dict[str, Any] = json.loads(os.environ.get("ALIGNMENT_ENGINE", "{}"))
BY_RULE = {"kimi_eagle3": {"layer_rule": "output"}}
MAX_MODEL_LEN = 128
TAMPERED = (
    "one boundary early",
    "one boundary late",
    "permuted states",
    "post-norm states",
    "residual left out",
    "last step's states",
)

PROMPTS = held_out_prompts()


def prompt(index: int, length: int) -> list[int]:
    """The end of a held-out prompt, so that what follows is what the target was trained on."""
    return PROMPTS[index][-length:]


# Lengths on both sides of one and several blocks of 16 and 32 tokens; two requests join running ones.
JOINING: list[Request] = [
    (prompt(0, 40), 24, [], 0),
    (prompt(3, 1), 30, [], 0),
    (prompt(6, 64), 40, [], 2),
    (prompt(9, 33), 12, [], 4),
    (prompt(12, 32), 20, [], 7),
]
ALONE: list[Request] = [(prompt(15, 17), 20, []), (prompt(18, 96), 8, [])]
TO_THE_LIMIT: list[Request] = [(prompt(21, 90), 500, [])]
SHORT: list[Request] = [(prompt(24, 40), 16, [], 0), (prompt(27, 20), 16, [], 3)]
CROWD: list[Request] = [(prompt(i, 48 + 5 * i), 64 - 3 * i, [], i) for i in range(6)]
SAME_TWICE: list[Request] = [(prompt(30, 90), 12, [])]


@dataclass(frozen=True)
class Setting:
    """An engine and what it is asked to do."""

    target: str
    drafter: str
    k: int
    rounds: tuple[Round, ...]
    dtype: str = DTYPE
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    env: dict[str, str] = field(default_factory=dict[str, str])

    def requests(self, index: int) -> list[Request]:
        entry = self.rounds[index]
        return list(entry["requests"]) if isinstance(entry, dict) else list(entry)


# With this custom operator on, the compiled graph holds the overlay's own rotary function (C2).
ROTARY = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu"
COMPILED: dict[str, Any] = {
    "additional_config": BY_RULE,
    "enforce_eager": False,
    "compilation_config": {"custom_ops": ["none", "+rotary_embedding"]},
}
# The CPU platform switches chunked prefill and prefix caching off with MLA (C4), but not with ordinary attention.
WITHOUT_MLA = {} if ON_GPU else {"VLLM_MLA_DISABLE": "1"}
CHUNKED: dict[str, Any] = {
    "max_num_batched_tokens": 37,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "block_size": 32,
}
EVERYTHING = (JOINING, ALONE[:1], ALONE[1:], TO_THE_LIMIT)
SETTINGS: dict[str, Setting] = {
    "eager": Setting(
        "kimi_k25",
        "eagle3_gqa_nested",
        3,
        (*EVERYTHING, *({"requests": SHORT, "tamper": name} for name in TAMPERED), SHORT),
        options={"additional_config": BY_RULE},
    ),
    # 24 blocks of 16 tokens for six requests of up to 140: some have to give way and start again.
    "tiny cache": Setting(
        "deepseek_v3",
        "eagle3_mla_nested",
        5,
        (CROWD, TO_THE_LIMIT),
        options={"additional_config": BY_RULE, "num_gpu_blocks_override": 24, "block_size": 16},
    ),
    # The odd number of tokens a step leaves one for the last of many requests: a decode of one token.
    "chunked": Setting(
        "deepseek_v3",
        "eagle3_gqa_nested",
        1,
        (CROWD, SAME_TWICE, SAME_TWICE, TO_THE_LIMIT),
        options={"additional_config": BY_RULE, **CHUNKED},
        env=WITHOUT_MLA,
    ),
    "bf16": Setting(
        "kimi_k25", "eagle3_gqa_nested", 3, (JOINING,), dtype="bfloat16", options={"additional_config": BY_RULE}
    ),
    # vLLM divides the whole stream by routed_scaling_factor in float16; the overlay hands over the undivided one (D16).
    "float16": Setting(
        "kimi_k25", "eagle3_gqa_nested", 3, (JOINING,), dtype="float16", options={"additional_config": BY_RULE}
    ),
    # Stock vLLM reads the nested ids raw, one boundary early (D7); the legacy schema keeps D11 out of the way.
    "stock": Setting(
        "kimi_k25_legacy",
        "eagle3_gqa_nested",
        3,
        (SHORT, SAME_TWICE),
        options={"overlay": "stock", **CHUNKED},
        env=WITHOUT_MLA,
    ),
    "compiled": Setting("kimi_k25", "eagle3_gqa_nested", 3, (JOINING, TO_THE_LIMIT), options=COMPILED),
    "compiled proxy": Setting("kimi_k25", "eagle3_gqa_nested", 3, (SHORT,), options={**COMPILED, "proxy": ROTARY}),
    "eager proxy": Setting(
        "kimi_k25", "eagle3_gqa_nested", 3, (SHORT,), options={"additional_config": BY_RULE, "proxy": ROTARY}
    ),
}
