# SPDX-License-Identifier: Apache-2.0
"""What is installed is what is here: the archives are reproducible, hold nothing else, and call nobody."""

from __future__ import annotations

import ast
import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGE = ROOT / "vllm_kimi_eagle3"
CONTENTS = HERE / "wheel_contents.txt"
LIMIT = 24 << 20
"""Bytes of a wheel; the tiny pair is nearly all of them."""
IGNORED = (".git", ".venv*", ".nox", ".cache", ".hypothesis", ".pytest_cache", ".ruff_cache", "mutants", "__pycache__")
BUILD = """
import sys
from hatchling.build import build_sdist, build_wheel
print(build_wheel(sys.argv[1]))
print(build_sdist(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    """Wheel and sdist, made twice: elsewhere, from files of another time and mode, under another umask and locale."""
    made: list[list[Path]] = []
    for name, umask, seconds in (("one", 0o022, 1_700_000_000), ("a longer name", 0o077, 1_800_000_000)):
        source = tmp_path_factory.mktemp("build") / name
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*IGNORED), symlinks=True)
        for path in (p for p in source.rglob("*") if not p.is_symlink()):
            os.utime(path, (seconds, seconds))
            if path.is_file():
                path.chmod((path.stat().st_mode & 0o100) | (0o644 & ~umask))
        # What a working copy may hold besides.
        (source / "vllm_kimi_eagle3" / "__pycache__").mkdir()
        (source / "vllm_kimi_eagle3" / "__pycache__" / "cli.cpython-311.pyc").write_bytes(name.encode())
        out = source.parent / "dist"
        done = subprocess.run(
            [sys.executable, "-c", BUILD, str(out)],
            cwd=source,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "Asia/Tokyo" if umask == 0o077 else "UTC"},
            umask=umask,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        made.append([out / line for line in done.stdout.split()])
    return made


def test_built_twice_they_are_the_same_bytes(builds: list[list[Path]]) -> None:
    for one, other in zip(*builds, strict=True):
        assert one.name == other.name
        assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest(), one.name


def test_the_wheel_holds_what_the_list_says(builds: list[list[Path]]) -> None:
    """A file more or less is a decision: write the list anew with ``REWRITE=1``, and read the difference."""
    with zipfile.ZipFile(builds[0][0]) as wheel:
        names = sorted(wheel.namelist())
        for info in wheel.infolist():
            kind = info.external_attr >> 28
            assert kind in (0, 0o10), f"{info.filename} is no ordinary file"
    if os.environ.get("REWRITE"):
        CONTENTS.write_text("".join(f"{name}\n" for name in names))
    assert names == CONTENTS.read_text().splitlines()
    assert all(name.startswith(("vllm_kimi_eagle3/", "vllm_kimi_eagle3-")) for name in names)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tracked = {name for name in listed if name.startswith("vllm_kimi_eagle3/")}
    tracked |= {f"vllm_kimi_eagle3/{name}" for name in listed if name.startswith("patches/")}
    assert {name for name in names if ".dist-info/" not in name} == tracked
    assert builds[0][0].stat().st_size < LIMIT
    code = [name for name in names if not name.endswith((".py", ".patch", ".j2", "series", "README.md", "py.typed"))]
    data = "vllm_kimi_eagle3/tiny_kimi/"  # the tiny pair, which the demo and the suite for forks serve
    assert [name for name in code if ".dist-info/" not in name and not name.startswith(data)] == []


def test_the_sdist_holds_no_more_than_the_repository(builds: list[list[Path]]) -> None:
    with tarfile.open(builds[0][1]) as sdist:
        members = sdist.getmembers()
    assert all(member.isfile() for member in members)
    names = [member.name.partition("/")[2] for member in members]
    assert not [name for name in names if "__pycache__" in name]
    generated = {"PKG-INFO"}
    assert [name for name in names if name not in generated and not (ROOT / name).is_file()] == []
    assert {"pyproject.toml", "LICENSE", "SECURITY.md", "README.md", "CHANGELOG.md", "vllm_kimi_eagle3/plugin.py"} <= {
        *names
    }


def test_the_metadata_names_licence_and_dependencies(builds: list[list[Path]]) -> None:
    """What a bill of materials is made from."""
    with zipfile.ZipFile(builds[0][0]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith("/METADATA"))
        (points,) = (n for n in wheel.namelist() if n.endswith("/entry_points.txt"))
        metadata = email.message_from_bytes(wheel.read(name))
        entry_points = wheel.read(points).decode()
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.10"
    needed = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert {re.split(r"[<>=;! ]", line)[0] for line in needed} == {
        "vllm",
        "torch",
        "wrapt",
        "packaging",
        "importlib-metadata",
    }
    assert "kimi_eagle3 = vllm_kimi_eagle3.plugin:register" in entry_points
    assert entry_points.count(" = ") == 2
    assert "regression" in (metadata.get_all("Provides-Extra") or [])


# ---------------------------------------------------------------------------------------------------------------------

NETWORK = {"socket", "ssl", "http", "urllib", "ftplib", "smtplib", "requests", "httpx", "aiohttp", "urllib3", "asyncio"}
NETWORK |= {"xmlrpc", "telnetlib", "websockets", "grpc", "zmq", "huggingface_hub", "socketserver", "webbrowser"}
EXECUTES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "ctypes", "runpy", "code", "joblib", "yaml"}
ALLOWED = {
    ("bench/client.py", "urllib"): "asks the server whose address the user gave",
    ("bench/serve.py", "urllib"): "asks the server that it started, on this machine",
    ("bench/serve.py", "socket"): "finds a free port on this machine",
    ("layers/files.py", "huggingface_hub"): "looks into the hub's cache on this disk, and fetches nothing",
    ("doctor/probe.py", "pickle"): "hands a configuration, as vLLM does, to a process that it starts; reads none",
}


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_nothing_else_can_call_out_or_run_what_it_reads() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        for name in imported(path) & (NETWORK | EXECUTES)
    }
    assert found == set(ALLOWED)


def test_no_code_is_made_from_text() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and any(keyword.arg == "shell" for keyword in node.keywords):
                raise AssertionError(f"{path}:{node.lineno} uses a shell")


QUIET = """
import sys
asked = []
sys.addaudithook(lambda event, arguments: asked.append(event) if event.startswith("socket.") else None)
import importlib, pkgutil, vllm_kimi_eagle3
from vllm_kimi_eagle3 import cli, plugin
plugin.register()
for module in pkgutil.walk_packages(vllm_kimi_eagle3.__path__, "vllm_kimi_eagle3."):
    part = module.name.split(".")[1]
    if part in ("layers", "patching", "source_patches", "commands", "doctor") and "probe" not in module.name:
        importlib.import_module(module.name)
assert asked == [], asked
import socket
socket.socket().close()
assert asked, "the hook hears nothing"
"""


def test_importing_and_registering_asks_the_network_for_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_ci_installs_is_pinned() -> None:
    for name in ("cpu-engine.txt", "test.txt"):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        wanted = [line for line in lines if line and not line.startswith("#")]
        assert wanted and not [line for line in wanted if not re.fullmatch(r"[\w.-]+==[\w.+]+", line)]
    script = (ROOT / "tools" / "cpu_engine.sh").read_text()
    assert "--constraint requirements/test.txt" in script


def test_the_policy_names_every_place_that_is_touched() -> None:
    policy = (ROOT / "SECURITY.md").read_text()
    from vllm_kimi_eagle3.activation import _GATES  # pyright: ignore[reportPrivateUsage]

    for gate in _GATES:
        assert f"{gate._class_name}.{gate._attribute}" in policy  # pyright: ignore[reportPrivateUsage]
    for variable in ("VLLM_KIMI_EAGLE3", "VLLM_KIMI_EAGLE3_CACHE", "VLLM_PLUGINS"):
        assert variable in policy
