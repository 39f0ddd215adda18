# SPDX-License-Identifier: Apache-2.0
"""The campaigns of ``bench/gpu`` as commands: what they refuse, and how they end. Without a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_kimi_eagle3.bench.client import ServerError

SCRIPTS = Path(__file__).resolve().parents[2] / "bench" / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of bench/gpu as a module, which finds the ones beside it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"campaign_{name}", SCRIPTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


TINY = ("--tiny", "--mode", "context")
REFUSED = [
    ("throughput", [*TINY, "--out", "none/a.json"], "none/a.json: no file can be written there"),
    ("throughput", [*TINY, "--out", "."], ".: no file can be written there"),
    ("throughput", [*TINY], "--mode and --out, or --report"),
    ("throughput", [*TINY, "--out", "a.json", "--k", "0"], "0 was given, but a whole number from 1 on"),
    ("throughput", [*TINY, "--out", "a.json", "--seconds", "nan"], "nan was given, but a positive number of seconds"),
    ("throughput", ["--mode", "cost", "--tiny", "--out", "a.json", "--meet", "m"], "--meet is for context and share"),
    ("throughput", [*TINY, "--out", "a.json", "--contexts", "64,-1"], "-1 was given, but a whole number"),
    ("throughput", [*TINY, "--out", "a.json", "--layers", "6"], "--layers is 6, but 7 or more were expected"),
    ("throughput", ["--mode", "cost", "--tiny", "--out", "a.json", "--layers", "2"], "--layers is 2, but 7"),
    ("throughput", [*TINY, "--out", "a.json", "--meet", "met"], "a run with this --out has met there before"),
    ("throughput", ["--mode", "context", "--out", "a.json"], "this needs 1 GPU, and 0 can be seen"),
    ("cells", ["--out", "none/a.json"], "no file can be written there"),
    ("cells", ["--out", "a.json", "--only", "FLASHMLA ONE"], "no cell has such a name"),
    ("cells", ["--out", "a.json", "--only", "["], "[ is no regular expression"),
    ("cells", ["--out", "a.json", "--at-once", "0"], "0 was given"),
    ("cells", ["--out", "a.json"], "this needs 1 GPU,"),
    ("two_gpus", ["--out", "a.json"], "this needs 2 GPUs,"),
    ("two_gpus", ["--out", "a.json", "--only", "TP 3"], "no case has such a name"),
    ("alignment", ["--out", "none/a.json"], "no file can be written there"),
    ("alignment", ["--out", "a.json"], "this needs 1 GPU,"),
    ("end_to_end", ["--out", "a.json", "--at-once", "0"], "0 was given"),
    ("end_to_end", ["--out", "a.json"], "this needs 1 GPU,"),
    ("soak", ["--out", "a.json", "--minutes", "0.5"], "0.5 was given, but a number of minutes from 0.67 on"),
    ("soak", ["--out", "a.json", "--minutes", "nan"], "nan was given, but a number of minutes"),
    ("soak", ["--out", "a.json"], "this needs 1 GPU,"),
]


@pytest.mark.parametrize(("name", "arguments", "said"), REFUSED)
def test_arguments_that_are_refused(
    name: str,
    arguments: list[str],
    said: str,
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "met").mkdir()
    (tmp_path / "met" / "a.json.here").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    for variable in ("VLLM_KIMI_EAGLE3", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.setenv(variable, "")  # what the script sets is taken back
    for variable in ("VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(variable, "1")
    with pytest.raises(SystemExit) as stop:
        script(name).main()
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"{name}.py: error: ") and said in last
    assert not (tmp_path / "a.json").exists()


# The report ----------------------------------------------------------------------------------------------------------


def whole(report: Any) -> dict[str, Any]:
    quartiles = {"median": 2.0, "q1": 2.0, "q3": 2.0, "mean": 2.0}
    cell = {"context": 512, "concurrency": 1, "step_ms": quartiles, "steps": 100, "tok_s": 500.0}
    names = ("layers", "tiny", "acceptance", "graphs", "compile", "k", "about")
    return {
        "format": report.FORMAT,
        "mode": "context",
        "variant": "none",
        "vllm": "0.26.0",
        "hardware": "one",
        "settings": dict.fromkeys(names),
        "cells": [cell],
    }


@pytest.mark.parametrize("missing", ["mode", "settings", "cells", "vllm", "hardware", "variant"])
def test_a_report_of_what_is_not_whole(
    missing: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, path = script("throughput_report"), tmp_path / "a.json"
    data = whole(report)
    path.write_text(json.dumps(data))
    assert report.main([path], "0.33.0") == 0
    capsys.readouterr()
    path.write_text(json.dumps({name: value for name, value in data.items() if name != missing}))
    assert report.main([path], "0.33.0") == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"throughput: {path} is no whole result") and said.err.count("\n") == 1 and not said.out
    for text in (json.dumps(data)[:-30], "[" * 100_000, "\udcff"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert report.main([path], "0.33.0") == 2
        said = capsys.readouterr().err
        assert said.startswith(f"throughput: {path}") and said.count("\n") == 1


def test_a_report_whose_reader_has_gone(script: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(whole(script("throughput_report"))))
    command = [sys.executable, str(SCRIPTS / "throughput.py"), "--report", "a.json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


# The soak ------------------------------------------------------------------------------------------------------------


def test_a_client_outlives_what_its_server_does(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = script("soak").Traffic("http://127.0.0.1:9", ["a prompt " * 40])
    raised: list[Exception] = []

    def fail(*_: Any) -> None:
        raised.append(ServerError("gone") if len(raised) % 2 else ConnectionResetError("reset"))
        if len(raised) == 20:
            traffic.stop.set()
        raise raised[-1]

    for owner, name in ((traffic, "give_up"), (traffic.client, "chat"), (traffic.client, "complete")):
        monkeypatch.setattr(owner, name, fail)
    client = threading.Thread(target=traffic.one_client, args=(1,), daemon=True)
    client.start()
    client.join(30)
    assert not client.is_alive() and len(traffic.errors) == 20 and not traffic.counts


@pytest.mark.parametrize("ends", ["at the start", "under way"])
def test_a_soak_whose_server_ends_is_over(
    ends: str, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soak, out = script("soak"), tmp_path / "a.json"

    @contextlib.contextmanager
    def serve(*_: Any, **__: Any) -> Iterator[str]:
        if ends == "at the start":
            raise ServerError("it has ended")
        yield "http://127.0.0.1:9"

    class Traffic:
        def __init__(self, *_: Any) -> None:
            self.stop, self.errors, self.client = threading.Event(), list[str](), self

        def one_client(self, seed: int) -> None:
            assert self.stop.wait(60), "nobody told the clients"

        def counters(self) -> None:
            raise ServerError("it has ended")

    for name, value in (("serve", serve), ("Traffic", Traffic), ("greedy", lambda *_: []), ("make_pair", pair)):
        monkeypatch.setattr(soak, name, value)
    for name, value in (("device_count", lambda: 1), ("get_device_name", lambda: "none")):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--out", str(out)])
    assert soak.main() == 1
    assert json.loads(out.read_text())["error"] == "it has ended" and "NOT it has ended" in capsys.readouterr().out


def pair(folder: Path, *, wide: bool) -> dict[str, Path]:
    return dict.fromkeys(("deepseek_v3", "eagle3_gqa_boundary"), folder)
