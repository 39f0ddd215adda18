# SPDX-License-Identifier: Apache-2.0
"""Engines, and what each is asked to do: an engine takes many seconds to start and a situation some milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_kimi_eagle3.regression.engine import Request, Round
from vllm_kimi_eagle3.regression.environment import Environment
from vllm_kimi_eagle3.tiny_kimi import held_out_prompts

RIGHT, EARLY, LATE, DEFAULT = (4, 7, 9), (3, 6, 8), (5, 8, 10), (2, 5, 7)
"""Boundaries: what the pair's drafters were trained on, one early, one late, and vLLM's default for ten layers."""
MAX_MODEL_LEN = 128
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
# All stay clear of the limit, also by what an asynchronous scheduler expects: see BESIDE_THE_LIMIT.
CROWD: list[Request] = [(prompt(i, 42 + 5 * i), 58 - 3 * i, [], i) for i in range(6)]
BESIDE_THE_LIMIT: list[Request] = [(prompt(21, 110), 500, []), (prompt(24, 40), 40, [])]
"""D24: while the first request is near max_model_len, stock V1 does not run the drafter for the second one either."""
ASIDE: dict[str, Any] = {"requests": BESIDE_THE_LIMIT, "tamper": None}
"""As a round that is compared by itself."""
SAME_TWICE: list[Request] = [(prompt(30, 90), 12, [])]
EVERYTHING = (JOINING, ALONE[:1], ALONE[1:], TO_THE_LIMIT)

CHUNKED: dict[str, Any] = {
    "max_num_batched_tokens": 37,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "block_size": 32,
}
"""The odd number of tokens a step leaves one for the last of many requests: a decode of one token."""

# 24 blocks of 16 tokens for six requests of up to 110: some have to give way and start again.
TINY_CACHE: dict[str, Any] = {"num_gpu_blocks_override": 24, "block_size": 16}


@dataclass(frozen=True)
class Setting:
    """An engine and what it is asked to do."""

    target: str
    drafter: str
    k: int
    rounds: tuple[Round, ...]
    dtype: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    env: dict[str, str] = field(default_factory=dict[str, str])
    boundaries: tuple[int, ...] = RIGHT

    def requests(self, index: int) -> list[Request]:
        """A round's requests."""
        entry = self.rounds[index]
        return list(entry["requests"]) if isinstance(entry, dict) else list(entry)


RULE = "VLLM_KIMI_EAGLE3_LAYER_RULE"
"""Says what nested ids mean, to the overlay and to the source patches alike."""

UNTESTED = {
    "D13": "shows on the V2 runner alone, with a drafter that wants no auxiliary states: the pair has none",
    "D21": "a choice of the user's, whose default is vLLM's own behaviour",
    "D19": "CUDA kernels and graphs alone: in a checkout, `python -m pytest --noconftest tests/gpu` looks at them",
    "D26": "shows where tensor, data and experts parallel meet: two engines of two ranks each",
}
"""Defects that are mended and have no check in ``test_defects``, each with its reason."""

BASIC = (
    "whole prefill",
    "verify, all accepted",
    "verify, some accepted",
    "verify, none accepted",
    "step after a rejection",
    "across a block boundary",
    "batch",
    "batch of prefill and verify",
    "a request joined",
    "a request left",
)
SITUATIONS: dict[str, tuple[str, ...]] = {
    "eager": (*BASIC, "up to max_model_len"),
    "kimi": (*BASIC, "resumed after preemption"),
    "chunked": (
        # Of one draft, all or none are accepted; every prompt is longer than a chunk.
        *(name for name in BASIC if name not in ("verify, some accepted", "whole prefill")),
        "chunked prefill",
        "prefix-cache hit",
        "decode of one token",
        "up to max_model_len",
    ),
    "compiled": (*BASIC, "up to max_model_len"),
}
"""What the suite's engines come into."""


def suite_settings(env: Environment) -> dict[str, Setting]:
    """The suite's engines. But for "output rule" all ids are top-level boundaries, which every vLLM reads alike."""
    gpu = env.device == "gpu"
    dtype = "bfloat16" if gpu else "float32"
    # A rule that happens to be set where the suite is run would shift the boundaries.
    common = {RULE: ""} if env.mla else {RULE: "", "VLLM_MLA_DISABLE": "1"}
    # The CPU platform switches chunked prefill and prefix caching off with MLA (C4), but not with ordinary attention.
    chunked = common if gpu else {**common, "VLLM_MLA_DISABLE": "1"}
    options: dict[str, Any] = {"overlay": env.mode, "max_model_len": MAX_MODEL_LEN}
    # Releases that don't read the new schema read this one, and so do those that do.
    kimi = {**options, "skip_tokenizer_init": False}
    mla = "eagle3_mla_boundary" if env.mla_drafters else "eagle3_gqa_boundary"
    return {
        "eager": Setting("deepseek_v3", "eagle3_gqa_boundary", 3, (*EVERYTHING, ASIDE), dtype, options, common),
        "chunked": Setting(
            "deepseek_v3",
            "eagle3_gqa_boundary",
            1,
            (CROWD, SAME_TWICE, SAME_TWICE, TO_THE_LIMIT),
            dtype,
            {**options, **CHUNKED},
            chunked,
        ),
        "kimi": Setting("kimi_k25_legacy", mla, 5, (CROWD,), dtype, {**kimi, **TINY_CACHE}, common),
        "output rule": Setting(
            "deepseek_v3", "eagle3_gqa_nested", 3, (SHORT,), dtype, options, {**common, RULE: "output"}
        ),
        "float16": Setting("kimi_k25_legacy", "eagle3_gqa_boundary", 3, (JOINING,), "float16", kimi, common),
        "compiled": Setting(
            "deepseek_v3",
            "eagle3_gqa_boundary",
            3,
            (JOINING, TO_THE_LIMIT),
            dtype,
            {**options, "enforce_eager": False},
            common,
        ),
        "new schema": Setting("kimi_k25", "eagle3_gqa_boundary", 3, (SHORT,), dtype, kimi, common),
        "mla drafter": Setting(
            "deepseek_v3", "eagle3_mla_nested_v3", 3, (SHORT,), dtype, options, {**common, RULE: "output"}
        ),
        "no lm_head": Setting("kimi_k25_legacy", "eagle3_headless_boundary", 3, (SHORT,), dtype, kimi, common),
        "large blocks": Setting(
            "deepseek_v3", "eagle3_gqa_boundary", 3, (SHORT,), dtype, {**options, "block_size": 128}, common
        ),
        "forced backend": Setting(
            "deepseek_v3",
            "eagle3_gqa_boundary",
            3,
            (SHORT,),
            dtype,
            {**options, "attention_config": {"backend": "TRITON_MLA"}},
            common,
        ),
    }
