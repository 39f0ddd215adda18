# SPDX-License-Identifier: Apache-2.0
"""D8: other layers, another compile-cache key; and other layers really captured from one warm cache.

Red where stock is wrong, by the releases' own ``SpeculativeConfig.compute_hash``: their engines need a GPU.
Green on the real engine: compiled, two runs in one cache directory, each draft for draft the reference's.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import releases

from vllm_kimi_eagle3.layers import config_updates, resolve
from vllm_kimi_eagle3.reference import SpeculationTrace
from vllm_kimi_eagle3.regression.engine import Request, counters, fresh_cache, run_engine

IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 10, "hidden_size": 256, "vocab_size": 320}
DRAFTER = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 256, "vocab_size": 320}


def stock_hash(release: str, drafter: dict[str, Any]) -> str:
    """The release's own key for a drafter's configuration. Only the hash of the whole drafter is left out (0.26+)."""
    compute = releases.function(release, "config/speculative.py", "compute_hash", "SpeculativeConfig")
    compute.__globals__["safe_hash"] = hashlib.md5
    draft = SimpleNamespace(hf_config=SimpleNamespace(**drafter))
    return compute(SimpleNamespace(method="eagle3", draft_model_config=draft))


def nested(ids: list[int]) -> dict[str, Any]:
    return {**DRAFTER, "eagle_config": {IDS: ids}}


@pytest.mark.parametrize("release", ["0.15.0", "0.16.0", "0.17.1", "0.22.0", "0.25.1"])
def test_stock_keys_do_not_know_nested_ids(release: str) -> None:
    assert stock_hash(release, nested([3, 6, 8])) == stock_hash(release, nested([2, 5, 7]))


@pytest.mark.parametrize("release", ["0.17.1", "0.22.0", "0.25.1"])
def test_from_0_17_on_the_plan_written_into_the_drafter_reaches_the_key(release: str) -> None:
    keys = set[str]()
    for rule in ("output", "boundary"):
        drafter = nested([3, 6, 8])
        plan = resolve(TARGET, drafter, layer_rule=rule)
        keys.add(stock_hash(release, {**drafter, **config_updates(plan, drafter)}))
    assert len(keys) == 2


@pytest.mark.parametrize("release", ["0.15.0", "0.16.0"])
def test_up_to_0_16_even_top_level_ids_are_not_in_the_key(release: str) -> None:
    """Which is why the plan goes into additional_config, too."""
    assert stock_hash(release, {**DRAFTER, IDS: [4, 7, 9]}) == stock_hash(release, {**DRAFTER, IDS: [2, 5, 7]})


KEYS = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
answers = {}
for name, arguments in json.load(open(sys.argv[1])).items():
    config = EngineArgs(**arguments).create_engine_config()
    answers[name] = {"key": config.compute_hash(), "again": config.compute_hash()}
    if name == "changed late":
        config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = [2, 5, 7]
        from vllm_kimi_eagle3.activation import prepare_worker
        try:
            prepare_worker(config)
        except ValueError as error:
            answers[name]["error"] = str(error)
json.dump(answers, open(sys.argv[2], "w"))
"""


@pytest.mark.engine
def test_keys_of_the_installed_release(pair: dict[str, Path], tmp_path: Path) -> None:
    def server(**choice: Any) -> dict[str, Any]:
        speculative = {"method": "eagle3", "model": str(pair["eagle3_gqa_nested"]), "num_speculative_tokens": 3}
        model = {"model": str(pair["deepseek_v3"]), "dtype": "float32", "max_model_len": 256}
        return {**model, "speculative_config": speculative, "additional_config": {"kimi_eagle3": choice}}

    jobs = {
        "output": server(layer_rule="output"),
        "output again": server(layer_rule="output"),
        "boundary": server(layer_rule="boundary"),
        "explicit": server(layer_ids=[2, 5, 7]),
        "changed late": server(layer_rule="output"),
    }
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    answers: dict[str, dict[str, Any]] = {}
    for overlay in ("on", "stock"):
        cache = str(fresh_cache(tmp_path / overlay, overlay))
        done = subprocess.run(
            [sys.executable, "-c", KEYS, str(tmp_path / "jobs.json"), str(tmp_path / f"{overlay}.json")],
            env={**os.environ, "VLLM_KIMI_EAGLE3": overlay, "VLLM_CACHE_ROOT": cache},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answers[overlay] = json.loads((tmp_path / f"{overlay}.json").read_text())
    on, stock = answers["on"], answers["stock"]
    assert all(answer["key"] == answer["again"] for answer in on.values())
    assert on["output"]["key"] == on["output again"]["key"]
    # Other layers, or the same ones without the overlay: another key.
    assert len({on["output"]["key"], on["boundary"]["key"], on["explicit"]["key"], stock["boundary"]["key"]}) == 4
    assert "the drafter's layers were changed to [2, 5, 7] after boundaries [4, 7, 9]" in on["changed late"]["error"]
    assert "error" not in stock["changed late"]


@pytest.mark.engine
def test_two_runs_in_one_cache_capture_their_own_layers(
    pair: dict[str, Path],
    requests: list[Request],
    predict: Callable[..., list[SpeculationTrace]],
    tmp_path: Path,
) -> None:
    for boundaries in ((4, 7, 9), (2, 5, 7)):
        run = run_engine(
            pair["deepseek_v3"],
            [requests[:1]],
            drafter=pair["eagle3_gqa_nested"],
            cache=fresh_cache(tmp_path / "cache"),
            additional_config={"kimi_eagle3": {"layer_ids": list(boundaries)}},
            enforce_eager=False,
        )
        (trace, *_) = predict("gqa", boundaries)
        assert run.result["rounds"][0]["output_ids"] == [trace.output_ids]
        assert run.result["rounds"][0]["counters"] == counters(trace)
    assert list((tmp_path / "cache").rglob("torch_compile_cache")), "nothing was compiled: the test would prove nothing"
    first, other = (predict("gqa", b)[0] for b in ((4, 7, 9), (2, 5, 7)))
    assert counters(first) != counters(other)
