# SPDX-License-Identifier: Apache-2.0
"""Start ``vllm serve`` in a process group of its own, wait until it answers, and end all of it.

Its log goes to a file; the end of that is the message when it does not start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from vllm_kimi_eagle3.bench.client import ServerError

START_SECONDS = 3600
"""A 1T model takes half an hour from cold storage."""


@contextlib.contextmanager
def serve(
    target: str,
    arguments: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str],
    progress: Callable[[str], None] = lambda _: None,
) -> Generator[str]:
    """Run ``vllm serve target …`` until the block ends; gives its base URL.

    Args:
        target: the model's folder or name.
        arguments: further arguments of ``vllm serve``.
        log: where its output goes.
        environment: variables added to this process's own.
        progress: called with one line now and then until the server answers.

    Raises:
        ServerError: it ended, or did not answer within ``START_SECONDS``.
    """
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", target]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        url, start = f"http://127.0.0.1:{port}", time.monotonic()
        while not _answers(url):
            waited = time.monotonic() - start
            if process.poll() is not None:
                raise ServerError(f"vllm serve ended with code {process.returncode}; the end of {log}: {_reason(log)}")
            if waited > START_SECONDS:
                raise ServerError(
                    f"vllm serve did not answer within {START_SECONDS} s; the end of {log}: {_reason(log)}"
                )
            progress(f"starting vllm serve, {waited:.0f} s")
            time.sleep(0.5)
        yield url
    finally:
        _stop(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, and what it has left behind in its process group."""
    for sign, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
            if sign == signal.SIGTERM:
                time.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _reason(log: Path) -> str:
    """The last line that names an error, or the last line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and "raise" not in line]
    return (named or lines or ["nothing"])[-1][-500:]
