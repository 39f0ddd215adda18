# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3 verify`` on the real engine: right on the pair, exit 1 on a wrong capture, 2 on bad input."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kimi_eagle3.commands.verify import _cache
from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.regression.engine import fresh_cache
from vllm_kimi_eagle3.tiny_kimi.materialize import HERE, materialize

ENGINE = pytest.mark.engine
BY_RULE = ["--additional-config", '{"kimi_eagle3": {"layer_rule": "output"}}']
SMALL = ["--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return materialize(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def verify(tmp_path_factory: pytest.TempPathFactory, pair: dict[str, Path]) -> Any:
    folder = tmp_path_factory.mktemp("verify")
    prompts = [item["prompt"] for item in json.loads((HERE / "heldout.json").read_text())][::8]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    (folder / "with one token.json").write_text(json.dumps([[97], list(prompts[0].encode())]))

    @cache
    def run(*arguments: str, overlay: str = "on", path: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "vllm_kimi_eagle3.cli", "verify", *arguments],
            env={
                **os.environ,
                "VLLM_KIMI_EAGLE3": overlay,
                "VLLM_CACHE_ROOT": str(fresh_cache(folder / "cache")),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                **({"PYTHONPATH": path} if path else {}),
            },
            capture_output=True,
            text=True,
            timeout=600,
        )

    run.prompts = ["--prompts", str(folder / "prompts.json")]  # type: ignore[attr-defined]
    run.folder = folder  # type: ignore[attr-defined]
    return run


