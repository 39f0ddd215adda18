# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: exit status, one sentence for bad input, speed, and the ``layers`` command."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from tests.layers import corpus
from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.commands import layers as command
from vllm_kimi_eagle3.layers import AlignmentRecord, alignment, read_headers

TARGETS, DRAFTERS = corpus.DATA / "targets", corpus.DATA / "drafters"


@pytest.fixture(autouse=True)
def quiet_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KIMI_EAGLE3_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(command.RULE_VARIABLE, raising=False)
    monkeypatch.setattr(command, "installed_release", lambda: None)


def call(*arguments: object, target: object = TARGETS / "kimi-k2.5", drafter: object) -> list[str]:
    return ["layers", "--target", str(target), "--drafter", str(drafter), *map(str, arguments)]


def answer(capsys, *arguments: object, **folders: object) -> dict:
    assert cli.main(call("--json", *arguments, **folders)) == 0
    return json.loads(capsys.readouterr().out)


def model(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "config.json").write_bytes(text)
    return folder


@pytest.mark.parametrize("name", corpus.DRAFTERS)
def test_corpus(capsys, name):
    expected = corpus.expected(name)
    arguments = call("--json", target=TARGETS / expected["target"], drafter=DRAFTERS / name)
    if "error" in expected:
        assert cli.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and expected["error"] in captured.err and captured.err.count("\n") == 1
        return
    assert cli.main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    for key in ("ids", "ids_key", "rule", "decided_by", "boundaries"):
        assert data[key] == expected[key]
    assert data["vllm"] == "0.33.0" and data["stock"]["default"] == "V2" and isinstance(data["warnings"], list)


def test_the_table_names_each_state(capsys):
    assert cli.main(call("--vllm", "0.28.0", drafter=DRAFTERS / "aq-medai-kimi-k25-eagle3")) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    for number, written, boundary, layer in (("1", "1", "2", "1"), ("2", "29", "30", "29"), ("3", "57", "58", "57")):
        assert [number, written, boundary, "output", "of", "layer", layer] in lines
    assert "stock V1 (default)  [1, 29, 57]  DIFFERS: every state 1 layer early" in out
    assert "stock V2            [2, 30, 58]  the same" in out
    assert "stock V1 differs from the other two" in out


def test_the_regression_from_0_28_to_0_29(capsys):
    folders = {"drafter": DRAFTERS / "specforge-custom"}
    before = answer(capsys, "--vllm", "0.28.0", **folders)
    after = answer(capsys, "--vllm", "0.29.0", **folders)
    assert (before["stock"]["default"], before["stock"]["V1"]) == ("V1", [3, 21, 44])
    assert (after["stock"]["default"], after["stock"]["V2"]) == ("V2", [2, 30, 58])
    assert (before["differs"], after["differs"]) == (["V2"], ["V2"])


def test_rule_ids_and_environment(capsys, monkeypatch):
    folders = {"drafter": DRAFTERS / "specforge-custom"}
    assert answer(capsys, **folders)["decided_by"] == "ambiguous"
    assert answer(capsys, "--rule", "output", **folders)["boundaries"] == [4, 22, 45]
    assert answer(capsys, "--ids", "1,2,3", "--rule", "output", **folders)["boundaries"] == [2, 3, 4]
    monkeypatch.setenv(command.RULE_VARIABLE, "output")
    assert answer(capsys, **folders)["boundaries"] == [4, 22, 45]
    assert answer(capsys, "--rule", "boundary", **folders)["boundaries"] == [3, 21, 44]
    monkeypatch.setenv(command.RULE_VARIABLE, "outputs")
    assert cli.main(call(**folders)) == 2
    assert command.RULE_VARIABLE in capsys.readouterr().err


