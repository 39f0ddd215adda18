# SPDX-License-Identifier: Apache-2.0
"""The helper that fetches release sources fails loudly; everything that relies on it can trust what it returns."""

from __future__ import annotations

import pytest

from tests import releases


def test_every_release_is_there():
    for release in releases.RELEASES:
        assert (releases.tree(release) / "vllm" / "version.py").is_file(), release


def test_a_release_that_does_not_exist_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KIMI_EAGLE3_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"0\.0\.0"):
        releases.tree("0.0.0")
    assert [entry.name for entry in (tmp_path / "releases").iterdir()] == ["0.0.0.lock"]


def test_a_definition_that_is_gone_is_an_error():
    release = releases.RELEASES[-1]
    with pytest.raises(LookupError, match=release):
        releases.definition(release, "envs.py", "no_such_function")
    with pytest.raises(FileNotFoundError):
        releases.source(release, "no_such_file.py")
