# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from tiny_models import TARGETS, make_hf
from transformers import DeepseekV3ForCausalLM

from vllm_kimi_eagle3.reference import Target


@pytest.fixture(scope="session")
def target_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[DeepseekV3ForCausalLM, Path]]:
    made = {}
    for seed, (name, changes) in enumerate(TARGETS.items()):
        model, folder = make_hf(seed, **changes), tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        made[name] = model, folder
    return made


@pytest.fixture(scope="session")
def target(target_folders: dict[str, tuple[DeepseekV3ForCausalLM, Path]]) -> Target:
    return Target.load(target_folders["plain"][1])
