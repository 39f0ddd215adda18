# SPDX-License-Identifier: Apache-2.0
"""Alignment records: found by content, checked in themselves, never half written."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
from pathlib import Path

import pytest

from tests.layers import corpus
from vllm_kimi_eagle3.layers import AlignmentRecord, CheckpointHeaders, PlanError, alignment, config_updates, resolve

TARGET = corpus.target("kimi-k2.5")
DRAFTER = corpus.drafter("specforge-custom")
HEADERS = CheckpointHeaders({}, "ab" * 32)
KEY = alignment.content_key(TARGET, DRAFTER, HEADERS)
RECORD = AlignmentRecord(
    KEY,
    (3, 21, 44),
    61,
    (4, 22, 45),
    "output",
    {"-1": 0.31, "0": 0.42, "1": 0.58},
    {"-1": (0.28, 0.34), "0": (0.39, 0.45), "1": (0.55, 0.61)},
    "vLLM 0.33.0, 4096 tokens",
)


def test_there_and_back(tmp_path):
    assert alignment.load(KEY, tmp_path) is None
    path = alignment.save(RECORD, tmp_path / "made" / "for it")
    assert path.parent == tmp_path / "made" / "for it" / "alignment"
    path = alignment.save(RECORD, tmp_path)
    assert path.parent == tmp_path / "alignment"
    assert [entry.name for entry in path.parent.iterdir()] == [f"{KEY}.json"]
    assert alignment.load(KEY, tmp_path) == RECORD
    plan = resolve(TARGET, DRAFTER, alignment=alignment.load(KEY, tmp_path))
    assert (plan.decided_by, plan.boundaries) == ("alignment record", (4, 22, 45))


def test_the_environment_names_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_KIMI_EAGLE3_CACHE", str(tmp_path / "cache"))
    assert alignment.save(RECORD).parent == tmp_path / "cache" / "alignment"
    assert alignment.load(KEY) == RECORD
    monkeypatch.delenv("VLLM_KIMI_EAGLE3_CACHE")
    assert alignment.load(KEY) is None


def test_without_a_name_the_cache_lies_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_KIMI_EAGLE3_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert alignment.save(RECORD).parent == tmp_path / ".cache" / "vllm-kimi-eagle3" / "alignment"
    assert alignment.load(KEY) == RECORD


def test_a_user_without_a_home_has_no_records(monkeypatch):
    """A container's user has often neither a name nor a home; its servers must start."""
    monkeypatch.delenv("VLLM_KIMI_EAGLE3_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert alignment.load(KEY) is None
    sentence = "this user has no home folder; set VLLM_KIMI_EAGLE3_CACHE to a folder of yours"
    with pytest.raises(PlanError, match=f"^{sentence}$"):
        alignment.save(RECORD)


def test_somebody_elses_home_holds_no_records_of_ours(monkeypatch, tmp_path):
    """``docker run --user`` leaves HOME as it was: a folder that this user may not enter."""
    monkeypatch.delenv("VLLM_KIMI_EAGLE3_CACHE", raising=False)
    monkeypatch.setattr(Path, "stat", no_entry)
    assert alignment.load(KEY) is None
    monkeypatch.setenv("VLLM_KIMI_EAGLE3_CACHE", str(tmp_path))
    with pytest.raises(PlanError, match="can't be read: Permission denied; let this user read"):
        alignment.load(KEY)


def no_home():
    raise RuntimeError("Could not determine home directory.")


def no_entry(self, **_):
    raise PermissionError(errno.EACCES, "Permission denied", str(self))


def test_the_key_follows_content():
    assert alignment.content_key(TARGET, DRAFTER, None) is None
    assert alignment.load(None) is None
    others = {
        alignment.content_key(TARGET, DRAFTER, CheckpointHeaders({}, "cd" * 32)),
        alignment.content_key(corpus.target("deepseek-v3"), DRAFTER, HEADERS),
        alignment.content_key(TARGET, corpus.drafter("aq-medai-kimi-k25-eagle3"), HEADERS),
        alignment.content_key(TARGET, {}, HEADERS),
    }
    assert KEY not in others and len(others) == 4
    # What doesn't change the meaning doesn't change the key, our own updates included.
    assert alignment.content_key(TARGET, {**DRAFTER, "torch_dtype": "float16"}, HEADERS) == KEY
    updated = {**DRAFTER, **config_updates(resolve(TARGET, DRAFTER), DRAFTER)}
    assert alignment.content_key(TARGET, updated, HEADERS) == KEY
    renamed = {**TARGET, "text_config": {**TARGET["text_config"], "model_type": "deepseek_v3"}}
    assert alignment.content_key(renamed, {**DRAFTER, "model_type": "eagle"}, HEADERS) == KEY


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"key": "0" * 64},
        {"num_layers": True},
        {"num_layers": 0},
        {"ids": "3,21"},
        {"boundaries": None},
        {"boundaries": []},
        {"boundaries": [4, 22, 62]},
        {"boundaries": [22, 4, 45]},
        {"boundaries": [4, 4, 45]},
        {"boundaries": [3, 21, 44]},
        {"rule": "boundary"},
        {"rule": "outputs"},
        {"hit_rates": {"0": 1.5}},
        {"hit_rates": {"2": 0.5}},
        {"hit_rates": []},
        {"intervals": {"0": [0.5, 0.4]}},
        {"intervals": {"0": 0.5}},
    ],
)
def test_damaged_records_are_refused(tmp_path, change):
    path = alignment.save(RECORD, tmp_path)
    path.write_text(json.dumps({**RECORD.to_json(), **change}))
    with pytest.raises(
        PlanError, match=r"alignment record.*; delete it and run `vllm-kimi-eagle3 calibrate` again$"
    ) as e:
        alignment.load(KEY, tmp_path)
    assert str(path) in str(e.value) and str(e.value).count("delete it") == 1


