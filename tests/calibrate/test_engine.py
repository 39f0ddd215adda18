# SPDX-License-Identifier: Apache-2.0
"""Streams taken from vLLM: the same answer as from plain torch on the tiny pair; and the parts, without an engine."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.calibrate import engine
from vllm_kimi_eagle3.commands import calibrate as command
from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.reference import Borrowed, Drafter, Target
from vllm_kimi_eagle3.regression.engine import fresh_cache
from vllm_kimi_eagle3.tiny_kimi import held_out_prompts
from vllm_kimi_eagle3.tiny_kimi.materialize import materialize


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return materialize(tmp_path_factory.mktemp("pair"))


@pytest.mark.engine
def test_both_sources_give_the_same_answer(pair: dict[str, Path], tmp_path: Path) -> None:
    prompts = [prompt[-64:] for prompt in held_out_prompts()[::4]]
    (tmp_path / "ids.json").write_text(json.dumps(prompts))
    found: dict[str, dict[str, Any]] = {}
    environment = {
        **os.environ,
        "VLLM_CACHE_ROOT": str(fresh_cache(tmp_path / "cache")),
        "VLLM_KIMI_EAGLE3_CACHE": str(tmp_path / "records"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TMPDIR": str(tmp_path),
    }
    for states, more in (("reference", ()), ("engine", ("--dtype", "float32", "--max-num-batched-tokens", "512"))):
        arguments = ["calibrate", "--target", str(pair["kimi_k25"]), "--drafter", str(pair["eagle3_gqa_nested"])]
        arguments += ["--ids", str(tmp_path / "ids.json"), "--tokens", "64", "--temperature", "0", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "vllm_kimi_eagle3.cli", *arguments, "--states", states, *more],
            capture_output=True,
            text=True,
            env=environment,
            timeout=600,
        )
        assert done.stdout, done.stderr[-3000:]
        found[states] = json.loads(done.stdout)
    ours, theirs = found["reference"], found["engine"]
    assert theirs["ran_on"].startswith("vLLM ") and "float32" in theirs["ran_on"]
    assert theirs["decided"] and theirs["boundaries"] == [4, 7, 9] and theirs["rule"] == "output"
    for key in ("trials", "relabelled", "coverage", "per_position", "per_position_boundaries", "rule", "record"):
        assert ours[key] == theirs[key], key
    assert not list(tmp_path.glob("vllm-kimi-eagle3-*")), "the streams' file stays behind"


class Layer(nn.Module):
    """Adds its number to the stream, as vLLM's layers do: (positions, what this layer wrote, stream before it)."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, positions: Any, hidden: torch.Tensor, residual: torch.Tensor | None, scaling: Any = None) -> Any:
        stream = hidden if residual is None else hidden + residual
        return torch.full_like(stream, float(self.number)), stream


class Norm(nn.Module):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return hidden + residual


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer(i + 1) for i in range(layers)), Norm()

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual, None)
        return self.norm(hidden, residual)


