# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: the command line on hostile folders, each in a fork of its own that is watched.

    python reading.py JOBS.json RESULT.json

A job is the command line's arguments and ``roots``, the folders that it may read. The result tells, for each: the exit
status and what was written to stderr, CPU seconds, the growth of the resident set in MiB, and what it did that no
reader of files has to do: opened something elsewhere, wrote, started a process, spoke to the network, unpickled.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.commands import doctor, layers

assert doctor and layers, "imported before the watch begins"
SECONDS = 30
"""Wall-clock, after which a job hangs; what it may take is asserted in CPU seconds."""
FORBIDDEN = (
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen",
    "pickle.find_class", "ctypes.dlopen", "os.remove", "os.rename", "os.mkdir", "os.chmod", "os.chown", "os.link",
    "os.symlink", "os.rmdir", "os.truncate", "shutil.rmtree",
)  # fmt: skip


def watch(roots: list[str], seen: list[str]) -> None:
    """Note from now on, until the process ends, what no reader of files has to do."""
    allowed = [os.path.realpath(root) for root in roots]
    allowed += [os.path.realpath(path) for path in sysconfig.get_paths().values()]
    allowed += [os.path.realpath(Path(cli.__file__).parent), *(p for p in sys.path if p.endswith(".zip"))]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN or event.startswith("socket."):
            seen.append(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path, mode, flags = os.fsdecode(arguments[0]), arguments[1], arguments[2]
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or (mode and set(mode) & set("wax+"))
            real = os.path.realpath(path)
            if writes or not any(real == root or real.startswith(root + os.sep) for root in allowed):
                seen.append(f"open {path} {mode} {flags}")

    sys.addaudithook(hook)


def drop_powers() -> None:
    """Give up root's right to read what it may not, for this process."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        assert libc.capset(header, (ctypes.c_uint32 * 6)()) == 0, os.strerror(ctypes.get_errno())


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job in a fork of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.environ["VLLM_KIMI_EAGLE3_CACHE"] = job["cache"]
        answer: dict[str, Any] = {"did": []}
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        try:
            drop_powers()
            signal.alarm(SECONDS)
            watch(job["roots"], answer["did"])
            answer["status"] = 0
            if "code" in job:
                exec(job["code"])
            else:
                answer["status"] = cli.main(job["arguments"])
        except BaseException as error:
            answer["raised"] = f"{type(error).__name__}: {str(error)[:300]}"
        answer["stdout"], answer["stderr"] = (s.getvalue()[-4000:] for s in (sys.stdout, sys.stderr))
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(child, 0)
    answer = json.loads(text) if text else {"raised": f"ended with status {status}"}
    return {**answer, "cpu": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss / 1024}


def main(jobs_file: str, result_file: str) -> None:
    """Run all jobs; memory is counted from what a job that does nothing takes."""
    base = run({"code": "0", "roots": [], "cache": "/nonexistent"})["peak"]
    results: list[dict[str, Any]] = []
    for job in json.loads(Path(jobs_file).read_text()):
        answer = run(job)
        results.append({**answer, "grown": answer["peak"] - base})
    Path(result_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
