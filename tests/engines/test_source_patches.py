# SPDX-License-Identifier: Apache-2.0
"""The installed release with the source patches and without the overlay, as ``test_target.py`` looks at the overlay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patched_vllm import patched_copy

from tests.engines import tiny
from tests.engines.conftest import PROMPT, RELEASE, TOKENS, applies
from tests.engines.test_target import KINDS, assert_captured
from vllm_kimi_eagle3.reference import Target
from vllm_kimi_eagle3.regression.engine import TARGET_PROBE

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]) -> Target:
    return Target.load(models["deepseek_v3"])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return patched_copy(tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="module")
def patched_run(
    run: Callable[..., dict[str, Any]], models: dict[str, Path], environment: dict[str, str]
) -> Callable[[str], dict[str, Any]]:
    def run_patched(kind: str) -> dict[str, Any]:
        engine: dict[str, Any] = {
            "model": str(models[kind]),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 2,
            "skip_tokenizer_init": kind != "kimi_k25",
        }
        if kind == "kimi_k25":
            engine["limit_mm_per_prompt"] = {"vision_chunk": 0}
        job = {
            "engine": engine,
            "drafter": str(models["drafter"]),
            "mla_drafter": str(models["mla_drafter"]),
            "boundaries": list(tiny.IDS),
            "prompt": PROMPT,
            "tokens": TOKENS,
            "load_drafter": True,
            "cuda_device_is_cpu": RELEASE.startswith("0.15."),
        }
        return run(TARGET_PROBE, job, "off", **environment)

    return run_patched


@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_target(patched_run: Callable[[str], dict[str, Any]], reference: Target, kind: str) -> None:
    """It may speculate, shows the streams asked for, writes the right text, and lends the drafter its parts."""
    result = patched_run(kind)
    assert "states" not in result, "the overlay is not to be there"
    assert "config error" not in result, result["config error"]
    assert result["plan"] is None
    assert result["supports_eagle3"]
    assert_captured(reference, result)
    ids = [*PROMPT, *result["output_ids"][:-1]]
    assert reference.forward(ids).logits.argmax(-1)[len(PROMPT) - 1 :].tolist() == result["output_ids"]
    loaded = result["drafter"]
    assert loaded["V1 shares lm_head"], loaded
    if "V2 error" not in loaded or applies("D12"):
        assert loaded["V2 shares lm_head"], loaded
