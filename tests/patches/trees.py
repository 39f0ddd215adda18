# SPDX-License-Identifier: Apache-2.0
"""Copies of release trees that a test may change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.drift.expected import RELEASES, number
from tests.releases import tree
from vllm_kimi_eagle3.source_patches import series
from vllm_kimi_eagle3.source_patches.plan import Plan, examine
from vllm_kimi_eagle3.source_patches.series import Series
from vllm_kimi_eagle3.source_patches.tree import Tree

RANGES = series.ranges()
ENDS = sorted({release for pair in RANGES for release in pair}, key=number)
"""The first and the last release of every series."""


def touched(patches: Series) -> list[str]:
    return sorted({change.path for patch in patches.patches for change in patch.changes})


def small(release: str, folder: Path, files: list[str]) -> Path:
    """Copies of a few files of a release, and of what makes them a vLLM."""
    for file in {*files, "vllm/__init__.py", "vllm/_version.py"}:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        if (tree(release) / file).is_file():
            shutil.copyfile(tree(release) / file, folder / file)
    return folder


def whole(release: str, folder: Path) -> Path:
    """A release as hard links: made at once, and a patch that wrote through them would be seen in the cache."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    shutil.copytree(tree(release), folder, copy_function=link)
    return folder


def apply(folder: Path, patches: Series) -> Plan:
    with Tree(folder) as opened:
        opened.replace(examine(opened, patches).texts)
        return examine(opened, patches)


def texts(folder: Path, files: list[str]) -> dict[str, str]:
    return {file: (folder / file).read_text("utf-8") for file in files}


__all__ = ["ENDS", "RANGES", "RELEASES", "apply", "small", "texts", "touched", "whole"]
