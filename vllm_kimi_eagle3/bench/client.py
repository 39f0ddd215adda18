# SPDX-License-Identifier: Apache-2.0
"""Talk to a server by its OpenAI API, with nothing but the standard library."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from vllm_kimi_eagle3.bench.metrics import Counters, parse
from vllm_kimi_eagle3.layers import PlanError

MAX_ANSWER = 64 << 20


class ServerError(RuntimeError):
    """The server is not there, or refused. One sentence."""


@dataclass(frozen=True)
class Answer:
    """One completion: its text, how many tokens it has, and how long it took from request to end, in seconds.

    ``token_ids`` is empty where the request did not ask for them.
    """

    text: str
    tokens: int
    seconds: float
    finish_reason: str
    token_ids: tuple[int, ...] = ()


class Client:
    """One server.

    Args:
        base_url: such as ``http://host:8000``; a trailing ``/v1`` is accepted.
        model: the model's name; by default the first that the server lists.
        timeout: seconds for one request.

    ``OPENAI_API_KEY`` or ``VLLM_API_KEY`` is sent as a bearer token when it is set.

    Raises:
        PlanError: the URL is none.
    """

    def __init__(self, base_url: str, model: str | None = None, timeout: float = 600) -> None:
        try:
            parts = urllib.parse.urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise PlanError(f"{base_url[:80]!a} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise PlanError(f"{base_url[:80]!a} is no URL such as http://127.0.0.1:8000")
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self._model = model

    @property
    def model(self) -> str:
        """The model's name; asks the server the first time."""
        if self._model is None:
            listed = self._json("/v1/models").get("data")
            try:
                self._model = str(listed[0]["id"])  # pyright: ignore[reportOptionalSubscript]
            except (TypeError, IndexError, KeyError):
                raise ServerError(f"{self.url}/v1/models lists no model; is this a vLLM server?") from None
        return self._model

    def chat(self, prompt: str, max_tokens: int, temperature: float, seed: int | None, ignore_eos: bool) -> Answer:
        """One answer to one question, through the chat template. Raises ServerError."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        if seed is not None:
            body["seed"] = seed
        if ignore_eos:
            body["ignore_eos"] = True
        start = time.perf_counter()
        answer = self._json("/v1/chat/completions", body)
        seconds = time.perf_counter() - start
        try:
            choice, usage = answer["choices"][0], answer["usage"]
            message = choice["message"]
            # A reasoning parser moves part of the text to a field of its own.
            text = "".join(message.get(key) or "" for key in ("reasoning_content", "reasoning", "content"))
            return Answer(text, int(usage["completion_tokens"]), seconds, str(choice.get("finish_reason")))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise ServerError(f"{self.url} answered a chat request with something else than a completion") from None

    def complete(self, prompt: str, max_tokens: int) -> Answer:
        """A greedy continuation of a raw text, with its token ids. Raises ServerError."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        start = time.perf_counter()
        answer = self._json("/v1/completions", {**body, "return_token_ids": True})
        seconds = time.perf_counter() - start
        try:
            choice, count = answer["choices"][0], int(answer["usage"]["completion_tokens"])
            ids = tuple(int(token) for token in choice["token_ids"])
            return Answer(str(choice["text"]), count, seconds, str(choice.get("finish_reason")), ids)
        except (KeyError, IndexError, TypeError, ValueError):
            raise ServerError(f"{self.url} answered a completion request with something else") from None

    def counters(self) -> Counters:
        """The model's counters now. Raises ServerError."""
        return parse(self._read("/metrics").decode("utf-8", "replace"), self.model)

    def _json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        raw = self._read(path, body)
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError):
            raise ServerError(f"{self.url}{path} did not answer in JSON; is this a vLLM server?") from None
        if not isinstance(data, dict):
            raise ServerError(f"{self.url}{path} answered with something else than an object")
        return data  # pyright: ignore[reportUnknownVariableType]

    def _read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        token = os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY")
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return answer.read(MAX_ANSWER)
        except urllib.error.HTTPError as error:
            said = error.read(400).decode("utf-8", "replace")
            raise ServerError(f"{self.url}{path} answered {error.code}: {' '.join(said.split())}") from None
        except (OSError, ValueError, EOFError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"{self.url}{path} can't be reached: {reason}") from None
