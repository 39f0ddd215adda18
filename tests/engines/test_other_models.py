# SPDX-License-Identifier: Apache-2.0
"""A server that is not ours is the same with and without the overlay: tokens, cache key, and nothing patched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.drift.expected import number
from tests.engines.conftest import PROMPT, RELEASE, TOKENS, applies

pytestmark = pytest.mark.engine
SPECULATES = number(RELEASE) >= number("0.20.0") and not applies("C6")
"""Whether this release's CPU engine speculates without our fixes, which such a server does not get."""


@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "eagle3"])
def test_llama_is_untouched(run: Callable[..., dict[str, Any]], models: dict[str, Path], speculates: bool) -> None:
    engine: dict[str, Any] = {
        "model": str(models["llama"]),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 2,
        "skip_tokenizer_init": True,
    }
    if speculates:
        drafter = str(models["drafter"])
        engine["speculative_config"] = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
    only_config = speculates and not SPECULATES
    job = {"engine": engine, "prompt": PROMPT, "tokens": TOKENS, "only_config": only_config}
    # VLLM_PLUGINS names the plugins to load: none, and the package might as well not be installed.
    without = run("tests.engines.probe_other", job, VLLM_PLUGINS="none")
    with_overlay = run("tests.engines.probe_other", job)
    assert with_overlay.pop("overlay") and not without.pop("overlay")
    assert with_overlay.pop("patched", []) == []
    assert with_overlay.pop("applied", []) == []
    assert with_overlay == without
    assert with_overlay["additional_config"] == {}
    assert only_config or len(without["output_ids"]) == TOKENS
