# SPDX-License-Identifier: Apache-2.0
"""Engines that start as forks of a process which has imported all that vLLM imports, but nothing of vLLM.

Importing torch, Transformers and the rest takes as long as most tests need of an engine. What the tests are about,
vLLM and this package, each fork imports anew, under its own environment variables. ``Zygote.start`` stands in for
``regression.engine.start``; a fresh interpreter is still used where the path is another one.

As a script it is the process that forks: a job a line of stdin, how it ended a line of stdout.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SECONDS = 600
ALL_OF_THEM = ("vllm_kimi_eagle3.regression.engine_probe", "vllm.v1.worker.cpu_worker", "torch._inductor.compile_fx")
"""What an engine of the tests imports."""


class Zygote:
    """The process, started with the first engine."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._one_at_a_time = threading.Lock()

    def start(self, command: list[str], env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run ``python -m MODULE ARGUMENTS`` as a fork.

        Raises:
            TimeoutExpired: it did not end.
        """
        from vllm_kimi_eagle3.regression.engine import start_interpreter

        if command[1] != "-m" or not _same_path(env):
            return start_interpreter(command, env, cwd)
        with self._one_at_a_time, tempfile.TemporaryDirectory() as folder:
            job = {"argv": command[2:], "env": env, "cwd": str(cwd), "out": f"{folder}/out", "err": f"{folder}/err"}
            code = self._ask(job, command)
            out, err = (Path(job[name]).read_text(errors="replace") for name in ("out", "err"))
        return subprocess.CompletedProcess(command, code, out, err)

    def _ask(self, job: dict[str, Any], command: list[str]) -> int:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
            atexit.register(self.close)
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(SECONDS, self.close)
        late.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            answer = process.stdout.readline()
        finally:
            late.cancel()
        if not answer:
            self.close()
            raise subprocess.TimeoutExpired(command, SECONDS)
        return int(answer)

    def close(self) -> None:
        """End it, and what it has started."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _same_path(env: dict[str, str]) -> bool:
    def path(where: Any) -> list[str]:
        return [str(Path(p).resolve()) for p in where.get("PYTHONPATH", "").split(os.pathsep) if p]

    return path(env) == path(os.environ)


def import_what_vllm_imports(modules: Iterable[str]) -> None:
    """Import all that these modules of vLLM's or ours import, but nothing of vLLM and of us.

    A fork is asked for the names, so that this process never has a module of vLLM's.
    """
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(2, 1)
        for name in modules:
            importlib.import_module(name)
        with os.fdopen(write, "w") as pipe:
            json.dump([name for name in sys.modules if not name.startswith("vllm")], pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    for name in json.loads(text or "[]"):
        # Some are no modules of their own, or are made by another one.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    assert not [name for name in sys.modules if name.startswith(("vllm.", "vllm_kimi_eagle3."))]


def become(job: dict[str, Any]) -> int:
    """In the fork: what ``python -m`` would be with that environment; returns its exit code."""
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    for number, name in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        opened = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.path[0] = job["cwd"]
    module, *arguments = job["argv"]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    """Fork for each job, and say how it ended; in a fork, the job's own exit code."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import_what_vllm_imports(ALL_OF_THEM)
    for line in sys.stdin:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            return become(json.loads(line))
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
