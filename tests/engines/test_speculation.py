# SPDX-License-Identifier: Apache-2.0
"""Speculation from end to end on the installed release: the trained pair, draft for draft as the reference predicts.

``tests/engine`` looks at more, on the one release that it is written for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.drift.expected import number
from tests.engines.conftest import RELEASE, applies
from vllm_kimi_eagle3.reference import Drafter, SpeculationTrace, Target, greedy, speculate
from vllm_kimi_eagle3.regression.engine import EngineFailed, EngineRun, Request, counters, run_engine
from vllm_kimi_eagle3.tiny_kimi.materialize import HERE, materialize

SPECULATES = number(RELEASE) >= number("0.20.0")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not SPECULATES, reason=f"the CPU engine of {RELEASE} refuses every speculation"),
]
NO_MLA = "MLA is not supported on CPU"
needs_mla = pytest.mark.skipif(
    number(RELEASE) < number("0.29.0"), reason=f"{RELEASE}: no MLA on CPU, or one without a prefill backend (0.28.0)"
)
RIGHT, EARLY, DEFAULT = (4, 7, 9), (3, 6, 8), (2, 5, 7)
K, TOKENS, MAX_MODEL_LEN = 3, 32, 256
KIMI = "kimi_k25" if number(RELEASE) >= number("0.32.0") else "kimi_k25_legacy"
"""The configuration schema that this release reads."""
STOCK = EARLY if number(RELEASE) >= number("0.22.0") else DEFAULT
"""What V1 takes of nested output-rule ids: them, raw, or nothing at all."""
OUTPUT_RULE = {"kimi_eagle3": {"layer_rule": "output"}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return materialize(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    prompts = [item["prompt"] for item in json.loads((HERE / "heldout.json").read_text())]
    return [(list(prompt.encode()), TOKENS, []) for prompt in prompts[:4]]


@pytest.fixture(scope="module")
def predict(pair: dict[str, Path], requests: list[Request]) -> Callable[..., list[SpeculationTrace]]:
    target = Target.load(pair["deepseek_v3"])

    def predicted(kind: str, boundaries: tuple[int, ...]) -> list[SpeculationTrace]:
        drafter = Drafter.load(pair[f"eagle3_{kind}_boundary"], target)
        return [speculate(target, drafter, p, boundaries, K, n, max_model_len=MAX_MODEL_LEN) for p, n, _ in requests]

    return predicted


def serve(pair: dict[str, Path], requests: list[Request], target: str, drafter: str, **options: Any) -> EngineRun:
    rounds = [*([request] for request in requests), requests]
    options.setdefault("skip_tokenizer_init", "kimi" not in target)
    return run_engine(pair[target], rounds, drafter=pair[drafter], k=K, max_model_len=MAX_MODEL_LEN, **options)


def rate(traces: list[SpeculationTrace]) -> float:
    return sum(t.accepted for t in traces) / sum(t.drafted for t in traces)


def assert_predicted(run: EngineRun, traces: list[SpeculationTrace]) -> None:
    *single, batch = run.result["rounds"]
    for got, trace in zip(single, traces, strict=True):
        assert got["output_ids"] == [trace.output_ids]
        assert got["counters"] == counters(trace)
    assert batch["output_ids"] == [trace.output_ids for trace in traces]
    assert batch["counters"] == counters(*traces)


@pytest.fixture(scope="module")
def with_short(pair: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pair, and the GQA drafter with a configuration that says fewer positions than any request has."""
    folder = tmp_path_factory.mktemp("short") / "eagle3_gqa_short"
    shutil.copytree(pair["eagle3_gqa_nested"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    return {**pair, "eagle3_gqa_short": folder}


@pytest.mark.parametrize(
    ("target", "drafter"),
    [(KIMI, "gqa_nested"), ("deepseek_v3", "gqa_short"), pytest.param(KIMI, "mla_nested", marks=needs_mla)],
)
def test_right_layers(
    with_short: dict[str, Path], requests: list[Request], predict: Callable[..., Any], target: str, drafter: str
) -> None:
    """The short drafter needs D24's remedy, and below 0.27.0 D27's: without them, nothing is drafted."""
    pair = with_short
    assert min(len(prompt) + tokens for prompt, tokens, *_ in requests) > 32
    run = serve(pair, requests, target, f"eagle3_{drafter}", additional_config=OUTPUT_RULE)
    kind = drafter.split("_")[0]
    traces = predict(kind, RIGHT)
    assert_predicted(run, traces)
    assert rate(traces) > 0.6
    assert rate(traces) - rate(predict(kind, STOCK)) > 0.05
    reference = Target.load(pair["deepseek_v3"])
    for got, (prompt, tokens, _) in zip(run.result["rounds"], requests, strict=False):
        assert got["output_ids"] == [greedy(reference, prompt, tokens)]


def test_stock_takes_other_layers(pair: dict[str, Path], requests: list[Request], predict: Callable[..., Any]) -> None:
    """Red without the overlay: text stays right, and another set of layers is captured."""
    run = serve(pair, requests, "deepseek_v3", "eagle3_gqa_nested", overlay="stock")
    assert_predicted(run, predict("gqa", STOCK))


@pytest.fixture(scope="module")
def other_base(pair: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MLA drafter with another rotary base: its drafts are others, and worse."""
    folder = tmp_path_factory.mktemp("base") / "eagle3_mla_base"
    shutil.copytree(pair["eagle3_mla_boundary"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 50000.0}))
    return folder


@needs_mla
def test_mla_drafter_keeps_its_rotary_base(pair: dict[str, Path], requests: list[Request], other_base: Path) -> None:
    """D25: draft for draft with the base that its configuration has, and not with the usual one."""
    target = Target.load(pair["deepseek_v3"])

    def predicted(folder: Path) -> list[SpeculationTrace]:
        drafter = Drafter.load(folder, target)
        return [speculate(target, drafter, p, RIGHT, K, n, max_model_len=MAX_MODEL_LEN) for p, n, *_ in requests]

    traces = predicted(other_base)
    assert rate(traces) < rate(predicted(pair["eagle3_mla_boundary"])) - 0.02
    served = {**pair, "other base": other_base}
    assert_predicted(serve(served, requests, "deepseek_v3", "other base"), traces)


@pytest.mark.skipif(not applies("D25"), reason=f"{RELEASE} keeps an MLA drafter's rotary base")
@pytest.mark.parametrize(("overlay", "end"), [("stock", "KeyError: 'factor'"), ("on", NO_MLA)])
def test_the_mla_drafters_rope_is_built(pair: dict[str, Path], requests: list[Request], overlay: str, end: str) -> None:
    """D25 with Transformers 5; the CPU engine of these releases then ends for want of an attention kernel.

    With Transformers 4 stock vLLM goes on with a wrong base: tests/fixes/test_drafter_rope.py.
    """
    with pytest.raises(EngineFailed, match=end):
        serve(pair, requests, "deepseek_v3", "eagle3_mla_boundary", overlay=overlay)