def test_a_record_needs_no_rates(tmp_path):
    data = RECORD.to_json()
    for key in ("hit_rates", "intervals", "measured_on"):
        del data[key]
    assert alignment.parse(data, KEY, "HERE") == dataclasses.replace(RECORD, hit_rates={}, intervals={}, measured_on="")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"a":1,"a":2}', b" " * (300 << 10)])
def test_records_that_are_no_json_objects(tmp_path, content):
    path = alignment.save(RECORD, tmp_path)
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"alignment record.*; delete it and run `vllm-kimi-eagle3 calibrate` again$"):
        alignment.load(KEY, tmp_path)


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "A" * 64, "X" * 64, "0" * 63, "0" * 63 + "\n"])
def test_a_key_is_no_path(tmp_path, key):
    with pytest.raises(PlanError):
        alignment.record_path(key, tmp_path)


def test_a_link_in_the_cache_is_replaced_and_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    path = alignment.record_path(KEY, tmp_path / "cache")
    path.parent.mkdir(parents=True)
    path.symlink_to(outside)
    with pytest.raises(PlanError, match="link out of its folder"):
        alignment.load(KEY, tmp_path / "cache")
    alignment.save(RECORD, tmp_path / "cache")
    assert outside.read_text() == "theirs" and not path.is_symlink()
    assert alignment.load(KEY, tmp_path / "cache") == RECORD


def test_a_full_disk_leaves_the_old_record(tmp_path, monkeypatch):
    alignment.save(RECORD, tmp_path)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        alignment.save(dataclasses.replace(RECORD, measured_on="new"), tmp_path)
    assert alignment.load(KEY, tmp_path) == RECORD
    assert len(list((tmp_path / "alignment").iterdir())) == 1


def test_a_record_in_the_making(tmp_path, monkeypatch):
    """It lies beside its place, so that renaming is one step, under a name that says whose leftover it would be."""
    found = []
    monkeypatch.setattr(os, "fsync", lambda handle: found.extend((tmp_path / "alignment").iterdir()))
    path = alignment.save(RECORD, tmp_path)
    (made,) = found
    assert made.name.startswith(f"{KEY[:12]}.") and made.suffix == ".tmp"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644, "a server of another user reads it"


def test_an_emptied_cache_does_not_hide_what_failed(tmp_path, monkeypatch):
    def emptied_and_full(handle):
        for entry in (tmp_path / "alignment").iterdir():
            entry.unlink()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", emptied_and_full)
    with pytest.raises(OSError, match="No space left"):
        alignment.save(RECORD, tmp_path)
