# SPDX-License-Identifier: Apache-2.0
"""A drafter named by its repository is found in the hub's cache, as vLLM left it there; nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_kimi_eagle3.layers.files import local_folder

NAME, COMMIT = "org/drafter", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache in the hub's layout: a blob, a snapshot that links to it, and a branch."""
    repository = tmp_path / "models--org--drafter"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "blobs" / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to(repository / "blobs" / "abc")
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert local_folder(str(tmp_path)) == tmp_path


def test_a_repository_is_its_snapshot(cache: Path) -> None:
    snapshot = cache / "models--org--drafter" / "snapshots" / COMMIT
    assert local_folder(NAME, cache=str(cache)) == snapshot
    assert local_folder(NAME, COMMIT, str(cache)) == snapshot
    assert local_folder(NAME, "main", str(cache)) == snapshot


@pytest.mark.parametrize("model", ["org/other", "no/such/folder/at/all", "", "a" * 500, "../up"])
def test_what_is_not_here_is_none(cache: Path, model: str) -> None:
    assert local_folder(model, cache=str(cache)) is None


def test_another_revision_is_not_here(cache: Path) -> None:
    assert local_folder(NAME, "v2", str(cache)) is None
