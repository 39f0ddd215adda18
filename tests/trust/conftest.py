# SPDX-License-Identifier: Apache-2.0
"""Tiny models, ours and somebody else's, and fresh interpreters to load them with the real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines import tiny

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "ours": str(tiny.kimi_k25(root / "kimi_k25")),
        "drafter": str(tiny.drafter(root / "drafter")),
        "plain": str(tiny.llama(root / "llama")),
        "plain_drafter": str(tiny.drafter(root / "plain_drafter")),
    }


@pytest.fixture(scope="session")
def vllm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: it holds nothing but what vLLM notes about its own model classes, seconds each."""
    return tmp_path_factory.mktemp("vllm_cache")


@pytest.fixture(scope="session")
def answer(tmp_path_factory: pytest.TempPathFactory, vllm_cache: Path) -> Callable[..., Any]:
    """Run a script of this folder on a job in a fresh interpreter, and return what it wrote."""

    def run(script: str, job: Any, seconds: float = 500, **environment: str) -> Any:
        folder = tmp_path_factory.mktemp("run")
        (folder / "job.json").write_text(json.dumps(job))
        done = subprocess.run(
            [sys.executable, str(HERE / script), str(folder / "job.json"), str(folder / "result.json")],
            env={
                **os.environ,
                "VLLM_KIMI_EAGLE3": "on",
                "VLLM_CACHE_ROOT": str(vllm_cache),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return json.loads((folder / "result.json").read_text())

    return run
