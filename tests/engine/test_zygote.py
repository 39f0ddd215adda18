# SPDX-License-Identifier: Apache-2.0
"""Engines of these tests are forks. Such an engine is what one in a fresh interpreter is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3.regression import engine
from vllm_kimi_eagle3.regression.engine import EngineFailed, run_engine

pytestmark = pytest.mark.engine


def test_a_fork_is_as_good_as_a_fresh_interpreter(pair: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "zygote" in engine.start.__module__

    def outcome(overlay: str) -> dict[str, Any]:
        request = (list(b"The harbour lay quiet"), 12, [])
        run = run_engine(pair["deepseek_v3"], [[request]], drafter=pair["eagle3_gqa_nested"], overlay=overlay)
        (only,) = run.result["rounds"]
        return {
            **{key: only[key] for key in ("output_ids", "counters")},
            **{key: run.result[key] for key in ("captured", "states", "runner")},
            "drafts": [call["drafts"] for call in only["calls"]],
        }

    forked = outcome("on")
    # The variables of a job are its own: an earlier fork's, or this process's, reach no other.
    assert outcome("stock")["states"] != forked["states"]
    monkeypatch.setattr(engine, "start", engine.start_interpreter)
    assert outcome("on") == forked


def test_an_engine_that_fails_in_a_fork_says_so(pair: dict[str, Path]) -> None:
    with pytest.raises(EngineFailed, match="max_model_len"):
        run_engine(pair["deepseek_v3"], [], drafter=pair["eagle3_gqa_nested"], max_model_len=-5)


def test_another_path_gets_an_interpreter_of_its_own(tmp_path: Path) -> None:
    """A patched vLLM, say, which the process that forks does not know."""
    (tmp_path / "told.py").write_text("import sys; print('vllm' in sys.modules, 'torch' in sys.modules)")
    command = [engine.sys.executable, "-m", "told"]
    done = engine.start(command, {"PYTHONPATH": str(tmp_path)}, tmp_path)
    assert (done.returncode, done.stdout) == (0, "False False\n")
