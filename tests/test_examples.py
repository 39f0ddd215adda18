# SPDX-License-Identifier: Apache-2.0
"""The workflow and the two Dockerfiles, as far as they can be checked without GitHub and without Docker.

Their syntax, that every release, file, module and command in them exists, that actions are pinned; and their own shell
and Python run here, in the environment of the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_kimi_eagle3.commands import layers, patches
from vllm_kimi_eagle3.source_patches import series

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / "examples/ci/eagle3-kimi.yml"
DOCKERFILES = sorted((ROOT / "examples/docker").glob("Dockerfile.*"))


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(keyword, argument) of each instruction; continued lines are one, and a here-document belongs to its own."""
    found: list[tuple[str, str]] = []
    lines = iter(dockerfile.read_text("utf-8").splitlines())
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        keyword, _, argument = line.partition(" ")
        while argument.endswith("\\"):
            argument = argument[:-1] + next(lines).strip()
        here = re.search(r"<<'(\w+)'$", argument)
        if here:
            body: list[str] = []
            while (inner := next(lines)) != here[1]:
                body.append(inner)
            argument += "\n" + "\n".join(body)
        found.append((keyword, argument))
    return found


def steps() -> list[dict[str, Any]]:
    jobs = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def scripts() -> list[str]:
    """All the shell that these files hold."""
    runs = [step["run"] for step in steps() if "run" in step]
    return runs + [argument for file in DOCKERFILES for keyword, argument in instructions(file) if keyword == "RUN"]


def test_there_are_as_many_as_are_described() -> None:
    assert [file.name for file in DOCKERFILES] == ["Dockerfile.overlay", "Dockerfile.patched"]
    assert len(scripts()) >= 10


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_builds_on_a_release_that_is_known(file: Path) -> None:
    found = instructions(file)
    assert [keyword for keyword, _ in found[:2]] == ["ARG", "FROM"]
    assert {keyword for keyword, _ in found} <= {"ARG", "FROM", "RUN", "ENV", "COPY"}
    (release,) = re.fullmatch(r"VLLM=v(\d+\.\d+\.\d+)", found[0][1]).groups()  # type: ignore[union-attr]
    series.for_release(release)
    assert found[1][1] == "vllm/vllm-openai:${VLLM}"
    text = file.read_text("utf-8")
    (named,) = re.findall(r"docker build -f (\S+)", text)
    assert ROOT / named == file
    assert text.count(f"VLLM=v{release}") == 2, "the comment's command names another release"
    for _, argument in found:
        for installed in re.findall(r"pip install [^&\n]*", argument):
            assert "--no-cache-dir" in installed, "the image would keep pip's cache"


@pytest.mark.parametrize("text", scripts(), ids=range(len(scripts())))
def test_shell_is_shell(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_of_ours_has_these_options() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    commands = parser.add_subparsers()
    layers.add_parser(commands)
    patches.add_parser(commands)
    seen = 0
    for text in scripts():
        for call in re.findall(r"(?:vllm-kimi-eagle3|-m vllm_kimi_eagle3\.cli) ((?:patches|layers)[^|&)>\n]*)", text):
            arguments = [re.sub(r"\$\{?\w+\}?", "0.33.0", part) for part in shlex.split(call)]
            if "--help" not in arguments:
                parser.parse_args(arguments)
            seen += 1
    assert seen >= 6


def test_every_module_that_is_run_exists() -> None:
    named = {name for text in scripts() for name in re.findall(r"(?:-m|--pyargs) (vllm_kimi_eagle3[\w.]*)", text)}
    assert named == {"vllm_kimi_eagle3.cli", "vllm_kimi_eagle3.regression"}
    assert all(importlib.util.find_spec(name) for name in named)


def test_the_workflow() -> None:
    text = WORKFLOW.read_text("utf-8")
    workflow = yaml.safe_load(text)
    assert set(workflow["jobs"]) == {"carried", "behaves", "rebase"}
    series.for_release(workflow["env"]["BASE"])
    assert workflow["permissions"] == {"contents": "read"}
    for step in steps():
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]), "an action is pinned to its commit"
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]


def test_the_python_in_the_overlays_dockerfile_passes_here() -> None:
    """It ends the build on a release with a fix that is REFUSED; here none is."""
    (text,) = (a for _, a in instructions(DOCKERFILES[0]) if "<<'PY'" in a)
    script = text.partition("\n")[2]
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    broken = script.replace("Need.REFUSED}", "Need.APPLY}")
    done = subprocess.run([sys.executable, "-"], input=broken, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "not known on this release" in done.stderr


def test_where_vllm_is_found() -> None:
    """The one line with which both find the folder of the installed package."""
    lines = {line for text in scripts() for line in re.findall(r"where=\$\(python3? -c '([^']+)'\)", text)}
    (line,) = lines
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=120)
    assert (Path(done.stdout.strip()) / "vllm/__init__.py").is_file()
