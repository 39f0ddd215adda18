# SPDX-License-Identifier: Apache-2.0
"""Files of strangers: one clear sentence, within a second and 64 MiB, nothing executed, nothing written.

The commands ``layers`` and ``doctor --files-only`` read a good folder that is spoilt in one way each; a server reads
drafters with the same functions. Where a folder is odd and harmless, it is read all the same.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from vllm_kimi_eagle3.layers import AlignmentRecord, alignment, read_headers

SECONDS, MEBIBYTES = 1.0, 64
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 10,
    "hidden_size": 64,
    "vocab_size": 320,
}
DRAFTER = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "vocab_size": 320, IDS: [2, 5, 7]}
FILLED = 4 << 20
"""Bytes of the largest texts that are parsed at all."""


def filled(start: str, unit: str, end: str, size: int = FILLED) -> bytes:
    """JSON of ``size`` bytes at most: ``unit`` as often as it fits."""
    return (start + unit * ((size - len(start) - len(end)) // len(unit)) + end).encode()


def header(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def sparse(path: Path, size: int, start: bytes = b"") -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)


def instead(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Make something else in a file's place."""

    def made(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return made


def numbered(count: int) -> bytes:
    """As many distinct keys as ``count``, each with an empty object."""
    return ("{" + ",".join(f'"{i:x}":{{}}' for i in range(count)) + "}").encode()


# What stands in a file's place, whichever file it is; text for a config, a header or a record.
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b'{"architectures": [',
    "two texts": b"{}{}",
    "no object": b"[1, 2]",
    "a number": b"7",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "zero bytes": b"\0" * 4096,
    "a key twice": b'{"hidden_size": 64, "hidden_size": 65}',
    "a key twice, deep": b'{"a": [{"b": {"c": 1, "c": 2}}]}',
    "NaN": b'{"hidden_size": NaN}',
    "lists in lists": b'{"a": ' + b"[" * 500_000,
    "objects in objects": b'{"a": ' * 200_000,
    "ten thousand digits": b'{"hidden_size": ' + b"1" * 10_000 + b"}",
    "a million digits": b'{"hidden_size": ' + b"1" * 1_000_000 + b"}",
    "an exponent": b'{"hidden_size": 1e999999999}',
    "empty lists": filled('{"a": [', "[],", "[]]}"),
    "empty objects": filled('{"a": [', "{},", "{}]}"),
    "as many values as are read": numbered(49_900),
    "small numbers": filled('{"a": [', "1,", "1]}"),
    "floats": filled('{"a": [', "1.5,", "1]}"),
    "short keys": filled("{", '"a":0,', '"b":0}'),
    "one long text": filled('{"a": "', "x", '"}'),
    "one long text with a wide letter": filled('{"a": "\U0001f600', "x", '"}', FILLED - 8),
    "escapes": filled('{"a": "', "\\u0041", '"}'),
    "spaces": filled("", " ", "{"),
    "more than is read": filled('{"a": [', "1,", "1]}", 6 << 20),
}
PLACES: dict[str, Callable[[Path], Any]] = {
    "a pipe": instead(os.mkfifo),
    "a folder": instead(Path.mkdir),
    "a link to /dev/zero": instead(lambda path: path.symlink_to("/dev/zero")),
    "a link out of the folder": instead(lambda path: path.symlink_to("/etc/hostname")),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
    "a link to nothing": instead(lambda path: path.symlink_to("nothing")),
    "no right to read": lambda path: path.chmod(0),
    "a sparse file of 8 GiB": lambda path: sparse(path, 8 << 30),
}
GOOD = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
CHECKPOINTS: dict[str, bytes] = {
    "seven bytes": b"\0" * 7,
    "a length of zero": header(b"{}", length=0),
    "a length beyond the file": header(b"{}", length=1 << 40),
    "a negative length": b"\xff" * 8 + b"{}",
    "a length short of the header": header(GOOD, b"\0" * 8, length=len(GOOD) - 3),
    "no data": header(GOOD),
    "too much data": header(GOOD, b"\0" * 9),
    "a negative shape": header(GOOD.replace(b"[2]", b"[-2]"), b"\0" * 8),
    "a shape of many": header(GOOD.replace(b"[2]", b"[" + b"4611686018427387904," * 16 + b"1]"), b"\0" * 8),
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch /tmp/sprung'\ntR.",
    "more tensors than a drafter has": header(
        b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(20_100)) + b"}"
    ),
}
RECORDS: dict[str, Any] = {
    "boundaries of another target": {"boundaries": [2, 5, 77]},
    "a rule that is not theirs": {"rule": "output"},
    "a number for the rule": {"rule": 1},
    "another key": {"key": "0" * 64},
    "a rate above one": {"hit_rates": {"0": 2}},
    "a text for a rate": {"hit_rates": {"0": "<script>"}},
    "layers of a million digits": {"num_layers": 10**4000},
}


