# SPDX-License-Identifier: Apache-2.0
"""A configuration that names another placeholder than its tokenizer, in either schema: the tokenizer's wins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from settings_pictures import (
    BOUNDARIES,
    DTYPE,
    EMBEDDING_BAR,
    MAX_MODEL_LEN,
    NEW_SCHEMA,
    OPTIONS,
    ROWS,
    TARGET,
    ask,
    scene,
)
from torch import Tensor

from vllm_kimi_eagle3.reference import Vision
from vllm_kimi_eagle3.regression.engine import EngineRun, run_engine, served_of
from vllm_kimi_eagle3.regression.pictures import about_a_picture
from vllm_kimi_eagle3.verify.compare import compare
from vllm_kimi_eagle3.verify.drive import Served
from vllm_kimi_eagle3.verify.oracle import CheckpointOracle

pytestmark = pytest.mark.engine
REQUESTS = [ask(about_a_picture(ROWS), scene(1))]
CONFIGS: dict[str, dict[str, Any]] = {
    "another id": {"image_token_id" if NEW_SCHEMA else "media_placeholder_token_id": 270},
    "only the old name": {"image_token_id": None, "media_placeholder_token_id": 266},
    "both names, disagreeing": {"image_token_id": 266, "media_placeholder_token_id": 271},
    "both names, neither right": {"image_token_id": 272, "media_placeholder_token_id": 271},
}


@pytest.fixture(scope="module", params=CONFIGS)
def run(
    request: pytest.FixtureRequest, pictures_pair: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> EngineRun:
    target = tmp_path_factory.mktemp("target") / "pictures"
    shutil.copytree(pictures_pair[TARGET], target)
    config = json.loads((target / "config.json").read_text())
    merged = {key: value for key, value in (config | CONFIGS[request.param]).items() if value is not None}
    (target / "config.json").write_text(json.dumps(merged))
    choice = {"kimi_eagle3": {"layer_rule": "output", "drafter_media": "embedding"}}
    return run_engine(
        target, [REQUESTS], drafter=pictures_pair["pictures_gqa"], k=2, additional_config=choice, **OPTIONS
    )


def test_all_parts_agree_on_the_tokenizer_s(
    run: EngineRun,
    pictures_pair: dict[str, Path],
    vision: Vision,
    rounded_vision: Vision | None,
    rounding_of: Callable[[list[Served], CheckpointOracle], Tensor | None],
) -> None:
    ids = run.result["placeholders"]
    if run.result["runner"] == "V1":
        assert ids == {"target": 266, "drafter": 266, "config": [266]}
    else:  # V2's drafters go by the mask and know no id; nor is there anybody to read the configuration's old name
        assert ids["target"] == 266 and ids["drafter"] is None and 266 in ids["config"]
    served = served_of(run.result["rounds"][0], REQUESTS, vision, rounded_vision)
    folders = pictures_pair["pictures"], pictures_pair["pictures_gqa"]
    oracle = CheckpointOracle(*folders, BOUNDARIES, getattr(torch, DTYPE), drafter_media="embedding")
    found = compare(
        served,
        oracle,
        BOUNDARIES,
        dtype=DTYPE,
        embedding_bar=EMBEDDING_BAR,
        floor=rounding_of(served, oracle),
        block_size=run.result["block_size"],
        max_model_len=MAX_MODEL_LEN,
    )
    assert found.ok if DTYPE == "float32" else found.inputs_ok, found.problems
