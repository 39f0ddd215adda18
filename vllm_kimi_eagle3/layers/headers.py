# SPDX-License-Identifier: Apache-2.0
"""Read the headers of safetensors files: names, types and shapes, never the weights.

A safetensors file opens with eight bytes, the header's length as a little-endian integer, and then that many bytes of
JSON: ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``, offsets counted from the end of the header
(github.com/huggingface/safetensors, README). The file is untrusted: every length is checked against the file's real
size before anything is read, and the header may take at most 4 MiB although the
format allows 100: a drafter has some dozens of tensors.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from .files import inside, load_json, ordinary
from .parse import describe
from .plan import PlanError

MAX_HEADER = 4 << 20
MAX_FILES = 256
MAX_TENSORS = 20_000
SAMPLE = 64 << 10
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_UNPACKED = frozenset(("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and shape of one stored tensor, with the byte range it takes in its file's data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class CheckpointHeaders:
    """All tensors of a checkpoint, and a digest that tells two trainings of the same architecture apart.

    Attributes:
        tensors: by name as stored.
        digest: SHA-256 over every file's header and up to 64 KiB from the middle of its data; None when it was
            made by hand.
    """

    tensors: Mapping[str, TensorInfo]
    digest: str | None = None

    def find(self, name: str) -> TensorInfo | None:
        """The tensor called ``name``, or whose last parts are ``name``, such as ``model.fc.weight``."""
        if name in self.tensors:
            return self.tensors[name]
        return next((info for key, info in self.tensors.items() if key.endswith("." + name)), None)

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is stored."""
        return self.find(name) is not None

    @property
    def fc_in_features(self) -> int | None:
        """Input features of ``fc``; None when there is no such weight, or it is packed and its shape says nothing."""
        info = self.find("fc.weight")
        if info is None or len(info.shape) != 2 or info.dtype not in _UNPACKED:
            return None
        return info.shape[1]


def read_headers(folder: Path) -> CheckpointHeaders | None:
    """The headers of all ``*.safetensors`` files directly in ``folder``; None when there are none.

    Raises:
        PlanError: a file is damaged or hostile, or leads out of the folder.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise PlanError(f"{folder} can't be listed: {error.strerror}") from None
    if not paths:
        return None
    if len(paths) > MAX_FILES:
        raise PlanError(f"{folder} holds {len(paths)} safetensors files, but at most {MAX_FILES} were expected")
    tensors: dict[str, TensorInfo] = {}
    digest = hashlib.sha256()
    for path in paths:
        for name, info in read_header(inside(folder, path), digest).items():
            if name in tensors:
                raise PlanError(f"{path} stores {describe(name)}, which another file of the checkpoint stores too")
            tensors[name] = info
        if len(tensors) > MAX_TENSORS:
            raise PlanError(f"{folder} stores more than {MAX_TENSORS} tensors, too many for a drafter")
    return CheckpointHeaders(tensors, digest.hexdigest())


def read_header(path: Path, digest: Any = None) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file.

    Args:
        path: the file.
        digest: a ``hashlib`` object that takes the header and a sample of the data.

    Raises:
        PlanError: the file is not a sound safetensors file, with what is wrong with it.
    """
    try:
        with ordinary(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length < 2 or length > size - 8:
                raise PlanError(
                    f"{path} is no whole safetensors file: {size} bytes, but its header claims {describe(length)}"
                )
            if length > MAX_HEADER:
                raise PlanError(f"{path} has a header of {length} bytes, but at most {MAX_HEADER} are read")
            raw = file.read(length)
            tensors = _tensors(load_json(raw, f"the header of {path}"), size - 8 - length, path)
            if digest is not None:
                digest.update(raw)
                file.seek(8 + length + (size - 8 - length) // 2)
                digest.update(file.read(SAMPLE))
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror}") from None
    return tensors


def _tensors(header: object, data_size: int, path: Path) -> dict[str, TensorInfo]:
    if not isinstance(header, dict):
        raise PlanError(f"the header of {path} is {describe(header)}, but a JSON object was expected")
    entries = cast("dict[str, Any]", header)
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            tensors[name] = _tensor(name, entry, data_size, path)
    last = 0
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != last:
            what = "share bytes" if info.begin < last else "leave a hole at bytes"
            raise PlanError(
                f"the header of {path} lets tensors {what} {min(info.begin, last)} to {max(info.begin, last)}"
            )
        last = info.end
    if last != data_size:
        raise PlanError(f"{path} has {data_size} bytes of data, but its header describes {last}")
    return tensors


def _tensor(name: str, entry: object, data_size: int, path: Path) -> TensorInfo:
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise PlanError(
            f"the header of {path} describes {describe(name)} without a dtype, a shape and two data_offsets"
        )
    begin, end = offsets
    if not begin <= end <= data_size:
        raise PlanError(
            f"{path} puts {describe(name)} at bytes {describe(begin)} to {describe(end)}, but has {data_size} bytes "
            "of data: truncated, or not what it claims"
        )
    bits = _BITS.get(dtype)
    if len(shape) > 16 or (bits is not None and math.prod(shape) * bits != 8 * (end - begin)):
        raise PlanError(
            f"{path} says that {describe(name)} is {describe(dtype)} {describe(shape)} in {end - begin} bytes, "
            "which doesn't add up"
        )
    return TensorInfo(dtype, shape, begin, end)


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    sizes: list[int] = []
    for item in cast("list[object]", value):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 1 << 63:
            return None
        sizes.append(item)
    return tuple(sizes)


__all__ = ["CheckpointHeaders", "TensorInfo", "read_header", "read_headers"]
