# SPDX-License-Identifier: Apache-2.0
"""D26 where vLLM itself shards the states between layers: tensor, data and experts parallel, four ranks, one server.

``tests/verify`` has two ranks that are made to do so, row by row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_kimi_eagle3.bench.client import Client
from vllm_kimi_eagle3.bench.serve import serve
from vllm_kimi_eagle3.regression.engine import fresh_cache

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.environ.get("ALL_STATES"), reason="minutes more: nox runs it, and ALL_STATES=1 says so here"
    ),
]
SHARDED = Path(__file__).parents[1] / "support" / "sharded"
RANKS = ["--tensor-parallel-size", "2", "--data-parallel-size", "2", "--enable-expert-parallel"]
ONE_TOKEN = ("a", "b", "\x05")
Ask = Callable[..., tuple[list[str], list[str]]]


@pytest.fixture(scope="module")
def ask(pair: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What a server answers to prompts of one token, and to longer ones."""
    folder = tmp_path_factory.mktemp("sharded")
    drafter = {"method": "eagle3", "model": str(pair["eagle3_gqa_boundary"]), "num_speculative_tokens": 3}

    def answers(overlay: str, *arguments: str) -> tuple[list[str], list[str]]:
        log = folder / f"{overlay} {len(arguments)}"
        environment = {
            "VLLM_KIMI_EAGLE3": overlay,
            "VLLM_CACHE_ROOT": str(fresh_cache(folder / "cache")),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "KIMI_EAGLE3_FORCE_SHARDS": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SHARDED), os.environ.get("PYTHONPATH")])),
        }
        options = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]
        options += ["--speculative-config", json.dumps(drafter), *arguments]
        with serve(str(pair["deepseek_v3"]), options, log, environment=environment) as url:
            client = Client(url, timeout=120)
            texts = [client.complete(prompt, 14).text for prompt in (*ONE_TOKEN, "the m", "a matrix is")]
            assert client.counters().accepted > 0
        assert ("a layer leaves a shard" in log.read_text(errors="replace")) == bool(arguments)
        return texts[: len(ONE_TOKEN)], texts[len(ONE_TOKEN) :]

    return answers


def test_the_text_is_that_of_one_rank(ask: Ask) -> None:
    one = ask("on")
    assert ask("on", *RANKS) == one
    short, long = ask("stock", *RANKS)
    assert long == one[1], "stock is right where a step has two tokens and more"
    assert all(a != b for a, b in zip(short, one[0], strict=True)), "the control: stock's text behind one token"
