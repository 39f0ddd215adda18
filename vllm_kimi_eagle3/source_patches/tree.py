# SPDX-License-Identifier: Apache-2.0
"""Read and replace files below one folder, and nowhere else, whatever the folder holds.

Every step down is opened relative to the one above it and refuses symbolic links, so that neither a link that is there
nor one that appears meanwhile leads outside. A changed file is a new file moved to the old one's name: hard links, as
package managers make them into their caches, are cut instead of followed. Needs a POSIX system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Generator, Mapping
from pathlib import Path

LARGEST = 8 << 20
"""Bytes of a file that a patch may change; vLLM's largest module has some 300 000."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SCRATCH = ".vllm-kimi-eagle3-new"


class TreeError(Exception):
    """A file cannot be read or replaced. One sentence."""


class Tree:
    """The files below a folder, held open as long as this object is."""

    def __init__(self, root: Path) -> None:
        """Open a folder; symbolic links on the way to it are the caller's.

        Raises:
            TreeError: it is no folder, or holds no ``vllm`` package.
        """
        self.root = root
        try:
            self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise TreeError(f"{str(root)[:200]!a} cannot be opened as a folder: {_reason(error)}") from None
        try:
            self.read("vllm/__init__.py")
        except TreeError as error:
            self.close()
            raise TreeError(f"{str(root)[:200]!a} is not a folder that holds a vllm package: {error}") from None

    def close(self) -> None:
        """Let the folder go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, path: str) -> str:
        """A file's text; bytes that are no UTF-8 survive a round trip.

        Raises:
            TreeError: it is not there, no ordinary file, too long, or behind a symbolic link.
        """
        with self._parent(path) as (parent, name):
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
            except OSError as error:
                raise TreeError(f"{path} cannot be read: {_reason(error)}") from None
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise TreeError(f"{path} is not an ordinary file")
                if status.st_size > LARGEST:
                    raise TreeError(f"{path} has {status.st_size} bytes, at most {LARGEST} were expected")
                with os.fdopen(fd, "rb", closefd=False) as file:
                    return file.read(LARGEST).decode("utf-8", "surrogateescape")
            finally:
                os.close(fd)

    def replace(self, texts: Mapping[str, str]) -> None:
        """Give files new texts: all of them, or none.

        Raises:
            TreeError: one could not be written, or somebody else is at work here; all are as before.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TreeError(f"another process is patching {self.root}") from None
        before = {path: self.read(path) for path in texts}
        written: list[str] = []
        try:
            try:
                for path, text in texts.items():
                    written.append(path)
                    self._write(path, text)
            except BaseException:
                self._restore(written, before)
                raise
        except OSError as error:
            raise TreeError(f"{written[-1]} cannot be written: {_reason(error)}; nothing was changed") from None
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _restore(self, paths: list[str], before: Mapping[str, str]) -> None:
        """Put the old texts back, as many as can be."""
        lost: list[str] = []
        for path in paths:
            try:
                if self.read(path) != before[path]:
                    self._write(path, before[path])
            except (OSError, TreeError):
                lost.append(path)
        if lost:
            raise TreeError(f"a file could not be written, and {', '.join(lost)} not be put back")

    def _write(self, path: str, text: str) -> None:
        with self._parent(path) as (parent, name):
            old = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISREG(old.st_mode):
                raise TreeError(f"{path} is not an ordinary file")
            scratch = f".{name}{_SCRATCH}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch, dir_fd=parent)  # left behind by a run that was killed
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(scratch, flags, 0o600, dir_fd=parent)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(text.encode("utf-8", "surrogateescape"))
                    os.fchmod(fd, stat.S_IMODE(old.st_mode) & 0o777)
                    file.flush()
                    os.fsync(fd)
                os.rename(scratch, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(scratch, dir_fd=parent)
                raise

    @contextlib.contextmanager
    def _parent(self, path: str) -> Generator[tuple[int, str]]:
        """The open folder of a file, reached step by step, and the file's name in it."""
        *folders, name = path.split("/")
        if any(part in ("", ".", "..") for part in (*folders, name)):
            raise TreeError(f"{path[:80]!a} is not a plain relative path")
        fd = os.dup(self._fd)
        try:
            for part in folders:
                try:
                    below = os.open(part, _FOLDER, dir_fd=fd)
                except OSError as error:
                    raise TreeError(f"{path} cannot be reached: {part} is {_reason(error)}") from None
                os.close(fd)
                fd = below
            yield fd, name
        finally:
            os.close(fd)


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.errno in (40, 20):  # ELOOP, ENOTDIR: what O_NOFOLLOW says of a link
        return "a symbolic link or no folder"
    return (getattr(error, "strerror", None) or str(error)).lower()
