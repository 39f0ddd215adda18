# SPDX-License-Identifier: Apache-2.0
"""Boundary k is the stream that enters layer k: every subset of boundaries, told by signatures, on the real engine.

Boundary 0, the embeddings, cannot be captured by vLLM's own loop, where there is no residual yet (D23): its error is
here too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from settings import DTYPE, ENGINE
from toy_target import sign_layers

from vllm_kimi_eagle3.regression.engine import run_engine
from vllm_kimi_eagle3.regression.settings import PROMPTS

pytestmark = pytest.mark.engine
LAYERS = 10
CONFIGURED = {"deepseek_v3": [1, 5, 10], "kimi_k25": [0, 5, 10]}


@pytest.fixture(scope="module", params=list(CONFIGURED))
def toys(request: pytest.FixtureRequest, pair: dict[str, Path], tmp_path_factory: Any) -> dict[str, Any]:
    configured = CONFIGURED[request.param]
    target = sign_layers(pair[request.param], tmp_path_factory.mktemp("toy") / "target")
    done = run_engine(
        target,
        [[(PROMPTS[0][:9], 4, [])]],
        drafter=pair["eagle3_gqa_boundary"],
        max_model_len=64,
        dtype=DTYPE,
        additional_config={"kimi_eagle3": {"layer_ids": configured, "layer_rule": "boundary"}},
        toys={"layers": LAYERS, "prompt": PROMPTS[0][:5]},
        **ENGINE,
    )
    return done.result | {"asked": configured}


def test_layers_named_by_the_user_are_captured(toys: dict[str, Any]) -> None:
    assert toys["captured"] == toys["toys"]["configured"] == toys["asked"]
    for call in toys["rounds"][0]["calls"]:
        states = call["rows"].unflatten(1, (3, -1))[..., 1 : LAYERS + 1] != 0
        for i, boundary in enumerate(toys["asked"]):
            assert states[:, i].sum(-1).tolist() == [boundary] * len(states)


def test_every_subset_of_boundaries_is_captured_exactly(toys: dict[str, Any]) -> None:
    found = toys["toys"]["found"]
    assert len(found) == 2 ** (LAYERS + 1) - 1
    assert [asked for asked, got in found if asked != got] == []


def test_stock_vllm_cannot_capture_the_embeddings(toys: dict[str, Any]) -> None:
    assert toys["toys"]["stock"].startswith("TypeError")


def test_a_signature_one_layer_off_is_seen(toys: dict[str, Any]) -> None:
    """The decoder of signatures itself: no two boundaries have the same one."""
    asked = {boundary for subset, _ in toys["toys"]["found"] for boundary in subset}
    told = {pair for subset, signs in toys["toys"]["found"] for pair in zip(subset, signs, strict=True)}
    assert asked == set(range(LAYERS + 1))
    assert len({sign for _, sign in told}) == len(told) == LAYERS + 1
