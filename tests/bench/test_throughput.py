# SPDX-License-Identifier: Apache-2.0
"""``bench/gpu/throughput.py``: bars, shapes, and the reading of a profile; the script itself, tiny, on the CPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "bench" / "gpu"


def script(name: str) -> Any:
    """A script of bench/gpu as a module."""
    spec = importlib.util.spec_from_file_location(f"bench_gpu_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


report, profile, shapes = script("throughput_report"), script("step_profile"), script("shapes")


# The report ----------------------------------------------------------------------------------------------------------


def quartiles(median: float) -> dict[str, float]:
    return {"median": median, "q1": median, "q3": median, "mean": median}


def cell(context: int, concurrency: int, step: float, tok_s: float = 0.0, steps: int = 100) -> dict[str, Any]:
    return {
        "context": context,
        "concurrency": concurrency,
        "step_ms": quartiles(step),
        "steps": steps,
        "tok_s": tok_s,
        "drafts": 100,
        "accepted_by_position": [50, 0, 0],
    }


def result(mode: str, variant: str, cells: list[dict[str, Any]], vllm: str = "0.26.0", **other: Any) -> dict[str, Any]:
    settings = {"layers": 16, "tiny": False, "acceptance": None, "graphs": "FULL_DECODE_ONLY", "compile": False}
    return {
        "format": report.FORMAT,
        "mode": mode,
        "variant": variant,
        "vllm": vllm,
        "hardware": "one",
        "file": f"{mode}-{vllm}-{variant}.json",
        "settings": settings | {"k": None if variant == "none" else 3, "about": "a shape"} | other.pop("settings", {}),
        "cells": cells,
    } | other


def context_runs(overlay: float = 8.0, stock: float = 40.0, upstream: float = 8.0) -> list[dict[str, Any]]:
    return [
        result("context", "none", [cell(512, 1, 2.0)]),
        result("context", "stock", [cell(512, 1, stock)]),
        result("context", "overlay", [cell(512, 1, overlay)], "0.26.0+cu129"),
        result("context", "stock", [cell(512, 1, upstream)], "0.33.0"),
    ]


def held(results: list[dict[str, Any]], word: str = "") -> list[bool | None]:
    return [b["holds"] for b in report.bars(results, "0.33.0") if word in b["bar"]]


def test_bars_of_a_context() -> None:
    assert held(context_runs()) == [True, True]
    assert held(context_runs(overlay=10.0, upstream=10.0)) == [True, True]
    assert held(context_runs(overlay=10.1, upstream=10.0)) == [False, True]
    assert held(context_runs(overlay=8.0, upstream=6.9)) == [True, False]
    # What was not measured, or too little, holds no bar and breaks none.
    assert held(context_runs()[:3]) == [True, None]
    few = context_runs()
    few[1]["cells"][0]["steps"] = 49
    assert held(few) == [None, True]


def share_runs(overlay: float, upstream: float, stock: float = 20.0, step: float = 10.0) -> list[dict[str, Any]]:
    def run(variant: str, speed: float, vllm: str = "0.26.0") -> dict[str, Any]:
        many = cell(2000, 16, 1.0, 1.0)  # only single requests have bars
        return result("share", variant, [cell(2000, 1, step, speed), many], vllm)

    return [run("stock", stock), run("overlay", overlay), run("stock", upstream, "0.33.0")]


def test_bars_of_a_share() -> None:
    assert held(share_runs(80.0, 88.0), "concurrency 1: overlay") == [True, True]
    assert held(share_runs(79.0, 80.0), "concurrency 1: overlay") == [False, True]
    assert held(share_runs(80.0, 90.0), "concurrency 1: overlay") == [True, False]


def test_bars_of_the_cost_and_its_control() -> None:
    def cost(ratio: float, control: float, steps: int = 300) -> list[dict[str, Any]]:
        one = {"batch": 8, "ratio": ratio, "steps": steps, "control": {"ratio": control, "steps": steps}}
        return [result("cost", "both", [one])]

    assert held(cost(1.01, 1.05)) == [True, True]
    assert held(cost(1.011, 1.05)) == [False, True]
    # A comparison that can't see a slower engine has shown nothing.
    assert held(cost(1.0, 1.01)) == [True, False]
    assert held(cost(1.0, 1.05, steps=20)) == [None, None]


def test_predictions_are_of_step_times_and_acceptance() -> None:
    # 100 steps/s and 1.5 tokens a step are 150 tok/s; against 5 ms a plain step 0.75 of its 200 tok/s.
    spec, plain = cell(2000, 1, 10.0, 150.0), cell(2000, 1, 5.0, 200.0)
    runs = [result("share", "none", [plain]), result("share", "overlay", [spec])]
    found = {p["what"]: p for p in report.predictions(runs)}
    assert found["tok/s"]["predicted"] == pytest.approx(150) and found["tok/s"]["off"] == pytest.approx(0)
    assert found["speed-up"]["predicted"] == pytest.approx(0.75) == found["speed-up"]["measured"]
    assert found["speed-up"]["break_even"] == pytest.approx(2.0)
    assert held(runs, "predicted") == [True, True]
    spec["tok_s"] = 170.0
    assert held(runs, "predicted") == [False, False]
    # Where acceptance was asked for, that is what predicts.
    synthetic = {"synthetic": True, "speculative": {"synthetic_acceptance_rates": [0.65, 0.40, 0.25]}}
    (only,) = report.predictions([result("share", "overlay", [cell(2000, 1, 10.0, 230.0)], **synthetic)])
    assert only["predicted"] == pytest.approx(230) and only["break_even"] is None


@pytest.mark.parametrize("name", ["layers", "graphs", "acceptance"])
def test_what_differs_is_not_compared(name: str) -> None:
    runs = context_runs()
    runs[2]["settings"][name] = "other"
    with pytest.raises(ValueError, match=f"has {name} = other"):
        report.bars(runs, "0.33.0")


def test_the_report_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(runs: list[dict[str, Any]]) -> list[Path]:
        for run in runs:
            (tmp_path / run["file"]).write_text(json.dumps(run))
        return [tmp_path / run["file"] for run in runs]

    assert report.main(write(context_runs()), "0.33.0") == 0
    assert "| 0.26.0, step at context 512: overlay / stock | 0.200 | at most 0.25 | yes |" in capsys.readouterr().out
    assert report.main(write(context_runs(overlay=30.0)), "0.33.0", as_json=True) == 1
    assert [b["holds"] for b in json.loads(capsys.readouterr().out)["bars"]] == [False, False]
    for text in ("{", "[]", '{"format": "else"}'):
        (tmp_path / "bad.json").write_text(text)
        assert report.main([tmp_path / "bad.json"], "0.33.0") == 2
        assert capsys.readouterr().err.startswith(f"throughput: {tmp_path}/bad.json ")
    assert report.main([tmp_path / "none.json"], "0.33.0") == 2


# Shapes --------------------------------------------------------------------------------------------------------------


def test_layers_fill_the_gpu_and_no_more() -> None:
    free = 148 * 10**9
    shape = shapes.shape_of("share", tiny=False)
    shapes.fit(shape, free=free)
    layers = shape.target["num_hidden_layers"]
    rest, layer = shape.weight_bytes()
    used = rest + (layers - 1) * layer + shape.cache_bytes(layers) + shapes.RESERVED
    assert 20 < layers < 40 and used - layer < free < used + layer
    # An expert of a rank: three matrices of 7168 by 256 in bf16; 384 of them, and a shared one, are most of a layer.
    assert 385 * 3 * 7168 * 256 * 2 < layer < 1.05 * 385 * 3 * 7168 * 256 * 2
    assert shape.drafter["eagle_aux_hidden_state_layer_ids"] == [2, layers // 2, layers - 3]
    shapes.fit(shape, layers=9, free=free)
    assert shape.target["num_hidden_layers"] == 9
    with pytest.raises(ValueError, match="too little for 7 layers"):
        shapes.fit(shape, free=30 * 10**9)


# Where a step's time goes --------------------------------------------------------------------------------------------


def test_a_trace_is_added_up_by_range() -> None:
    def span(name: str, begin: int, end: int) -> dict[str, Any]:
        return {"cat": "user_annotation", "name": f"step:{name}", "ts": begin, "dur": end - begin, "tid": 1}

    def launch(at: int, correlation: int, tid: int = 1) -> dict[str, Any]:
        return {"cat": "cuda_runtime", "ts": at, "dur": 1, "tid": tid, "args": {"correlation": correlation}}

    def kernel(begin: int, end: int, correlation: int) -> dict[str, Any]:
        return {"cat": "kernel", "ts": begin, "dur": end - begin, "tid": 7, "args": {"correlation": correlation}}

    events = [
        span("engine", 0, 1000),
        span("prepare", 100, 600),
        span("verify", 200, 500),
        span("draft", 700, 900),
        {"cat": "user_annotation", "name": "somebody's", "ts": 0, "dur": 5, "tid": 1},
        launch(150, 1),
        launch(250, 2),
        launch(750, 3),
        launch(750, 4, tid=2),  # another thread's
        kernel(160, 260, 1),
        kernel(300, 700, 2),
        kernel(350, 400, 2),  # at the same time as the one before
        kernel(800, 900, 3),
        kernel(900, 910, 4),
    ]
    found = profile.read_trace(events)
    assert found["steps"] == 1 and found["wall_ms"] == 1.0
    assert found["gpu_busy"] == pytest.approx((100 + 400 + 100 + 10) / 1000)
    rows = found["rows"]
    assert {n: round(r["gpu_ms"] * 1000) for n, r in rows.items()} == {
        "verify": 450,
        "prepare": 100,
        "draft": 100,
        "elsewhere": 10,
        "engine": 0,
    }
    assert {n: round(r["idle_ms"] * 1000) for n, r in rows.items() if r["idle_ms"]} == {"verify": 40, "draft": 100}
    assert [round(rows[n]["host_ms"] * 1000) for n in ("engine", "prepare", "verify", "draft")] == [300, 200, 300, 200]
    with pytest.raises(ValueError, match="no step"):
        profile.read_trace(events[1:])


def test_ranges_come_off_again() -> None:
    class Drafter:
        def propose(self) -> int:
            return 5

    class Runner:
        drafter = Drafter()

        def _sample(self) -> int:
            return self.drafter.propose()

        sample = _sample

    runner = Runner()
    with profile.ranges(runner):
        assert runner._sample() == 5
        # V1's own method stands for what would be V2's.
        assert set(vars(runner)) == {"_sample"} and set(vars(runner.drafter)) == {"propose"}
    assert not vars(runner) and not vars(runner.drafter)


TURN = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import throughput
name = sys.argv[2]
time.sleep(0.5 * int(name))  # the others start later
throughput.take_turn(Path("meet"), 3, name)
began = time.monotonic()
time.sleep(0.3)
print(began, time.monotonic())
"""