def spoil(folder: Path, record: Path, kind: str, name: str) -> None:
    """Spoil one file of a good set."""
    path = {"config": folder / "config.json", "checkpoint": folder / "model.safetensors", "record": record}[kind]
    if name in PLACES:
        PLACES[name](path)
    elif name in TEXTS:
        path.write_bytes(header(TEXTS[name]) if kind == "checkpoint" else TEXTS[name])
    elif kind == "checkpoint":
        path.write_bytes(CHECKPOINTS[name])
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **RECORDS[name]}))


VALID = ("as many values as are read", "one long text", "one long text with a wide letter", "escapes")
"""Large, and JSON objects all the same: a config may say nothing that matters here."""
CASES = [
    *(("config", name) for name in (*TEXTS, *PLACES)),
    *(("checkpoint", name) for name in (*TEXTS, *PLACES, *CHECKPOINTS)),
    *(("record", name) for name in (*TEXTS, *PLACES, *RECORDS) if name != "a link to nothing"),
]
ODD: dict[str, Callable[[Path], Any]] = {
    "tensors named like paths": lambda folder: save_file(
        {"fc.weight": numpy.zeros((4, 192), numpy.float16), "../../etc/passwd": numpy.zeros(1)},
        folder / "model.safetensors",
    ),
    "an index that leads out": lambda folder: (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"fc.weight": "../../../etc/passwd"}}'
    ),
    "code beside it": lambda folder: (folder / "modeling.py").write_text("open('/tmp/sprung', 'w')"),
    "a pickle beside it": lambda folder: (folder / "pytorch_model.bin").write_bytes(CHECKPOINTS["a pickle"]),
    "a README that is a pipe": lambda folder: os.mkfifo(folder / "README.md"),
}


def good(folder: Path) -> tuple[Path, Path, Path]:
    """A good set of files: target, drafter, and the record of the pair."""
    for name, config in (("target", TARGET), ("drafter", DRAFTER)):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    drafter = folder / "drafter"
    save_file({"fc.weight": numpy.zeros((4, 192), numpy.float16)}, drafter / "model.safetensors")
    key = alignment.content_key(TARGET, DRAFTER, read_headers(drafter))
    assert key is not None
    record = alignment.save(AlignmentRecord(key, (2, 5, 7), 10, (2, 5, 7), "boundary"), folder / "cache")
    return folder / "target", drafter, record


def job(folder: Path, *command: str) -> dict[str, Any]:
    arguments = [*command, "--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return {"arguments": arguments, "roots": [str(folder)], "cache": str(folder / "cache")}


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    # Not pytest's own folder: a process without root's powers must get through to it.
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def seen(root: Path, answer: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = {}
    for kind, name in CASES:
        folder = root / f"{len(jobs)}"
        spoil(folder / "drafter", good(folder)[2], kind, name)
        jobs[f"layers, {kind}: {name}"] = job(folder, "layers")
        jobs[f"doctor, {kind}: {name}"] = job(folder, "doctor", "--files-only")
    for name, make in {"sound": lambda folder: None, **ODD}.items():
        folder = root / f"{len(jobs)}"
        good(folder)
        make(folder / "drafter")
        jobs[f"layers, {name}"] = job(folder, "layers", "--json")
    for name, code in CONTROLS.items():
        jobs[name] = {**job(root, "layers"), "code": code.format(root=root)}
    found = dict(zip(jobs, answer("reading.py", list(jobs.values())), strict=True))
    assert not Path("/tmp/sprung").exists()
    return found


CONTROLS = {
    "hungry": "len(bytearray(80 << 20))",
    "slow": "sum(range(120_000_000))",
    "reads elsewhere": "len(open('/etc/hostname').read())",
    "writes": "open('{root}/written', 'w').close()",
    "starts a process": "__import__('subprocess').run(['true'])",
    "asks the network": "__import__('socket').socket()",
}


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("command", ["layers", "doctor"])
def test_one_sentence_in_bounded_time_and_memory(seen: dict[str, Any], command: str, kind: str, name: str) -> None:
    result = seen[f"{command}, {kind}: {name}"]
    said = result.get("stderr", "").strip()
    assert result["did"] == []
    assert result["cpu"] < SECONDS
    assert result["grown"] < MEBIBYTES
    if command == "layers":
        if (kind, result.get("status")) == ("config", 0):
            assert name in VALID
            return
        assert result.get("status") == 2, result
        assert said.count("\n") == 0 and said.startswith("vllm-kimi-eagle3 layers: ") and len(said) < 600, said
    else:
        # doctor words some of it as a finding; in any case it ends, and not with a traceback.
        assert result.get("status") in (0, 1, 2) and "raised" not in result, result


@pytest.mark.parametrize("name", ["sound", *ODD])
def test_what_is_harmless_is_read(seen: dict[str, Any], name: str) -> None:
    """The negative control: without the damage the same folders give a plan."""
    result = seen[f"layers, {name}"]
    assert result["status"] == 0 and json.loads(result["stdout"])["boundaries"] == [2, 5, 7]
    assert result["did"] == []


def test_the_watch_sees(seen: dict[str, Any]) -> None:
    """The negative control of the limits."""
    assert seen["hungry"]["grown"] > MEBIBYTES
    assert seen["slow"]["cpu"] > SECONDS
    for name in ("reads elsewhere", "writes", "starts a process", "asks the network"):
        assert seen[name]["did"], name
