# SPDX-License-Identifier: Apache-2.0
"""A model's folder and its small files: what a name means, and what is read of a file that can't be trusted.

A drafter named by its repository is found in the hub's cache, as vLLM left it there; nothing is fetched.
"""

from __future__ import annotations

import errno
import tracemalloc
from pathlib import Path

import pytest

from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.layers.files import load_json, local_folder, read_bytes, read_object, require_model

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


@pytest.mark.parametrize("value", ["org/model", "org/.model", "here", "./here", "a/b/c"])
def test_a_folder_or_a_repository_s_name_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "a/b/c"):
        (tmp_path / folder).mkdir(parents=True)
    require_model("--target", value)
    require_model("--target", str(tmp_path))


@pytest.mark.parametrize("value", ["model", "./model", "/model", "~/model", "a/b/c", "x" * 201 + "/y/z"])
def test_what_is_no_model_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as caught:
        require_model("--target", value)
    advice = "no such folder; give a model's folder, or a repository's name such as owner/model"
    assert str(caught.value) == f"--target {value[:200]}: {advice}"


def test_a_name_too_long_for_a_path() -> None:
    with pytest.raises(PlanError) as caught:
        require_model("--drafter", "x" * 300 + "/y")
    assert str(caught.value) == f"--drafter '{'x' * 80}' is no path: File name too long"


def test_the_limits_are_counted_exactly(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [0, 0]}')
    assert read_object(path, 13, values=3) == {"a": [0, 0]}
    with pytest.raises(PlanError, match="holds more than 2 values"):
        read_object(path, 13, values=2)
    with pytest.raises(PlanError, match="is larger than 12 bytes"):
        read_object(path, 12)


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(32 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(PlanError, match="is larger than 100 bytes"):
            read_bytes(path, 100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_fails_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.touch()

    def fails(self: Path, mode: str) -> None:
        raise OSError(errno.EIO, "Input/output error", str(self))

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(PlanError, match=rf"^{path} can't be read: Input/output error$"):
        read_bytes(path, 100)


def test_a_long_complaint_of_the_parser_s_is_cut() -> None:
    digits = "1" * 5000
    with pytest.raises(ValueError, match="digits") as long:
        int(digits)
    assert len(str(long.value)) > 120
    with pytest.raises(PlanError) as caught:
        load_json(digits.encode(), "HERE")
    assert str(caught.value) == f"HERE is not JSON: {str(long.value)[:120]}"
