# SPDX-License-Identifier: Apache-2.0
"""The safetensors header reader, on real files and on hostile ones."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tracemalloc
from pathlib import Path

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save, save_file

from vllm_kimi_eagle3.layers import PlanError, headers, read_headers
from vllm_kimi_eagle3.layers.headers import MAX_HEADER, read_header

TENSORS = {
    "fc.weight": numpy.zeros((4, 12), numpy.float16),
    "model.embed_tokens.weight": numpy.ones((8, 4), numpy.float32),
    "d2t": numpy.arange(8),
    "empty": numpy.zeros((0, 3), numpy.float32),
    "scalar": numpy.array(1, numpy.float32),
}


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def test_real_files(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    headers = read_headers(tmp_path)
    assert {name: info.shape for name, info in headers.tensors.items()} == {k: v.shape for k, v in TENSORS.items()}
    assert headers.fc_in_features == 12
    assert headers.has("d2t") and headers.has("embed_tokens.weight") and not headers.has("lm_head.weight")
    assert headers.find("tokens.weight") is None


def test_the_digest_tells_weights_apart(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    one = read_headers(tmp_path).digest
    assert read_headers(tmp_path).digest == one
    save_file({**TENSORS, "model.embed_tokens.weight": numpy.zeros((8, 4), numpy.float32)}, tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").replace(tmp_path / "model.safetensors")
    assert read_headers(tmp_path).digest != one


def test_shards(tmp_path):
    save_file({"fc.weight": TENSORS["fc.weight"]}, tmp_path / "a.safetensors")
    save_file({"d2t": TENSORS["d2t"]}, tmp_path / "b.safetensors")
    assert set(read_headers(tmp_path).tensors) == {"fc.weight", "d2t"}
    save_file({"d2t": TENSORS["d2t"]}, tmp_path / "c.safetensors")
    with pytest.raises(PlanError, match="another file"):
        read_headers(tmp_path)


def test_many_tensors(tmp_path, monkeypatch):
    save_file({"a": TENSORS["d2t"], "b": TENSORS["d2t"]}, tmp_path / "one.safetensors")
    save_file({"c": TENSORS["d2t"]}, tmp_path / "two.safetensors")
    monkeypatch.setattr(headers, "MAX_TENSORS", 3)
    assert len(read_headers(tmp_path).tensors) == 3
    monkeypatch.setattr(headers, "MAX_TENSORS", 2)
    with pytest.raises(PlanError, match=r"stores more than 2 tensors, too many for a drafter$"):
        read_headers(tmp_path)


def test_the_digest_takes_a_sample_from_the_middle(tmp_path):
    middle, size = 256 << 10, 512 << 10
    text = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()

    def digest(*changed: int) -> str | None:
        data = bytearray(size)
        for place in changed:
            data[place] = 1
        write(tmp_path, raw(text, bytes(data)))
        return read_headers(tmp_path).digest

    plain = digest()
    # What lies outside the sample is not read: weights may take hundreds of gigabytes.
    assert digest(0, middle - 1, middle + headers.SAMPLE, size - 1) == plain
    assert digest(middle) != plain and digest(middle + headers.SAMPLE - 1) != plain


def test_many_files(tmp_path, monkeypatch):
    for name in "ab":
        save_file({name: TENSORS["d2t"]}, tmp_path / f"{name}.safetensors")
    monkeypatch.setattr(headers, "MAX_FILES", 2)
    assert len(read_headers(tmp_path).tensors) == 2
    monkeypatch.setattr(headers, "MAX_FILES", 1)
    with pytest.raises(PlanError, match=r"holds 2 safetensors files, but at most 1 were expected$"):
        read_headers(tmp_path)


def test_a_file_that_fails_while_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path, raw({}))

    def fails(self, mode):
        raise OSError(errno.EIO, "Input/output error", str(self))

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(PlanError, match=rf"^{path} can't be read: Input/output error$"):
        read_header(path)


def test_a_broken_header_is_named_as_one(tmp_path):
    path = write(tmp_path, raw(b"{]"))
    with pytest.raises(PlanError, match=rf"^the header of {path} is not JSON: "):
        read_header(path)
    path = write(tmp_path, raw({"a": GOOD, "b": {**GOOD, "shape": [3], "data_offsets": [8, 16]}}, b"\0" * 16))
    with pytest.raises(PlanError, match=r"says that 'b' is 'F32' \[3\] in 8 bytes, which doesn't add up$"):
        read_header(path)


def test_no_files(tmp_path):
    assert read_headers(tmp_path) is None
    with pytest.raises(PlanError, match="listed"):
        read_headers(tmp_path / "none")


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 8,
        b"\xff" * 64,
        (1 << 40).to_bytes(8, "little") + b"{}",
        raw(b"[]"),
        raw(b"7"),
        raw(b"{"),
        raw(b"{}x"),
        raw(b'{"a": NaN}'),
        raw(b"\xff\xfe"),
        raw(b'{"a": ' + b"[" * 100_000),
        raw(b'{"a": ' + b"1" * 10_000 + b"}"),
        raw(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1}', b"\0" * 8),
        raw({"a": None}),
        raw({"a": {}}),
        raw({"a": {**GOOD, "dtype": 7}}, b"\0" * 8),
        raw({"a": {**GOOD, "shape": [-2]}}, b"\0" * 8),
        raw({"a": {**GOOD, "shape": [2.0]}}, b"\0" * 8),
        raw({"a": {**GOOD, "shape": [True, 2]}}, b"\0" * 8),
        raw({"a": {**GOOD, "shape": [1 << 62] * 16}}, b"\0" * 8),
        raw({"a": {**GOOD, "shape": [1] * 17 + [2]}}, b"\0" * 8),
        raw({"a": {**GOOD, "shape": [3]}}, b"\0" * 8),
        raw({"a": {**GOOD, "data_offsets": [8, 0]}}, b"\0" * 8),
        raw({"a": {**GOOD, "data_offsets": [0, 8, 8]}}, b"\0" * 8),
        raw({"a": {**GOOD, "data_offsets": [0, 1 << 70]}}, b"\0" * 8),
        raw({"a": GOOD}, b"\0" * 7),
        raw({"a": GOOD}, b"\0" * 9),
        raw({"a": GOOD, "b": {**GOOD, "data_offsets": [9, 17]}}, b"\0" * 17),
        raw({"a": GOOD, "b": GOOD}, b"\0" * 8),
        raw({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, b"\0" * 12),
    ],
)
def test_damage_is_one_sentence(tmp_path, content):
    with pytest.raises(PlanError) as caught:
        read_header(write(tmp_path, content))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_header_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((90 << 20).to_bytes(8, "little"))
        file.truncate(100 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(PlanError, match=str(MAX_HEADER)):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_largest_header_takes_bounded_memory(tmp_path):
    entry = b'"%06d":[],'
    text = b"{" + b"".join(entry % number for number in range(MAX_HEADER // 12 - 2))[:-1] + b"}"
    path = write(tmp_path, raw(text))
    tracemalloc.start()
    try:
        with pytest.raises(PlanError):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 40 * MAX_HEADER
    finally:
        tracemalloc.stop()


def test_pipes_devices_and_links_out(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match="ordinary"):
        read_headers(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(PlanError, match="ordinary"):
        read_headers(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(PlanError, match="link out"):
        read_headers(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(PlanError):
        read_headers(tmp_path)


def test_the_hugging_face_cache_may_link_to_its_blobs(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(TENSORS, blobs / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert read_headers(snapshot).fc_in_features == 12
    save_file(TENSORS, tmp_path / "outside")
    (snapshot / "other.safetensors").symlink_to("../../../outside")
    with pytest.raises(PlanError, match="link out"):
        read_headers(snapshot)


KNOWN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
SOUND = save(TENSORS)


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=6), st.integers(0, len(SOUND)))
def test_bytes_changed_and_files_cut(tmp_path, changes, keep):
    content = bytearray(SOUND)
    for place, byte in changes:
        content[place] = byte
    path = write(tmp_path, bytes(content[:keep] if keep % 3 == 0 else content))
    try:
        tensors = read_header(path)
    except PlanError:
        return
    # What we accept is no wider than what the format's own library accepts, apart from types that it doesn't know.
    if all(info.dtype in KNOWN for info in tensors.values()):
        with safe_open(path, "numpy") as file:
            assert set(file.keys()) == set(tensors)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes(tmp_path, content, framed):
    with contextlib.suppress(PlanError):
        read_header(write(tmp_path, raw(content) if framed else content))