def test_weights_and_the_measured_record(capsys, tmp_path):
    drafter = model(tmp_path / "drafter", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 6, 8]}})
    target = TARGETS / "deepseek-v3-dense-10"
    weights = {"fc.weight": numpy.zeros((4, 3 * 64), numpy.float16)}
    save_file(weights, drafter / "model.safetensors")
    folders = {"target": target, "drafter": drafter}
    assert answer(capsys, **folders)["decided_by"] == "ambiguous"
    config = json.loads((drafter / "config.json").read_text())
    key = alignment.content_key(corpus.target("deepseek-v3-dense-10"), config, read_headers(drafter))
    alignment.save(AlignmentRecord(key, (3, 6, 8), 10, (4, 7, 9), "output"))
    assert answer(capsys, **folders)["boundaries"] == [4, 7, 9]
    assert cli.main(call(**folders)) == 0
    assert "as in the checkpoint" in capsys.readouterr().out
    save_file({"fc.weight": numpy.zeros((4, 5 * 64), numpy.float16)}, drafter / "model.safetensors")
    assert cli.main(call(**folders)) == 2
    assert "takes 320, 5 states" in capsys.readouterr().err


def test_old_releases_capture_less(capsys):
    assert cli.main(call("--vllm", "0.24.0", drafter=DRAFTERS / "last-boundary")) == 2
    assert "can't return" in capsys.readouterr().err
    assert cli.main(call("--vllm", "0.21.0", drafter=DRAFTERS / "five-ids")) == 2
    assert "builds fc for 3" in capsys.readouterr().err


def test_newer_and_odd_installed_releases(capsys, monkeypatch):
    folders = {"drafter": DRAFTERS / "no-aux"}
    assert any("newer" in warning for warning in answer(capsys, "--vllm", "0.99.0", **folders)["warnings"])
    monkeypatch.setattr(command, "installed_release", lambda: "0.26.0+cpu")
    assert answer(capsys, **folders)["vllm"] == "0.26.0+cpu"
    monkeypatch.setattr(command, "installed_release", lambda: "0.1.dev1+gabc")
    odd = answer(capsys, **folders)
    assert odd["vllm"] == "0.33.0" and "0.1.dev1+gabc" in odd["warnings"][0]


GOOD = {"num_hidden_layers": 10, "hidden_size": 64}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"[]", "no JSON object"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b"\xff\xfe{}", "UTF-8"),
        (b'{"eagle_config": {"a": 1, "a": 2}}', "twice"),
        (b'{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "deeply"),
        (b'{"a": ' + b"9" * 6_000 + b"}", "not JSON"),
        (b" " * (5 << 20), "larger"),
        (b'{"a": [' + b"0," * 100_000 + b"0]}", "more than 100000 values"),
    ],
)
def test_bad_configs_are_one_sentence(capsys, tmp_path, content, says):
    good = model(tmp_path / "good", GOOD)
    bad = model(tmp_path / "bad", content)
    for folders in ({"target": bad, "drafter": good}, {"target": good, "drafter": bad}):
        assert cli.main(call(**folders)) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and says in captured.err, captured.err


def test_bad_folders_and_links(capsys, tmp_path):
    good = model(tmp_path / "good", GOOD)
    outside = model(tmp_path / "outside", {})
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "config.json").symlink_to(outside / "config.json")
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "config.json")
    directory = tmp_path / "directory"
    (directory / "config.json").mkdir(parents=True)
    for bad in (linked, pipe, directory, tmp_path / "none", tmp_path / "nul\0", good / "config.json" / "x"):
        assert cli.main(call(target=good, drafter=bad)) == 2, bad
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    # A link to the folder itself, or one that stays inside it, is what a user means.
    (tmp_path / "alias").symlink_to(good)
    assert cli.main(call(target=tmp_path / "alias", drafter=good)) == 0
    (good / "real.json").write_bytes((good / "config.json").read_bytes())
    (good / "config.json").unlink()
    (good / "config.json").symlink_to("real.json")
    assert cli.main(call(target=good, drafter=good / "config.json")) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--nonsense"],
        ["nonsense"],
        ["layers"],
        ["layers", "--target", "x"],
        call("--rule", "middle", drafter=DRAFTERS / "no-aux"),
        call("--vllm", "banana", drafter=DRAFTERS / "no-aux"),
        call("--vllm", "0.14.0", drafter=DRAFTERS / "no-aux"),
        call("--ids", "a,b", drafter=DRAFTERS / "no-aux"),
        call("--ids", "", drafter=DRAFTERS / "no-aux"),
        call("--ids", "9" * 5000, drafter=DRAFTERS / "speculators-default"),
    ],
)
def test_bad_usage_is_2(capsys, arguments):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err and "Traceback" not in captured.err


