# SPDX-License-Identifier: Apache-2.0
"""Read a model folder's small files without trusting them.

A link may lead where it likes inside the folder, not out of it, with one exception: the Hugging Face cache, where
``<repo>/snapshots/<commit>/`` holds links into ``<repo>/blobs/``. JSON must be UTF-8, without duplicate keys (which
of two lists would vLLM take?), and of bounded size, depth and number of values: an empty object takes three bytes in a
file and eighty in memory.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from .plan import PlanError

MAX_CONFIG = 4 << 20
MAX_VALUES = 100_000
"""Values in one JSON text. With 4 MiB of text, reading stays below 64 MiB whatever the text is."""


def inside(folder: Path, path: Path) -> Path:
    """``path`` with its links followed.

    Raises:
        PlanError: it leads out of ``folder``, or in a circle.
    """
    try:
        root, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):
        raise PlanError(f"{path} is a link that leads in a circle") from None
    except ValueError:
        raise PlanError(f"{str(path)!a} is no path") from None
    if real.is_relative_to(root):
        return real
    if root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs"):
        return real
    raise PlanError(f"{path} is a link out of its folder, to {real}; copy the file there instead")


def local_folder(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """The folder that holds a model's files on this machine; None where there is none yet. Nothing is fetched.

    Args:
        model: a folder, or a repository's name on the Hugging Face hub.
        revision: of the repository; None for its main one.
        cache: the hub's cache folder; None for the user's own.
    """
    try:
        if model and Path(model).is_dir():
            return Path(model)
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
    except (ImportError, ValueError, OSError):  # no hub client; no such name; a path too long
        return None
    return Path(found).parent if isinstance(found, str) else None


def require_model(flag: str, value: str) -> None:
    """Refuse a model that is neither there nor the name of a repository, which vLLM would fetch.

    Raises:
        PlanError: a folder that does not exist, or nothing at all, which vLLM would take for the current folder.
    """
    if not value:
        raise PlanError(f"{flag} is empty; give a model's folder, or a repository's name such as owner/model")
    try:
        there = Path(value).exists()
    except OSError as error:
        raise PlanError(f"{flag} {value[:80]!a} is no path: {error.strerror}") from None
    if not there and (value.startswith((".", "/", "~")) or value.count("/") != 1):
        raise PlanError(
            f"{flag} {value[:200]}: no such folder; give a model's folder, or a repository's name such as owner/model"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a model folder; the path may name the file itself.

    Raises:
        PlanError: there is none, or it can't be trusted or read.
    """
    path = folder if folder.name == "config.json" and not folder.is_dir() else folder / "config.json"
    return read_object(inside(path.parent, path), MAX_CONFIG)


def read_object(path: Path, limit: int, values: int = MAX_VALUES) -> dict[str, Any]:
    """One JSON object from a file of at most ``limit`` bytes and ``values`` values.

    Raises:
        PlanError: the file is missing, not ordinary, too large, or not one JSON object.
    """
    data = load_json(read_bytes(path, limit), str(path), values)
    if not isinstance(data, dict):
        raise PlanError(f"{path} holds no JSON object")
    return data  # pyright: ignore[reportUnknownVariableType]


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole file of at most ``limit`` bytes. A pipe or a device would block or never end, so it is refused.

    Raises:
        PlanError: the file is missing, not ordinary, or too large.
    """
    try:
        with ordinary(path).open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror}") from None
    if len(raw) > limit:
        raise PlanError(f"{path} is larger than {limit} bytes, too large for what it should be")
    return raw


def ordinary(path: Path) -> Path:
    """``path`` again, when it is an ordinary file; asked before opening, which may block for ever.

    Raises:
        PlanError: it is something else, or missing.
    """
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror}") from None
    if not regular:
        raise PlanError(f"{path} is not an ordinary file")
    return path


def load_json(raw: bytes, where: str, values: int = MAX_VALUES) -> object:
    """Parse strict JSON.

    Raises:
        PlanError: not UTF-8, not JSON, a duplicate key, ``NaN`` or ``Infinity``, nested too deeply, or more values
            than ``values``.
    """
    # Each value but the first of a list or object follows a comma, each first one an opening bracket.
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > values:
        raise PlanError(f"{where} holds more than {values} values, too many for what it should be")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(items)
        if len(data) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))
            raise PlanError(f"{where} has the key {twice[:60]!a} twice, so what it says is undefined")
        return data

    def constant(name: str) -> object:
        raise PlanError(f"{where} holds {name}, which is not JSON")

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except UnicodeDecodeError:
        raise PlanError(f"{where} is not UTF-8 text") from None
    except RecursionError:
        raise PlanError(f"{where} is nested too deeply") from None
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(f"{where} is not JSON: {str(error)[:120]}") from None
