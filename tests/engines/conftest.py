# SPDX-License-Identifier: Apache-2.0
"""Engine runs on whatever vLLM is installed, each in a process of its own and made once a session."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.drift.expected import EXPECTED, expected
from tests.engines import tiny
from vllm_kimi_eagle3.patching.release import installed_release
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Need
from vllm_kimi_eagle3.regression.engine import TARGET_PROBE, EngineFailed, run_probe

RELEASE = Version(installed_release() or "0").base_version
"""The installed release, without what a build appends."""


def applies(defect: str) -> bool:
    """Whether the table says that the installed release has a defect."""
    labels = [label for label in EXPECTED if label.startswith(f"{defect} ")]
    return any(expected(label, RELEASE) is Need.APPLY for label in labels)


def loads_with_mla_only() -> bool:
    """0.15's Kimi-K2.5 renames two projections to MLA's fused one, whether or not its decoder has that."""
    load = "vllm.model_executor.models.kimi_k25:KimiK25ForConditionalGeneration.load_weights"
    off = os.environ.get("VLLM_MLA_DISABLE", "0") not in ("", "0")
    return off and "fused_qkv_a_proj" in SourceTree.installed().text(load)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny models' folders."""
    root = tmp_path_factory.mktemp("models")
    return {
        "deepseek_v3": tiny.deepseek_v3(root / "deepseek_v3"),
        "kimi_k25": tiny.kimi_k25(root / "kimi_k25"),
        "drafter": tiny.drafter(root / "drafter"),
        "mla_drafter": tiny.mla_drafter(root / "mla_drafter"),
        "llama": tiny.llama(root / "llama"),
    }


@pytest.fixture(scope="session")
def run() -> Callable[..., dict[str, Any]]:
    """Run a probe module on a job; the same run is made once."""
    made: dict[str, dict[str, Any] | EngineFailed] = {}

    def run_once(module: str, job: dict[str, Any], overlay: str = "on", **environment: str) -> dict[str, Any]:
        key = json.dumps([module, job, overlay, environment], sort_keys=True)
        if key not in made:
            try:
                made[key] = run_probe(module, job, overlay=overlay, env=environment).result
            except EngineFailed as failed:
                made[key] = failed
        result = made[key]
        assert not isinstance(result, EngineFailed), str(result)[-6000:]
        return result

    return run_once


@pytest.fixture(scope="session")
def target_run(run: Callable[..., dict[str, Any]], models: dict[str, Path]) -> Callable[..., dict[str, Any]]:
    """One of our targets in the engine, seen as a drafter would see it; see target_probe.py."""

    def run_target(
        kind: str,
        overlay: str,
        *,
        revert: tuple[str, ...] = (),
        load_drafter: bool = False,
        **engine: Any,
    ) -> dict[str, Any]:
        if "kimi" in kind and loads_with_mla_only():
            pytest.skip("this release's Kimi-K2.5 loads weights with MLA only, which its CPU engine has not")
        arguments: dict[str, Any] = {
            "model": str(models[kind]),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 2,
            # Kimi's processor wants a tokenizer, even for a server that serves text only.
            "skip_tokenizer_init": kind != "kimi_k25",
        }
        if kind == "kimi_k25":
            arguments["limit_mm_per_prompt"] = {"vision_chunk": 0}
            # Some releases take Kimi's image processor from the checkpoint only: here it is this repository's code.
            arguments["trust_remote_code"] = True
        job = {
            "engine": {**arguments, **engine},
            "drafter": str(models["drafter"]),
            "mla_drafter": str(models["mla_drafter"]),
            "boundaries": list(tiny.IDS),
            "prompt": PROMPT,
            "tokens": TOKENS,
            "revert": list(revert),
            "load_drafter": load_drafter,
            "cuda_device_is_cpu": RELEASE.startswith("0.15."),
        }
        return run(TARGET_PROBE, job, overlay)

    return run_target


PROMPT = [1, 2, 3, 4, 5, 6, 7, 9, 200, 17]
TOKENS = 12
