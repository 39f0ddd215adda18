# SPDX-License-Identifier: Apache-2.0
"""What a wheel holds: everything that the installed commands and the installed suite read, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 20 << 20
"""Bytes; the tiny pair is nearly all of it."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_it_holds_what_the_repository_has(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    package = {name for name in listed if name.startswith("vllm_kimi_eagle3/")}
    patches = {f"vllm_kimi_eagle3/{name}" for name in listed if name.startswith("patches/")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert len(package) > 100 and len(patches) > 100
    assert held == package | patches


def test_it_holds_the_suite_and_its_models(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    held = set(archive.namelist())
    for name in (
        "regression/conftest.py",
        "regression/test_alignment.py",
        "regression/test_defects.py",
        "tiny_kimi/checkpoint/model.safetensors",
        "tiny_kimi/drafter_gqa/model.safetensors",
        "tiny_kimi/drafter_mla/model.safetensors",
        "tiny_kimi/heldout.json",
        "patches/0.32.0/series",
    ):
        assert f"vllm_kimi_eagle3/{name}" in held
    (entry,) = (name for name in held if name.endswith(".dist-info/entry_points.txt"))
    assert "kimi_eagle3 = vllm_kimi_eagle3.plugin:register" in archive.read(entry).decode()
    (metadata,) = (name for name in held if name.endswith(".dist-info/METADATA"))
    assert "Provides-Extra: regression" in archive.read(metadata).decode()


def test_it_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < LIMIT, f"{wheel.stat().st_size} bytes"
