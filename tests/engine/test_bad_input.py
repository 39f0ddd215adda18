# SPDX-License-Identifier: Apache-2.0
"""What a user gets wrong is answered at config time, in one sentence, by the real configuration code of vLLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3.regression.engine import fresh_cache

pytestmark = pytest.mark.engine
CONFIGURE = """
import json, sys, traceback
from vllm.engine.arg_utils import EngineArgs
answers = {}
for name, arguments in json.load(open(sys.argv[1])).items():
    try:
        config = EngineArgs(**arguments).create_engine_config()
        answers[name] = {"ok": config.additional_config.get("kimi_eagle3", {})}
    except BaseException as error:
        frames = [f.filename for f in traceback.extract_tb(error.__traceback__)]
        answers[name] = {"error": str(error), "ours": [f for f in frames if "vllm_kimi_eagle3" in f]}
json.dump(answers, open(sys.argv[2], "w"))
"""
EAGLE = "eagle_config"
IDS = "eagle_aux_hidden_state_layer_ids"


def nested(ids: Any) -> dict[str, Any]:
    return {EAGLE: {IDS: ids, "use_aux_hidden_state": True}}


# What is wrong, and words that its sentence must hold: what was found, and what was expected or is to be done.
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "id beyond the target": ("edit", nested([3, 6, 12]), ["12", "10"]),
    "negative id": ("edit", nested([-3, 6, 8]), ["-3"]),
    "ids that are no list": ("edit", nested("3,6,8"), ["3,6,8"]),
    "an id that is no number": ("edit", nested([3, "six", 8]), ["six"]),
    "duplicate ids": ("edit", nested([3, 3, 8]), ["3"]),
    "ids out of order": ("edit", nested([8, 6, 3]), ["[8, 6, 3]"]),
    "too few ids for the fc": ("edit", nested([3, 8]), ["2", "768"]),
    "too many ids for the fc": ("edit", nested([2, 3, 6, 8]), ["4", "768"]),
    "malformed config": ("write", {"text": '{"architectures": ['}, ["config.json"]),
    "config that is no object": ("write", {"text": "[1, 2]"}, ["config.json"]),
    "config that is not UTF-8": ("write", {"text": "\udcff\udcfe"}, ["config.json"]),
    "missing config": ("remove", {}, ["config.json"]),
    "unknown rule": ("choose", {"layer_rule": "input"}, ["input", "output", "boundary"]),
    "unknown key": ("choose", {"layers": [1]}, ["layers", "layer_ids"]),
    "ids of the user's beyond the target": ("choose", {"layer_ids": [4, 7, 11]}, ["11", "10"]),
    "pictures for a target without eyes": ("choose", {"drafter_media": "embedding"}, ["drafter_media", "pictures"]),
    "an unknown way to see pictures": ("show", {"drafter_media": "pixels"}, ["pixels", "placeholder", "embedding"]),
}


@pytest.fixture(scope="module")
def answers(pair: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bad")
    jobs: dict[str, Any] = {}
    for name, (kind, detail, _) in CASES.items():
        drafter = folder / name.replace(" ", "-").replace("'", "")
        shutil.copytree(pair["eagle3_gqa_nested"], drafter)
        config = drafter / "config.json"
        if kind == "edit":
            config.write_text(json.dumps({**json.loads(config.read_text()), **detail}))
        elif kind == "write":
            config.write_bytes(detail["text"].encode(errors="surrogateescape"))
        elif kind == "remove":
            config.unlink()
        choice = {"kimi_eagle3": detail} if kind in ("choose", "show") else {}
        jobs[name] = server(pair, drafter, additional_config=choice)
        if kind == "show":
            jobs[name]["model"] = str(pair["kimi_k25"])
    jobs["right"] = server(pair, pair["eagle3_gqa_nested"])
    # A related target that the overlay does not serve.
    related = folder / "related"
    shutil.copytree(pair["deepseek_v3"], related)
    config = json.loads((related / "config.json").read_text())
    (related / "config.json").write_text(json.dumps({**config, "architectures": ["DeepseekV2ForCausalLM"]}))
    jobs["related"] = {**server(pair, pair["eagle3_gqa_boundary"]), "model": str(related)}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURE, str(folder / "jobs.json"), str(folder / "answers.json")],
        env={**os.environ, "VLLM_CACHE_ROOT": str(fresh_cache(folder / "cache")), "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "answers.json").read_text())
    found["log"] = done.stdout + done.stderr
    return found


def server(pair: dict[str, Path], drafter: Path, **more: Any) -> dict[str, Any]:
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    model = {"model": str(pair["deepseek_v3"]), "dtype": "float32", "max_model_len": 256}
    return {**model, "speculative_config": speculative, **more}


@pytest.mark.parametrize("name", list(CASES))
def test_one_clear_sentence(answers: dict[str, Any], name: str) -> None:
    answer = answers[name]
    assert "error" in answer, f"accepted: {answer}"
    lines = [line for line in answer["error"].splitlines() if "vllm-kimi-eagle3" in line]
    assert len(lines) == 1, answer["error"]
    for word in CASES[name][2]:
        assert word in lines[0]
    assert answer["ours"] == [], "a traceback of ours"


def test_the_same_server_with_a_right_drafter_is_accepted(answers: dict[str, Any]) -> None:
    assert answers["right"]["ok"]["plan"]["boundaries"] == [3, 6, 8]
    assert "ambiguous" in answers["log"]


def test_a_related_target_is_left_alone_and_its_user_told(answers: dict[str, Any], pair: Callable[..., Any]) -> None:
    assert answers["related"].get("ok") == {}, answers["related"]
    assert "vllm-kimi-eagle3 does not serve the target DeepseekV2ForCausalLM" in answers["log"]