def test_help_and_version(capsys):
    for arguments in (["--help"], ["--version"], ["layers", "--help"]):
        assert cli.main(arguments) == 0
        assert capsys.readouterr().out


def subprocess_call(*flags: str) -> list[str]:
    program = "import sys; from vllm_kimi_eagle3.cli import main; sys.exit(main())"
    return [sys.executable, *flags, "-c", program, *call(drafter=DRAFTERS / "specforge-custom")]


def test_fast_and_light():
    """Under 0.3 s, the best of five, since other work may share the machine; and no heavy import at all."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(subprocess_call(), check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3, times
    traced = subprocess.run(subprocess_call("-X", "importtime"), check=True, capture_output=True, text=True)
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in traced.stderr.splitlines()}
    assert "vllm_kimi_eagle3" in imported
    assert not imported & {"torch", "vllm", "numpy", "wrapt", "packaging", "transformers", "pydantic"}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("sink", ["| true", "| head -1"])
def test_a_closed_pipe_is_no_error(sink, unbuffered):
    """Python buffers what goes into a pipe, so the error comes late there, at exit unless somebody flushes before."""
    done = subprocess.run(
        [
            *(shutil.which("bash") or "bash", "-c"),
            f'"$@" {sink} >/dev/null; exit "${{PIPESTATUS[0]}}"',
            *("bash", *subprocess_call()),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(unbuffered):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            subprocess_call(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 2
    assert done.stderr == "vllm-kimi-eagle3 layers: No space left on device\n"


def test_help_into_a_full_disk_leaves_no_traceback():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*subprocess_call()[:3], "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    assert done.returncode == 2 and done.stderr == "vllm-kimi-eagle3: No space left on device\n"


@pytest.mark.parametrize("name", ["layers", "doctor", "calibrate", "bench", "verify", "patches"])
def test_a_path_too_long_is_one_sentence(capsys, name):
    long = "a" * 5000
    flags = {"doctor": ["--files-only"], "patches": ["--check", long]}.get(name, [])
    if name != "patches":
        flags = [*flags, "--target", long, "--drafter", str(DRAFTERS / "specforge-custom")]
    assert cli.main([name, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


@pytest.mark.parametrize("name", ["layers", "doctor", "calibrate", "bench", "verify", "patches"])
def test_ctrl_c_is_one_line_and_130(capsys, monkeypatch, name):
    """Wherever a command is when it comes."""
    module = importlib.import_module(f"vllm_kimi_eagle3.commands.{name}")

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupted)
    flags = {"patches": [], "doctor": [], "bench": []}.get(name, ["--target", "x", "--drafter", "y"])
    assert cli.main([name, *flags]) == 130
    captured = capsys.readouterr()
    assert captured.err == f"vllm-kimi-eagle3 {name}: interrupted\n"


SLOW = """
import http.server, json, sys, threading, time
class Slow(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        print("asked", flush=True)
        time.sleep(600)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
threading.Thread(target=server.serve_forever, daemon=True).start()
from vllm_kimi_eagle3.cli import main
sys.exit(main(["bench", "--base-url", f"http://127.0.0.1:{server.server_address[1]}", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("concurrency", ["1", "4"])
def test_a_real_ctrl_c_while_a_server_is_slow(concurrency):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "--concurrency", concurrency],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore the signal, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    start = time.perf_counter()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "vllm-kimi-eagle3 bench: interrupted\n"
    assert time.perf_counter() - start < 30, "it waited for its requests"
