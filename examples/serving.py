# SPDX-License-Identifier: Apache-2.0
"""Start ``vllm serve`` as a separate process, talk to its OpenAI API, read its metrics and its log.

Used by the demo and by the tests that need a real server. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 300
"""How long a server may take until it answers; a tiny model on two cores takes 20 to 60."""


class ServerError(RuntimeError):
    """The server did not start, or ended; the message holds the end of its log."""


@dataclass
class Server:
    """A running server."""

    url: str
    model: str
    log: Path

    def complete(self, prompt: str | list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
        """One greedy completion; the answer of ``POST /v1/completions``, token ids included.

        Raises:
            urllib.error.URLError: the server refused, or is gone.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}
        return self._json("/v1/completions", {"return_token_ids": True, **body})

    def speculation(self) -> dict[str, Any]:
        """Counters of speculative decoding since the start: drafts, drafted, accepted, and accepted by position."""
        text = self._read("/metrics").decode()
        totals = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0.0)
        for name in totals:
            totals[name] = sum(
                float(v) for v in re.findall(rf"^vllm:spec_decode_{name}_total\{{.*\}} (\S+)$", text, re.M)
            )
        position = r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d+)".*\} (\S+)$'
        per_position = {int(p): float(v) for p, v in re.findall(position, text, re.M)}
        return {
            "drafts": int(totals["num_drafts"]),
            "drafted": int(totals["num_draft_tokens"]),
            "accepted": int(totals["num_accepted_tokens"]),
            "accepted_by_position": [int(per_position[p]) for p in sorted(per_position)],
        }

    def log_lines(self, word: str) -> list[str]:
        """The lines of the server's log that hold ``word``, without vLLM's prefix."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [re.sub(r"^.*?\[\w+\.py:\d+\] ", "", line) for line in lines if word in line]

    def _json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def _read(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read()


@contextlib.contextmanager
def serve(
    target: Path, log: Path, *arguments: str, env: dict[str, str], waiting: Callable[[], None] = lambda: None
) -> Iterator[Server]:
    """Run ``vllm serve target …`` until the block ends.

    Args:
        target: the model's folder.
        log: where the server's output goes.
        arguments: further command-line arguments.
        env: variables added to this process's own.
        waiting: called about twice a second until the server answers.

    Raises:
        ServerError: it ended, or did not answer within ``START_SECONDS``.
    """
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(target), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", target.name, *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A session of its own: ending the group ends the engine core too, whatever state the server is in.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env}, start_new_session=True
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", target.name, log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                what = "did not answer in time" if process.poll() is None else f"ended with code {process.returncode}"
                raise ServerError(f"vllm serve {what}; the end of its log {log}:\n{_tail(log)}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                server._read("/health")
                break
            waiting()
            time.sleep(0.5)
        yield server
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            continue
        if sign == signal.SIGTERM:
            # The server is gone; its engine core follows by itself, or is ended here.
            time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
