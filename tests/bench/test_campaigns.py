# SPDX-License-Identifier: Apache-2.0
"""What the GPU campaigns make of what they saw: each verdict is right, and each fault turns it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from vllm_kimi_eagle3.regression.engine import EngineFailed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "gpu"))

import campaign
import cells
import end_to_end
import soak
import two_gpus

LOOKS = [{"host_mib": 1000.0, "gpu_mib": 900.0, "accepted": 0.7 + 0.01 * (i % 3)} for i in range(40)]
TEXT = [(1, 2, 3, 4)] * 5


def grown(key: str, by: float) -> list[dict[str, float]]:
    return [{**look, key: look[key] * (1 + by * i / 40)} for i, look in enumerate(LOOKS)]


def test_a_steady_server_is_right() -> None:
    found = soak.verdict(LOOKS, [], TEXT, TEXT, TEXT)
    assert found["ok"] and found["text_the_same_before_and_after"]


@pytest.mark.parametrize(
    ("looks", "errors", "after"),
    [
        (grown("host_mib", 0.1), [], TEXT),
        (grown("gpu_mib", 0.1), [], TEXT),
        (grown("accepted", -0.2), [], TEXT),
        *(([look | {key: 0.0} for look in LOOKS], [], TEXT) for key in LOOKS[0]),
        (LOOKS, ["connection reset"], TEXT),
        (LOOKS, [], [(1, 9, 9, 9)] * 5),
    ],
    ids=[
        *("host memory", "GPU memory", "acceptance"),
        *("host memory not seen", "GPU memory not seen", "nothing accepted"),
        *("an error", "text"),
    ],
)
def test_what_a_soak_is_to_find(looks: list[dict[str, float]], errors: list[str], after: list[Any]) -> None:
    assert not soak.verdict(looks, errors, TEXT, TEXT, after)["ok"]


BOTH = "EngineCore_DP0 pid=1", "EngineCore_DP1 pid=2"


def server(rate: float, *said_by: str) -> dict[str, Any]:
    text = {"text": TEXT, "text_behind_one_token": TEXT[:2]}
    return {"ok": True, "acceptance_rate": rate, "drafted": 90, **text, "boundaries_said_by": list(said_by)}


@pytest.mark.parametrize(
    ("two", "right"),
    [
        (server(0.71, *BOTH), True),
        (server(0.71, "VllmWorker-0 pid=1", "VllmWorker-0 pid=2", "MainProcess pid=3"), True),
        (server(0.71, "EngineCore_DP0 pid=1", "APIServer pid=3"), False),
        (server(0.71, "VllmWorker-0 pid=1", "ApiServer_0 pid=3"), False),
        (server(0.60, *BOTH), False),
        (server(0.71, *BOTH) | {"text": [(1, 2, 3, 9)] * 5}, True),
        (server(0.71, *BOTH) | {"text": [(1, 8, 9, 9)] * 5}, False),
        (server(0.71, *BOTH) | {"text_behind_one_token": [(1, 8, 9, 9)] * 2}, False),
        (server(0.71, *BOTH) | {"drafted": 0}, False),
    ],
    ids=[
        "both engines",
        "both engines' workers",
        "one engine alone",
        "one worker alone",
        "less accepted",
        "a near-tie",
        "other text",
        "other text behind one token",
        "nothing drafted",
    ],
)
def test_data_parallel_is_held_to_one_engine(two: dict[str, Any], right: bool) -> None:
    results = {"V2, served by one": server(0.72, "EngineCore pid=1"), "V2, DP 2": two}
    two_gpus.compared(results)
    assert results["V2, DP 2"]["ok"] is right
    assert results["V2, served by one"]["ok"] and (two["tokens_equal_to_one"] == 1) is (two["text"] == TEXT)


def test_every_cell_is_there_once_and_stock_stands_between() -> None:
    every = cells.cells(["V2", "V1"])
    names = [cell.name for cell in every]
    assert len(set(names)) == len(names)
    for runner in ("V1", "V2"):
        assert [cell.overlay for cell in every if cell.chain == runner] == ["on", "on", "stock", "on"]
        for backend in cells.BACKENDS:
            assert {f"{runner}, {backend}, {mode}" for mode in cells.MODES} <= set(names)


NOT_VALID = "ValueError: Selected backend CUTLASS_MLA is not valid for this configuration. Reason: ['no such GPU']"


@pytest.mark.parametrize(
    ("backend", "error", "right"),
    [
        ("CUTLASS_MLA", NOT_VALID, True),
        ("CUTLASS_MLA", "RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("TRITON_MLA", NOT_VALID, False),
    ],
    ids=["another GPU's", "another GPU's that fails otherwise", "one that has to run"],
)
def test_only_vllm_says_that_a_backend_is_not_this_gpu_s(
    monkeypatch: pytest.MonkeyPatch, backend: str, error: str, right: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise EngineFailed(error)

    monkeypatch.setattr(cells, "run_engine", fail)
    (cell,) = [c for c in cells.cells(["V1"]) if c.name == f"V1, {backend}, NONE"]
    runs = SimpleNamespace(pair={"deepseek_v3": Path(), "eagle3_gqa_boundary": Path()})
    result = cells.measure(cell, cast("Any", runs), None)
    assert result["ok"] is right and result["error"] == error


def test_an_engine_that_does_not_end_is_a_result_of_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("engine", 600)

    monkeypatch.setattr(cells, "run_engine", hang)
    (cell,) = [c for c in cells.cells(["V1"]) if c.name == "V1, TRITON_MLA, NONE"]
    runs = SimpleNamespace(pair={"deepseek_v3": Path(), "eagle3_gqa_boundary": Path()})
    result = cells.measure(cell, cast("Any", runs), None)
    assert result["ok"] is False and result["error"] == "the engine did not end within 600 s"


def leaves_a_rank(tmp_path: Path, then: str) -> list[str]:
    """A command that starts a process, writes its number to a file, and goes on."""
    code = f"""