@ENGINE
def test_right_on_the_pair(verify: Any, pair: dict[str, Path]) -> None:
    page = verify.folder / "right.html"
    done = verify(
        *("--target", str(pair["kimi_k25"]), "--drafter", str(pair["eagle3_gqa_nested"]), "--json"),
        *("--report", str(page), "--dtype", "float32", *verify.prompts, *BY_RULE, *SMALL),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["ok"] and found["max_relative_error"] < 1e-4
    assert found["reference"] == "hf" and found["cannot_see"] == ""
    assert found["boundaries"] == found["captured"] == [4, 7, 9]
    names = {s["name"] for s in found["situations"]}
    assert {"whole prefill", "verify, all accepted", "verify, none accepted", "batch of prefill and verify"} <= names
    for s in found["situations"]:
        assert s["ok"] and s["rows"] > 0 and s["max_relative_error"] < 1e-4 and s["wrong_drafts"] == 0
    assert "served" in done.stderr and "compared" in done.stderr
    assert page.read_text().count("<rect") > 100


@ENGINE
def test_right_on_two_tensor_parallel_ranks(verify: Any, pair: dict[str, Path]) -> None:
    """Real ranks, each a process of its own in which the plugin registers while the worker is being made."""
    done = verify(
        *("--target", str(pair["kimi_k25"]), "--drafter", str(pair["eagle3_gqa_nested"]), "--tokens", "16"),
        *("--tensor-parallel-size", "2", "--dtype", "float32", *verify.prompts, *BY_RULE, *SMALL),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cpu x 2" in done.stdout
    # The executor tells at exit, after the outcome, how its workers ended.
    assert "[shutdown]" in done.stderr and "[shutdown]" not in done.stdout
    assert "the model captures [4, 7, 9]" in done.stdout
    log = (done.stdout + done.stderr).splitlines()
    workers = {line.partition(")")[0] for line in log if "boundaries (4, 7, 9)" in line}
    assert sum("Worker" in worker for worker in workers) == 2, workers


def _sharded(verify: Any, pair: dict[str, Path], overlay: str) -> subprocess.CompletedProcess[str]:
    """Two ranks, each with half of the experts, and between layers with a shard of the rows."""
    folder = Path(__file__).parents[1] / "support" / "sharded"
    return verify(
        *("--target", str(pair["deepseek_v3"]), "--drafter", str(pair["eagle3_gqa_boundary"]), "--tokens", "12"),
        *("--prompts", str(verify.folder / "with one token.json"), "--dtype", "float32", *SMALL),
        *("--tensor-parallel-size", "2", "--enable-expert-parallel"),
        overlay=overlay,
        path=os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
    )


@ENGINE
def test_right_with_states_sharded_between_layers(verify: Any, pair: dict[str, Path]) -> None:
    """D26: a step of one token, the prompt's, is as many rows as a rank's shard of it."""
    done = _sharded(verify, pair, "on")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("a layer leaves a shard") == 2
    assert "cpu x 2" in done.stdout and "the model captures [4, 7, 9]" in done.stdout


@ENGINE
def test_without_d26_the_ranks_part(verify: Any, pair: dict[str, Path]) -> None:
    """The drafter whose ids stock reads rightly on V1, so that nothing else is wrong."""
    done = _sharded(verify, pair, "stock")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "tensor-parallel ranks gave their drafters different inputs" in done.stderr


@ENGINE
def test_exit_1_on_a_wrong_capture(verify: Any, pair: dict[str, Path]) -> None:
    """Stock vLLM, one layer early; the legacy schema keeps D11 out of the way."""
    done = verify(
        *("--target", str(pair["kimi_k25_legacy"]), "--drafter", str(pair["eagle3_gqa_nested"])),
        *("--dtype", "float32", *verify.prompts, *BY_RULE, *SMALL),
        overlay="stock",
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert done.stdout.startswith("----- vllm-kimi-eagle3 verify -----")
    assert done.stdout.count("WRONG") > 8
    assert "the model captures boundaries [3, 6, 8], but the drafter was trained on [4, 7, 9]" in done.stdout
    assert str(pair["kimi_k25_legacy"]) not in done.stdout, "the block is to be pasted: no paths"


@ENGINE
def test_self_needs_no_second_copy_and_says_what_it_cannot_see(verify: Any, pair: dict[str, Path]) -> None:
    done = verify(
        *("--target", str(pair["deepseek_v3"]), "--drafter", str(pair["eagle3_mla_nested"]), "--reference", "self"),
        *("--json", "--dtype", "bfloat16", *BY_RULE, *SMALL),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["reference"] == "self" and "wrong layer" in found["cannot_see"]
    assert found["ok"] and 0 < found["max_relative_error"] < 0.1
    assert all(s["wrong_drafts"] is None for s in found["situations"])


@ENGINE
@pytest.mark.parametrize(("overlay", "stored", "code"), [("on", "auto", 0), ("on", "fp8", 0), ("stock", "fp8", 1)])
def test_half_precision_and_a_cache_in_fp8(
    verify: Any, pair: dict[str, Path], monkeypatch: pytest.MonkeyPatch, overlay: str, stored: str, code: int
) -> None:
    """Rounding is no alarm, and hides none: stock is one layer early. Without MLA, whose CPU kernel has no fp8."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    done = verify(
        *("--target", str(pair["kimi_k25_legacy"]), "--drafter", str(pair["eagle3_gqa_nested"]), "--json"),
        *("--kv-cache-dtype", stored, "--dtype", "bfloat16", *verify.prompts, *BY_RULE, *SMALL),
        overlay=overlay,
    )
    if stored == "fp8" and not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        refused = "the engine did not start: FP8 KV cache on CPU requires x86 with AVX-512 or AMX."
        assert done.returncode == 2 and refused in done.stderr, done.stderr[-3000:]
        pytest.skip("the CPU engine has no cache in fp8 on a processor without AVX-512 and AMX, and says so")
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    wide = [s for s in found["situations"] if s["median_bar"] is not None]
    assert len(wide) > 5 and all(s["ok"] is (code == 0) for s in wide)
    # With one of bf16 a median of 0.02 would be an alarm.
    assert all((s["median_relative_error"] > 0.05) is (stored == "fp8") for s in wide)


def test_a_cache_that_is_not_modelled() -> None:
    def cache(name: str, tolerance: float | None = None) -> Any:
        driver: Any = SimpleNamespace(info={"cache_dtype": name})
        return _cache(argparse.Namespace(tolerance=tolerance), "bfloat16", driver)

    assert cache("fp8") is not None
    with pytest.raises(PlanError, match=r"a KV cache of nvfp4 is not modelled .* or give --tolerance"):
        cache("nvfp4")
    assert cache("nvfp4", tolerance=0.3) is None


BAD: dict[str, tuple[list[str], list[str]]] = {
    "no target": (["--target", "nowhere/at/all", "--drafter", "DRAFTER"], ["nowhere/at/all", "no such folder"]),
    "empty name": (["--target", "", "--drafter", "DRAFTER"], ["--target is empty", "owner/model"]),
    "no drafter": (["--target", "TARGET", "--drafter", "./nothing"], ["./nothing", "no such folder"]),
    "empty folder": (["--target", "TARGET", "--drafter", "EMPTY"], ["config.json"]),
    "no drafts": (["--target", "TARGET", "--drafter", "DRAFTER", "--num-speculative-tokens", "0"], ["0", "at least 1"]),
    "tolerance": (["--target", "TARGET", "--drafter", "DRAFTER", "--tolerance", "nan"], ["nan", "above 0"]),
    "report": (["--target", "TARGET", "--drafter", "DRAFTER", "--report", "no/such/x.html"], ["no/such/x.html"]),
    "report folder": (["--target", "TARGET", "--drafter", "DRAFTER", "--report", "."], ["--report . is a folder"]),
    "prompts": (["--target", "TARGET", "--drafter", "DRAFTER", "--prompts", "no/such/p.txt"], ["no/such/p.txt"]),
    "header": (["--target", "TARGET", "--drafter", "SHORT"], ["SHORT", "no whole safetensors file"]),
    "long": (["--target", "a" * 5000, "--drafter", "DRAFTER"], ["File name too long"]),
    "hf by name": (["--target", "a/b", "--drafter", "DRAFTER", "--reference", "hf"], ["must be folders"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(verify: Any, pair: dict[str, Path], tmp_path: Path, name: str) -> None:
    folders = {"TARGET": pair["deepseek_v3"], "DRAFTER": pair["eagle3_gqa_boundary"], "EMPTY": tmp_path}
    folders["SHORT"] = tmp_path / "SHORT"
    folders["SHORT"].mkdir()
    shutil.copy(folders["DRAFTER"] / "config.json", folders["SHORT"])
    (folders["SHORT"] / "model.safetensors").write_bytes(b"\xff" * 100)
    arguments, words = BAD[name]
    done = verify(*(str(folders.get(a, a)) for a in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    for word in words:
        assert word in line


@ENGINE
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--no-such-argument", "7"], "no-such-argument"),
        (["--speculative-config", '{"method": "ngram"}'], "ngram"),
        (["--speculative-config", "[1]"], "no JSON object"),
        (["--additional-config", '{"kimi_eagle3": {"layer_ids": [4, 7, 11]}}'], "11"),
    ],
)
def test_what_vllm_refuses_is_one_sentence(verify: Any, pair: dict[str, Path], arguments: list[str], word: str) -> None:
    done = verify("--target", str(pair["deepseek_v3"]), "--drafter", str(pair["eagle3_gqa_boundary"]), *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert "Traceback" not in done.stderr
    assert word in done.stderr.splitlines()[-1]
