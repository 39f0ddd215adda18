# SPDX-License-Identifier: Apache-2.0
"""Alignment records while many write at once, and when the writer is killed at any point."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_kimi_eagle3.layers import AlignmentRecord, PlanError, alignment

KEY = "ab" * 32
OLD = AlignmentRecord(KEY, (3, 6, 8), 10, (4, 7, 9), "output", {"0": 0.5}, {}, "old " * 100)
NEW = AlignmentRecord(KEY, (3, 6, 8), 10, (3, 6, 8), "boundary", {"0": 0.25}, {}, "new " * 100)


def naive(record: AlignmentRecord, cache: Path) -> None:
    """How not to do it."""
    path = alignment.record_path(record.key, cache)
    with path.open("w") as file:
        text = json.dumps(record.to_json())
        file.write(text[:100])
        file.flush()
        file.write(text[100:])


def killed_at(step: int, write: Callable[..., Any], cache: Path) -> bool:
    """Write NEW in a process that is killed -9 before the line number ``step``; False when it had come to an end."""
    child = os.fork()
    if child == 0:
        left = [step]

        def count(frame: FrameType, event: str, argument: Any) -> Any:
            if Path(frame.f_code.co_filename).name not in ("alignment.py", "tempfile.py", "test_crash.py"):
                return None  # between two lines of these, the disk is touched once at most
            left[0] -= event == "line"
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return count

        sys.settrace(count)
        try:
            write(NEW, cache)
        finally:
            sys.settrace(None)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def survivors(write: Callable[..., Any], cache: Path) -> list[Any]:
    """What a reader finds after a kill at each line in turn."""
    found: list[Any] = []
    path = alignment.save(OLD, cache)
    old = path.read_bytes()
    step = 0
    while True:
        path.write_bytes(old)
        alive = not killed_at(step, write, cache)
        try:
            found.append(alignment.load(KEY, cache))
        except PlanError as error:
            found.append(str(error))
        if alive:
            return found
        step += 1


def test_killed_at_any_line_it_is_the_old_record_or_the_new_one(tmp_path: Path) -> None:
    found = survivors(alignment.save, tmp_path)
    assert len(found) > 50
    assert all(record in (OLD, NEW) for record in found)
    assert found[0] == OLD and found[-1] == NEW
    turn = found.index(NEW)
    assert OLD not in found[turn:], "it went back"
    # The negative control: without the temporary file there are half records.
    assert [record for record in survivors(naive, tmp_path) if record not in (OLD, NEW)]


def test_many_processes_and_threads_on_one_folder(tmp_path: Path) -> None:
    alignment.save(OLD, tmp_path)
    children: list[int] = []
    for number in range(6):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                threads = [
                    threading.Thread(target=alignment.save, args=(record, tmp_path))
                    for record in (OLD, NEW) * 10
                    if number % 3
                ]
                for thread in threads:
                    thread.start()
                for _ in range(200):
                    assert alignment.load(KEY, tmp_path) in (OLD, NEW)
                for thread in threads:
                    thread.join()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert [path.name for path in (tmp_path / "alignment").iterdir()] == [f"{KEY}.json"]
