# SPDX-License-Identifier: Apache-2.0
"""Every series on every release of its range, from the releases' own source."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.drift.expected import expected
from tests.patches.trees import ENDS, RANGES, RELEASES, apply, small, texts, touched, whole
from tests.releases import tree
from tools import make_patches
from tools.source_edits import RECIPES
from vllm_kimi_eagle3.patching.engine import probe
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Need
from vllm_kimi_eagle3.registry import FIXES
from vllm_kimi_eagle3.source_patches import series
from vllm_kimi_eagle3.source_patches.plan import State, choose, examine
from vllm_kimi_eagle3.source_patches.tree import Tree

KEPT = {"D8"}
"""Needed beside the patches: what a plugin changes has to reach the key, whatever vLLM hashes of its own."""
BY_LABEL = {fix.label: fix for fix in FIXES}
LABELS = {recipe.file: recipe.label for recipe in RECIPES}


def label(name: str) -> str:
    return LABELS[name[5:-6]]


def test_the_folder_is_what_the_tool_makes() -> None:
    assert make_patches.differing(make_patches.ROOT) == []


def test_every_release_has_one_series() -> None:
    for release in RELEASES:
        asked = series.number(release)
        assert sum(series.number(a) <= asked <= series.number(b) for a, b in RANGES) == 1


@pytest.mark.parametrize("pair", RANGES, ids="-".join)
def test_headers(pair: tuple[str, str]) -> None:
    patches = series.load(*pair).patches
    assert [int(patch.name[:4]) for patch in patches] == list(range(1, len(patches) + 1))
    for patch in patches:
        fix = BY_LABEL[label(patch.name)]
        assert patch.defect == fix.id
        assert patch.fields["Description"].startswith(f"{fix.id} {fix.name}: ")
        assert {"From", "Date", "Subject", "Origin", "Forwarded", "Applied-Upstream", "Drop-When"} <= set(patch.fields)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", patch.fields["Last-Update"])


@pytest.mark.parametrize("release", RELEASES)
def test_release(release: str, tmp_path: Path) -> None:
    patches = series.for_release(release)
    files = touched(patches)
    pristine = texts(tree(release), files)
    folder = whole(release, tmp_path / "ours")

    carried = {label(patch.name) for patch in patches.patches}
    needed = {known for known in LABELS.values() if expected(known, release) is Need.APPLY}
    assert carried == needed

    with Tree(folder) as opened:
        assert choose(opened, None).name == patches.name
        assert {s.state for s in examine(opened, patches).standings} == {State.NEEDED}
    after = apply(folder, patches)
    assert {s.state for s in after.standings} == {State.HAS}
    assert after.texts == {}
    ours = texts(folder, files)
    assert ours.keys() == pristine.keys() and all(ours[file] != pristine[file] for file in files)
    assert texts(tree(release), files) == pristine, "the patch went through a hard link"
    for file, text in ours.items():
        compile(text, file, "exec")

    source = SourceTree(folder)
    verdicts = {name: probe(BY_LABEL[name], source) for name in carried}
    wrong = {n: v for n, v in verdicts.items() if v.need is not Need.RETIRED and n.split()[0] not in KEPT}
    assert not wrong

    theirs = small(release, tmp_path / "theirs", files)
    for patch in patches.patches:
        command = ["patch", "-p1", "--fuzz=0", "--batch", "-d", str(theirs), "-i", str(patch.path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    assert texts(theirs, files) == ours
    assert not list(theirs.rglob("*.rej"))


@pytest.mark.parametrize("release", ENDS)
def test_git_am(release: str, tmp_path: Path) -> None:
    patches = series.for_release(release)
    files = touched(patches)
    folder = small(release, tmp_path / "git", files)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.invalid"]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "pristine")
    git("am", "-q", *(str(patch.path) for patch in patches.patches))
    log = git("log", "--format=%s%n%b")
    assert all(f"{patch.defect}: {patch.title}" in log for patch in patches.patches)
    assert "Drop-When: " in log
    reference = small(release, tmp_path / "ours", files)
    apply(reference, patches)
    assert texts(folder, files) == texts(reference, files)


@pytest.mark.parametrize("release", ENDS)
def test_taken_back_one_by_one(release: str, tmp_path: Path) -> None:
    """A tree with the first n patches is partial, gets the rest, and ends like any other."""
    patches = series.for_release(release)
    files = touched(patches)
    folder = small(release, tmp_path, files)
    for count in range(len(patches.patches)):
        first = series.Series(patches.first, patches.last, patches.patches[:count])
        apply(folder, first)
        with Tree(folder) as opened:
            states = [standing.state for standing in examine(opened, patches).standings]
        assert states == [State.HAS] * count + [State.NEEDED] * (len(patches.patches) - count)
