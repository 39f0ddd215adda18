# SPDX-License-Identifier: Apache-2.0
"""The values of one small integer tensor in a safetensors file: for ``d2t`` and ``t2d``, and nothing larger.

Nothing is unpickled and nothing but the asked bytes is read. Headers are checked by ``layers.headers`` first.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.layers.files import inside
from vllm_kimi_eagle3.layers.headers import TensorInfo, read_header

MAX_BYTES = 32 << 20
"""A vocabulary of a million tokens in 64-bit integers is 8 MiB."""

_CODES = {"I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "B", "U16": "H", "U32": "I"}


def locate(folder: Path, name: str) -> tuple[Path, str, TensorInfo] | None:
    """The file that stores ``name`` (also as the last part of a longer name), the stored name, and its place.

    Raises:
        PlanError: a file of the folder is damaged or leads out of it.
    """
    for path in sorted(path for path in folder.iterdir() if path.suffix == ".safetensors"):
        real = inside(folder, path)
        for stored, info in read_header(real).items():
            if stored == name or stored.endswith("." + name):
                return real, stored, info
    return None


def integers(folder: Path, name: str) -> array[int] | None:
    """All values of an integer or boolean tensor; None when no file stores it.

    Raises:
        PlanError: it is of another type, or larger than ``MAX_BYTES``, or the file can't be read.
    """
    found = locate(folder, name)
    if found is None:
        return None
    path, stored, info = found
    code = _CODES.get(info.dtype)
    if code is None:
        raise PlanError(f"{stored} in {path} is {info.dtype}, but integers were expected")
    if info.end - info.begin > MAX_BYTES:
        raise PlanError(f"{stored} in {path} takes {info.end - info.begin} bytes, but at most {MAX_BYTES} are read")
    values = array(code)
    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            file.seek(8 + header + info.begin)
            values.frombytes(file.read(info.end - info.begin))
    except (OSError, ValueError) as error:
        raise PlanError(f"{stored} in {path} can't be read: {error}") from None
    if sys.byteorder == "big":
        values.byteswap()
    return values