def worker_of(model: nn.Module, rank: int = 0) -> Any:
    runner = SimpleNamespace(get_model=lambda: SimpleNamespace(model=model), device="cpu")
    return SimpleNamespace(model_runner=runner, rank=rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hooks_write_the_stream_that_enters_each_boundary(tmp_path: Path, dtype: torch.dtype) -> None:
    model, path = Model(3), tmp_path / "streams"
    worker = worker_of(model)
    assert engine.install(worker, [0, 2, 3], str(path))["layers"] == 3
    other = worker_of(model, rank=1)
    engine.install(other, [0, 2, 3], str(path))
    # A prompt in two chunks, the second padded, then a token; then another text.
    for positions, used in (([0, 1, 2], 3), ([3, 4, 0, 0], 2), ([5], 1)):
        model(torch.tensor(positions), torch.full((len(positions), 2), 10.0, dtype=dtype))
        assert used <= len(positions)
    assert engine.drain(worker) == engine.drain(other) == 6
    model(torch.tensor([0]), torch.full((1, 2), 20.0, dtype=dtype))
    assert engine.drain(worker) == 1
    engine.remove(worker)
    engine.remove(other)
    model(torch.tensor([1]), torch.zeros(1, 2, dtype=dtype))
    rows = torch.from_file(str(path), size=7 * 3 * 2, dtype=dtype).view(7, 3, 2)
    assert path.stat().st_size == 7 * 3 * 2 * dtype.itemsize, "another rank, or another text's row, is in the file"
    # Boundary k holds the embedding and what layers 1..k wrote.
    assert rows[:6, :, 0].tolist() == [[10, 13, 16]] * 6 and rows[6, :, 1].tolist() == [20, 23, 26]


def test_layers_of_another_stage_are_refused(tmp_path: Path) -> None:
    model = Model(2)
    model.layers[1] = type("PPMissingLayer", (nn.Identity,), {})()
    with pytest.raises(RuntimeError, match="pipeline stages"):
        engine.install(worker_of(model), [1], str(tmp_path / "streams"))


def test_streams_that_do_not_fit_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    check: Any = engine._check_room  # pyright: ignore[reportPrivateUsage]
    check(tmp_path, 1 << 30)
    with pytest.raises(PlanError, match=r"would take 2 GiB .* 1 GiB are free .* TMPDIR"):
        check(tmp_path, (1 << 30) + 1)


def quantised(source: Path, folder: Path) -> Path:
    """A copy whose first expert is packed, as Kimi-K2.5's are; only the embeddings and heads stay readable."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "experts.0.up_proj" in name)
    packed = {**weights, name.replace("weight", "weight_packed"): torch.zeros(4, 4, dtype=torch.int32)}
    del packed[name]
    (folder / "model.safetensors").unlink()
    save_file(packed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_drafter_borrows_from_a_quantised_target(pair: dict[str, Path], tmp_path: Path) -> None:
    folder = quantised(pair["kimi_k25"], tmp_path / "packed")
    with pytest.raises(ValueError, match="quantised"):
        Target.load(folder)
    borrowed = Drafter.load(pair["eagle3_gqa_nested"], Borrowed(folder))
    whole = Drafter.load(pair["eagle3_gqa_nested"], Target.load(pair["kimi_k25"]))
    for name, weight in whole.weights.items():
        assert torch.equal(borrowed.weights[name], weight), name
    with pytest.raises(ValueError, match=r"no file stores lm_head\.weight"):
        Borrowed(tmp_path).lm_head_weight  # noqa: B018


def test_what_auto_takes(pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(target: Path, *rest: str, states: str = "auto") -> bool:
        return command._on_engine(  # pyright: ignore[reportPrivateUsage]
            argparse.Namespace(target=target, states=states, rest=list(rest))
        )

    packed = quantised(pair["kimi_k25"], tmp_path / "packed")
    assert not choose(pair["kimi_k25"]) and choose(packed) and choose(pair["kimi_k25"], states="engine")
    assert choose(packed, "--tensor-parallel-size", "8") and not choose(packed, states="reference")
    monkeypatch.setattr(command, "SMALL", 1000)
    assert choose(pair["kimi_k25"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not choose(packed)
    with pytest.raises(PlanError, match="--tensor-parallel-size is no option of calibrate"):
        choose(pair["kimi_k25"], "--tensor-parallel-size", "8", states="reference")


@pytest.mark.parametrize(
    ("argument", "word"),
    [
        ({"speculative_config": {"method": "eagle3"}}, "without a drafter"),
        ({"pipeline_parallel_size": 2}, "no pipeline stages"),
        ({"dtype": "half"}, "--dtype bfloat16"),
        ({"dtype": "bfloat16", "pipeline_parallel_size": 1, "tensor_parallel_size": 8}, None),
    ],
)
def test_arguments_that_can_not_be_are_refused_before_loading(argument: dict[str, Any], word: str | None) -> None:
    check: Any = command._check_arguments  # pyright: ignore[reportPrivateUsage]
    if word is None:
        check(SimpleNamespace(**argument))
        return
    with pytest.raises(PlanError, match=word):
        check(SimpleNamespace(**argument))


def test_an_argument_for_vllm_without_vllm_is_bad_usage(
    pair: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KIMI_EAGLE3_CACHE", str(tmp_path))
    folders = ["--target", str(pair["kimi_k25"]), "--drafter", str(pair["eagle3_gqa_nested"])]
    assert cli.main(["calibrate", *folders, "--tensor-parallel-size", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--states engine" in line
