# SPDX-License-Identifier: Apache-2.0
"""One engine a configuration, many situations in each; every test looks at the runs it needs.

On a GPU the same tests run in bf16, because MLA has no float32 kernels there. ``ALIGNMENT_DTYPE`` says otherwise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import EngineRun, Request, Round, run_engine, served_of
from tiny_kimi.materialize import HERE, materialize

from vllm_kimi_eagle3.verify.compare import Comparison, compare
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle

RIGHT = (4, 7, 9)
ON_GPU = torch.cuda.is_available()
DTYPE = os.environ.get("ALIGNMENT_DTYPE", "bfloat16" if ON_GPU else "float32")
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

PROMPTS = [list(item["prompt"].encode()) for item in json.loads((HERE / "heldout.json").read_text())]


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
        options={"additional_config": BY_RULE, "num_gpu_blocks_override": 24},
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


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return materialize(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def run(pair: dict[str, Path]) -> Callable[[str], EngineRun]:
    """The run of a setting, made once."""

    @cache
    def made(name: str) -> EngineRun:
        s = SETTINGS[name]
        options = {"max_model_len": MAX_MODEL_LEN, "dtype": s.dtype, **s.options}
        return run_engine(pair[s.target], s.rounds, drafter=pair[s.drafter], k=s.k, env=s.env, **options)

    return made


@pytest.fixture(scope="session")
def oracle(pair: dict[str, Path]) -> Callable[..., CheckpointOracle]:
    @cache
    def made(kind: str, boundaries: tuple[int, ...], dtype: str) -> CheckpointOracle:
        drafter = pair[f"eagle3_{kind}_boundary"]
        return CheckpointOracle(pair["deepseek_v3"], drafter, boundaries, getattr(torch, dtype))

    return made


@pytest.fixture(scope="session")
def compared(run: Callable[[str], EngineRun], oracle: Callable[..., CheckpointOracle]) -> Callable[..., Comparison]:
    """A round of a setting against the reference; all untampered rounds together if none is named."""

    @cache
    def made(name: str, index: int | None = None, boundaries: tuple[int, ...] = RIGHT) -> Comparison:
        s, result = SETTINGS[name], run(name).result
        rounds = [i for i, entry in enumerate(s.rounds) if not isinstance(entry, dict)] if index is None else [index]
        served = [one for i in rounds for one in served_of(result["rounds"][i], s.requests(i))]
        return compare(
            served,
            oracle(s.drafter.split("_")[1], boundaries, s.dtype),
            boundaries,
            dtype=s.dtype,
            block_size=result["block_size"],
            max_model_len=MAX_MODEL_LEN,
        )

    return made