import subprocess, sys
left = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open({str(tmp_path / "pid")!r}, "w").write(str(left.pid))
{then}
"""
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("code", [0, 3])
def test_ranks_end_with_their_case(tmp_path: Path, code: int) -> None:
    done, out, _ = two_gpus.ended(
        leaves_a_rank(tmp_path, f"print('said'); sys.exit({code})"), dict(os.environ), tmp_path
    )
    assert (done, out) == (code, "said\n") and gone(int((tmp_path / "pid").read_text()))


def test_a_case_that_hangs_is_ended_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_gpus, "SECONDS", 3)
    with pytest.raises(subprocess.TimeoutExpired):
        two_gpus.ended(leaves_a_rank(tmp_path, "left.wait()"), dict(os.environ), tmp_path)
    assert gone(int((tmp_path / "pid").read_text()))


def gone(process: int) -> bool:
    """Whether a process has ended, at last as a zombie."""
    for _ in range(100):
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("only", "ran"), [("V2, (PP|TP 2, Ray|four)", ["V2, PP 2"]), ("Ray|four", None)])
@pytest.mark.parametrize("right", [True, False])
def test_what_cannot_run_here_is_listed_or_refused(
    only: str,
    ran: list[str] | None,
    right: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two GPUs, and no Ray."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["two_gpus.py", "--out", str(out), "--only", only])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(two_gpus, "RAY", False)
    monkeypatch.setattr(two_gpus, "make_pair", lambda *args, **kwargs: {})
    monkeypatch.setattr(two_gpus, "verified", lambda *args: {"ok": right})
    if ran is None:
        with pytest.raises(SystemExit) as ended:
            two_gpus.main()
        assert ended.value.code == 2 and "can't run here" in capsys.readouterr().err and not out.exists()
        return
    assert two_gpus.main() == int(not right)
    found = json.loads(out.read_text())
    assert [r["case"] for r in found["results"]] == ran
    assert found["not_run"] == ["V2, four GPUs, TP 2 and DP 2, experts parallel", "V2, TP 2, Ray"]


def test_the_sharded_case_tells_that_states_are_sharded(tmp_path: Path) -> None:
    """Its sitecustomize.py, on what the installed vLLM has: without it two ranks of one engine keep whole states."""
    code = """
from vllm.config import ParallelConfig
config = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True)
print(config.use_sequence_parallel_moe, ParallelConfig(tensor_parallel_size=2).use_sequence_parallel_moe)
"""
    ran = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, "VLLM_KIMI_EAGLE3": "off"},
            cwd=tmp_path / "..",
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for path in ("", str(two_gpus.SHARDED))
    ]
    assert "False False" in ran[0] and "True False" in ran[1]


def test_a_result_says_what_it_was_measured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(sys, "argv", ["x.py", "--at-once", "3", "--out", "some/where.json", "--only", "V1, TP"])
    found = campaign.header("x.py")
    assert found["command"] == "python bench/gpu/x.py --at-once 3 --out RESULT.json --only 'V1, TP'"
    assert found["hardware"] == "2 x NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert campaign.header("x.py")["hardware"] == "NVIDIA H200"


def test_text_is_compared_within_a_dtype() -> None:
    """TRITON_MLA's cases are in float16, and have a baseline of their own."""
    ids = {
        "no speculation": [[1, 2]],
        "overlay": [[1, 3]],
        "TRITON_MLA, none": [[4, 5]],
        "TRITON_MLA, overlay": [[4, 5]],
    }
    results = end_to_end.compared([{"case": name, "output_ids": output} for name, output in ids.items()])
    assert [r["tokens_equal_to_first_case"] for r in results] == [1, 0.5, 1, 1]


def test_nccl_is_named_where_it_is_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    for part in ("nvidia", "nvidia.nccl"):
        monkeypatch.delitem(sys.modules, part, raising=False)
    monkeypatch.delenv("VLLM_NCCL_SO_PATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert two_gpus.nccl() == {"VLLM_NCCL_SO_PATH": str(library)}
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "the user's")
    assert two_gpus.nccl() == {}