def test_runs_that_meet_take_turns(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TURN, str(SCRIPTS)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    processes = [
        subprocess.Popen([*command, str(i)], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    spans = sorted(tuple(map(float, process.communicate(timeout=60)[0].split())) for process in processes)
    # Nobody measures before the last one is there, nor while another one does.
    arrived = max((tmp_path / "meet" / f"{i}.here").stat().st_mtime for i in range(3))
    assert spans[0][0] - time.monotonic() >= arrived - time.time() - 0.1
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), spans


# The script itself ---------------------------------------------------------------------------------------------------


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPTS / "throughput.py"), "--tiny", "--out", str(out), *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.engine
def test_cells_on_the_engine(tmp_path: Path) -> None:
    found = run(tmp_path, "--mode", "share", "--variant", "overlay", "--contexts", "64", "--profile")
    assert found["settings"]["k"] == 3 and found["vllm"].startswith("0.") and found["not_run"] == []
    assert [(c["context"], c["concurrency"]) for c in found["cells"]] == [(64, 1), (64, 2)]
    for measured in found["cells"]:
        # Each request's verify step brings the target's own token and the accepted ones.
        assert measured["drafts"] == measured["steps"] * measured["concurrency"]
        assert measured["tokens"] == measured["drafts"] + sum(measured["accepted_by_position"])
        assert measured["tok_s"] == pytest.approx(measured["tokens"] / measured["seconds"])
        step = measured["step_ms"]
        assert 0 < step["q1"] <= step["median"] <= step["q3"]
        assert step["mean"] * measured["steps"] == pytest.approx(1000 * measured["seconds"])
        assert measured["profile"]["rows"]["verify"]["calls"] == measured["profile"]["rows"]["draft"]["calls"] == 1
    assert report.main([tmp_path / "result.json"], "0.33.0") == 0


@pytest.mark.engine
def test_turns_of_two_engines_see_a_slower_one(tmp_path: Path) -> None:
    found = run(tmp_path, "--mode", "cost", "--concurrency", "1", "--tamper", "2")
    (measured,) = found["cells"]
    assert measured["steps"] == 36 and measured["stock_ms"]["median"] > 0
    assert measured["control"]["ratio"] > 1.6 * measured["ratio"]
