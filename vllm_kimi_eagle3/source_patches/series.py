# SPDX-License-Identifier: Apache-2.0
"""Find the patches that belong to a release.

``patches/<first>-<last>/`` holds the patches of a range of releases, and ``series`` their order, as quilt has it. The
folder is package data in a wheel and stands beside the package in a checkout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .diff import DiffError, FileChange, parse

_RANGE = re.compile(r"(\d+\.\d+\.\d+)(?:-(\d+\.\d+\.\d+))?")
_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")
_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?![\d])")


class SeriesError(ValueError):
    """The patches cannot be found or read, or no series is for that release. One sentence."""


@dataclass(frozen=True)
class Patch:
    """One patch: what it is for, from its header, and what it changes."""

    name: str
    defect: str
    """Such as ``D6``."""
    title: str
    fields: dict[str, str]
    """The DEP-3 fields: ``Description``, ``Origin``, ``Forwarded``, …"""
    changes: tuple[FileChange, ...]
    path: Path


@dataclass(frozen=True)
class Series:
    """The patches of a range of releases, in order."""

    first: str
    last: str
    patches: tuple[Patch, ...]

    @property
    def name(self) -> str:
        """The range, as its folder is called."""
        return self.first if self.first == self.last else f"{self.first}-{self.last}"


def number(release: str) -> tuple[int, int, int]:
    """A release as something that sorts; what follows the third number is left out.

    Raises:
        SeriesError: it is no version.
    """
    match = _VERSION.match(release)
    if match is None:
        raise SeriesError(f"{release[:60]!a} is no vLLM version; something like 0.33.0 was expected")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def folder() -> Path:
    """Where the patches are.

    Raises:
        SeriesError: this installation has none.
    """
    package = Path(__file__).parents[1]
    for candidate in (package / "patches", package.parent / "patches"):
        if (candidate / "README.md").is_file():
            return candidate
    raise SeriesError("this installation of vllm-kimi-eagle3 has no patches; install its wheel, or use a checkout")


def ranges(root: Path | None = None) -> list[tuple[str, str]]:
    """The first and last release of every series, oldest first."""
    found = [
        (match[1], match[2] or match[1])
        for entry in (root or folder()).iterdir()
        if (match := _RANGE.fullmatch(entry.name)) and entry.is_dir()
    ]
    return sorted(found, key=lambda pair: number(pair[0]))


def for_release(release: str, root: Path | None = None) -> Series:
    """The series of a release.

    Raises:
        SeriesError: it is no version, no series is for it, or the series cannot be read.
    """
    asked = number(release)
    known = ranges(root)
    for first, last in known:
        if number(first) <= asked <= number(last):
            return load(first, last, root)
    oldest, newest = (known[0][0], known[-1][1]) if known else ("none", "none")
    raise SeriesError(
        f"no series of patches is for vLLM {release[:60]}; they are for the releases from {oldest} to {newest}"
    )


def load(first: str, last: str, root: Path | None = None) -> Series:
    """One series.

    Raises:
        SeriesError: a patch is missing or malformed.
    """
    base = (root or folder()) / (first if first == last else f"{first}-{last}")
    try:
        names = [line for line in (base / "series").read_text("utf-8").split("\n") if line and line[0] != "#"]
        return Series(first, last, tuple(_patch(base, name) for name in names))
    except (OSError, UnicodeDecodeError, DiffError) as error:
        raise SeriesError(f"the series {base.name} cannot be read: {error}") from None


def _patch(base: Path, name: str) -> Patch:
    if not _NAME.fullmatch(name):
        raise DiffError(f"it names the patch {name[:60]!a}")
    text = (base / name).read_text("utf-8")
    fields = _fields(text)
    defect, _, title = fields.get("Subject", "").removeprefix("[PATCH] ").partition(": ")
    return Patch(name, defect, title, fields, parse(text), base / name)


def _fields(text: str) -> dict[str, str]:
    """The header's fields; a line that starts with a space carries the one before it on."""
    fields: dict[str, str] = {}
    last = ""
    for line in text.partition("\n---\n")[0].split("\n"):
        key, colon, value = line.partition(": ")
        if line.startswith(" ") and last:
            fields[last] += " " + line.strip()
        elif colon and re.fullmatch(r"[A-Za-z0-9-]+", key):
            last = key
            fields[key] = value
    return fields
