# SPDX-License-Identifier: Apache-2.0
"""Parse unified diffs and apply them, strictly: every line of context has to be there, no fuzz.

A hunk may have moved. It is taken where its header says (shifted by what the hunks before it moved), else at the one
other place that it fits; a hunk that fits several other places is a conflict, where ``patch`` would take the nearest.
Only changes of existing text files are known: no new, deleted, renamed or binary files, and no files without a newline
at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

LARGEST = 1 << 20
"""Characters of a patch; ours are a few thousand."""

_HEADER = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")


class DiffError(ValueError):
    """A text is no diff of the kind known here, or names a file that it must not."""


class Conflict(Exception):
    """A hunk fits nowhere, or in several places. One sentence."""


@dataclass(frozen=True)
class Hunk:
    """Lines, each with its newline, that become other lines. ``start`` counts from 0."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FileChange:
    """The hunks of one file. ``path`` is relative, with forward slashes, and stays inside its folder."""

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileChange:
        """The change that takes this one back."""
        hunks: list[Hunk] = []
        moved = 0
        for hunk in self.hunks:
            hunks.append(Hunk(hunk.start + moved, hunk.new, hunk.old))
            moved += len(hunk.new) - len(hunk.old)
        return replace(self, hunks=tuple(hunks))

    def apply(self, text: str) -> str:
        """The changed text.

        Raises:
            Conflict: a hunk does not fit, or fits in several places.
        """
        lines = lines_of(text)
        out: list[str] = []
        done = moved = 0
        for number, hunk in enumerate(self.hunks, 1):
            at = _place(lines, hunk, done, hunk.start + moved)
            if at is None:
                raise Conflict(f"hunk {number} of {self.path} does not fit")
            if at < 0:
                raise Conflict(f"hunk {number} of {self.path} fits in several places")
            out += lines[done:at]
            out += hunk.new
            done = at + len(hunk.old)
            moved = at - hunk.start
        return "".join(out + lines[done:])


def lines_of(text: str) -> list[str]:
    """Lines with their newlines. ``splitlines`` would also break at form feeds and other characters inside a line."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _place(lines: list[str], hunk: Hunk, first: int, expected: int) -> int | None:
    """Where a hunk goes: None if nowhere, -1 if that is not clear."""
    size = len(hunk.old)
    old = list(hunk.old)
    if expected >= first and lines[expected : expected + size] == old:
        return expected
    places = [i for i in range(first, len(lines) - size + 1) if lines[i] == old[0] and lines[i : i + size] == old]
    if len(places) > 1:
        return -1
    return places[0] if places else None


def safe_path(name: str) -> str:
    """A path of a diff's header without its first component.

    Raises:
        DiffError: it is absolute, climbs, or is written in a way that could hide either.
    """
    parts = name.split("/")
    if (
        len(parts) < 2
        or any(part in ("", ".", "..", ".git") for part in parts)
        or any(ord(character) < 33 or character in '\\:"' for character in name)
    ):
        raise DiffError(f"the diff names the file {name[:80]!a}; a plain relative path was expected")
    return str(PurePosixPath(*parts[1:]))


def parse(text: str) -> tuple[FileChange, ...]:
    """The changes of a diff; whatever stands before its first file is left out.

    Raises:
        DiffError: it is too long, malformed, changes nothing, or names a file twice or outside its folder.
    """
    if len(text) > LARGEST:
        raise DiffError(f"the diff has {len(text)} characters, at most {LARGEST} were expected")
    lines = text.split("\n")
    changes: list[FileChange] = []
    i = next((n for n, line in enumerate(lines) if line.startswith("--- a/")), len(lines))
    while i < len(lines) and lines[i].startswith("--- "):
        if i + 1 == len(lines) or not lines[i + 1].startswith("+++ b/"):
            raise DiffError(f"line {i + 2} of the diff does not name the changed file")
        path = safe_path(lines[i][4:])
        if safe_path(lines[i + 1][4:]) != path:
            raise DiffError(f"the diff renames {path}, which is not known here")
        i, hunks = _hunks(lines, i + 2, path)
        if path in (change.path for change in changes):
            raise DiffError(f"the diff names {path} twice")
        changes.append(FileChange(path, hunks))
        while i < len(lines) and (lines[i].startswith("diff --git ") or lines[i] == ""):
            i += 1
    # A mail's signature, "-- ", may follow; anything else would be left out silently.
    if i < len(lines) and lines[i] not in ("-- ", "--"):
        raise DiffError(f"line {i + 1} of the diff belongs to no hunk")
    if not changes:
        raise DiffError("the text holds no diff")
    return tuple(changes)


def _hunks(lines: list[str], i: int, path: str) -> tuple[int, tuple[Hunk, ...]]:
    hunks: list[Hunk] = []
    while i < len(lines) and (match := _HEADER.match(lines[i])):
        start, olds, _, news = (int(group) if group is not None else 1 for group in match.groups())
        i += 1
        old: list[str] = []
        new: list[str] = []
        while len(old) < olds or len(new) < news:
            line = lines[i] if i < len(lines) else "\\"
            if line[:1] not in (" ", "-", "+"):
                raise DiffError(f"a hunk of {path} ends early, at line {i + 1} of the diff")
            if line[0] != "+":
                old.append(line[1:] + "\n")
            if line[0] != "-":
                new.append(line[1:] + "\n")
            i += 1
        if (len(old), len(new)) != (olds, news) or not old or old == new:
            raise DiffError(f"a hunk of {path} does not have the lines that its header counts, or has no context")
        if hunks and start - 1 < hunks[-1].start + len(hunks[-1].old):
            raise DiffError(f"the hunks of {path} are not in order")
        hunks.append(Hunk(start - 1, tuple(old), tuple(new)))
    if not hunks:
        raise DiffError(f"{path} is named without a hunk")
    return i, tuple(hunks)
