# SPDX-License-Identifier: Apache-2.0
"""What the installed release's CPU engine lets a drafter see of our targets, against the plain torch reference.

Red and green by release: what ``tests/drift/expected.py`` says is broken must be broken without the overlay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.conftest import PROMPT, RELEASE, applies
from tests.engines.tiny import IDS
from vllm_kimi_eagle3.reference import Target

pytestmark = pytest.mark.engine
KINDS = ("deepseek_v3", "kimi_k25")
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]) -> Target:
    return Target.load(models["deepseek_v3"])


def boundaries(reference: Target, result: dict[str, Any]) -> torch.Tensor:
    """(L + 1, T, H): the reference's streams over the very tokens that the engine saw."""
    return reference.forward([*PROMPT, *result["output_ids"][:-1]]).boundaries


def rows(seen: list[dict[str, Any]], index: int) -> torch.Tensor:
    """(T, H): one captured stream over the request, in the order of positions."""
    assert [p for step in seen for p in step["positions"].tolist()] == list(
        range(sum(len(s["positions"]) for s in seen))
    )
    return torch.cat([step["states"][index] for step in seen]).float()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def assert_captured(reference: Target, result: dict[str, Any]) -> None:
    """Each captured stream is its boundary, and neither of the two beside it."""
    streams = boundaries(reference, result)
    for index, boundary in enumerate(IDS):
        found = rows(result["seen"], index)
        assert error(found, streams[boundary]) < 2e-5
        assert error(found, streams[boundary - 1]) > 0.05
        assert error(found, streams[boundary + 1]) > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_server_is_configured(target_run: Run, kind: str) -> None:
    result = target_run(kind, "on", load_drafter=True)
    assert "config error" not in result, result["config error"]
    assert tuple(result["plan"]["boundaries"]) == IDS
    assert set(result["states"].values()) <= {"APPLIED", "RETIRED", "NOT_APPLICABLE", "PENDING"}


@pytest.mark.parametrize("kind", KINDS)
def test_boundaries_are_captured(target_run: Run, reference: Target, kind: str) -> None:
    result = target_run(kind, "on", load_drafter=True)
    assert result["supports_eagle3"]
    assert_captured(reference, result)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_the_references(target_run: Run, reference: Target, kind: str) -> None:
    result = target_run(kind, "on", load_drafter=True)
    ids = [*PROMPT, *result["output_ids"][:-1]]
    assert reference.forward(ids).logits.argmax(-1)[len(PROMPT) - 1 :].tolist() == result["output_ids"]


def test_compiled_target_captures_the_same(target_run: Run, reference: Target) -> None:
    result = target_run("deepseek_v3", "on", enforce_eager=False)
    assert_captured(reference, result)


@pytest.mark.skipif(not applies("D1"), reason=f"{RELEASE} lets our targets speculate")
def test_stock_refuses(target_run: Run) -> None:
    result = target_run("deepseek_v3", "off")
    assert "only supported for" in result["config error"]
    assert not result["supports_eagle3"]
    assert not result["seen"]


@pytest.mark.skipif(not applies("D1"), reason=f"{RELEASE} has MLA drafters")
def test_mla_drafter_is_refused_in_one_sentence(target_run: Run) -> None:
    message = target_run("deepseek_v3", "on", load_drafter=True)["mla config error"]
    assert "this drafter has MLA attention (Eagle3DeepseekV2ForCausalLM), which vLLM serves from 0.18.0 on" in message


@pytest.mark.parametrize("kind", KINDS)
def test_drafter_finds_what_it_borrows(target_run: Run, kind: str) -> None:
    """Embeddings and lm_head of the target, in either runner's own code; and the size of its cache blocks."""
    loaded = target_run(kind, "on", load_drafter=True)["drafter"]
    assert loaded["V1 shares lm_head"], loaded
    if "V2 error" not in loaded or applies("D12"):
        assert loaded["V2 shares lm_head"], loaded
    if applies("D10"):
        assert loaded["V1 block size"] == 32


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_fixes_it_does_not(target_run: Run, kind: str) -> None:
    without = target_run(kind, "on", load_drafter=True)["drafter without"]
    if kind == "kimi_k25" and applies("D4"):
        assert "image_token_index" in without["V1 error"]
    elif applies("D10"):
        assert without["V1 block size"] == 64
    else:
        assert without["V1 shares lm_head"]
    if kind == "kimi_k25" and applies("D12"):
        assert not without["V2 shares lm_head"]


def test_float16_states_have_their_true_size(target_run: Run, reference: Target) -> None:
    """In float16 a random router may part from float32's, so rows are judged one by one, at the first boundary."""
    label = "D16 float16-scale"
    result = target_run("deepseek_v3", "on", dtype="float16", revert=(label,))
    assert result["states"][label] == "APPLIED"
    want = boundaries(reference, result)[IDS[0]]
    size = want.abs().max()
    found = (rows(result["seen"], 0) - want).abs().amax(-1) / size
    assert found.median() < 0.01
    scaled = (rows(result[f"seen without {label}"], 0) - want).abs().amax(-1) / size
    assert scaled.median() > 0.2


def test_forced_mla_backend_is_not_forced_on_the_drafter(target_run: Run) -> None:
    result = target_run("deepseek_v3", "on", load_drafter=True)
    if "backends" not in result:
        pytest.skip(f"MLA is off on the CPU engine of {RELEASE}")
    assert set(result["backends"]) == {"None"}
    assert set(result["backends without"]) == {"TRITON_MLA"}
