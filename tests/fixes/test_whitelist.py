# SPDX-License-Identifier: Apache-2.0
"""D1 on the validators of the releases themselves: what they refuse before, they pass after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.drift.expected import RELEASES, expected
from tests.releases import build, definition
from vllm_kimi_eagle3.fixes import target_whitelist
from vllm_kimi_eagle3.patching.patcher import PatchConflict, Patcher
from vllm_kimi_eagle3.patching.spec import Need

LISTED = [r for r in RELEASES if expected("D1 target-whitelist", r) is Need.APPLY]


def validator(release: str) -> Any:
    return build(
        release,
        "config/speculative.py",
        definition(release, "config/speculative.py", "_verify_args", "SpeculativeConfig"),
    )


def config(model_type: str) -> Any:
    return SimpleNamespace(
        tensor_parallel_size=None,
        num_speculative_tokens=3,
        draft_model_config=None,
        disable_by_batch_size=None,
        method="eagle3",
        target_model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type=model_type)),
        verify_equal_vocab_size_if_draft_model=lambda: None,
    )


@pytest.mark.parametrize("release", LISTED)
@pytest.mark.parametrize("model_type", ["kimi_k2", "kimi_k25", "deepseek_v3"])
def test_our_targets_pass_and_nothing_else_changes(release: str, model_type: str) -> None:
    check, patcher = validator(release), Patcher()
    captured = check  # as pydantic holds it: the function, not its name
    with pytest.raises(ValueError, match="is only supported for"):
        captured(config(model_type))
    patcher.for_fix("D1").replace_code(check, target_whitelist.with_names(check.__code__))
    captured(config(model_type))
    captured(config("llama"))
    with pytest.raises(ValueError, match="is only supported for"):
        captured(config("mamba"))
    assert patcher.revert() == []
    with pytest.raises(ValueError, match="is only supported for"):
        captured(config(model_type))


def test_code_without_a_list_is_refused() -> None:
    with pytest.raises(PatchConflict, match="0 lists of target types"):
        target_whitelist.with_names(config.__code__)
