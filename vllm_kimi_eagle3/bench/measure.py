# SPDX-License-Identifier: Apache-2.0
"""Run prompts against a server, and add up.

Speed is completion tokens by wall time from request to answer, prefill included: what a user waits for. A repeat is
one pass over all prompts; the reported speed is the median over repeats. Acceptance is from the server's counters,
which count everybody's requests: other traffic is noticed by the tokens that it gets.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm_kimi_eagle3.bench.client import Answer, Client
from vllm_kimi_eagle3.bench.metrics import Counters
from vllm_kimi_eagle3.bench.prompts import Prompt

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """How to ask.

    Attributes:
        tokens: max_tokens of each request.
        temperature: 0 is greedy.
        concurrency: requests at a time.
        repeats: passes over all prompts.
        ignore_eos: go on to ``tokens`` whatever the model says.
    """

    tokens: int = 512
    temperature: float = 0.0
    concurrency: int = 1
    repeats: int = 3
    ignore_eos: bool = False

    @property
    def label(self) -> str:
        """``greedy`` or ``T=0.6``, and the concurrency when it is not 1."""
        mode = "greedy" if self.temperature == 0 else f"T={self.temperature:g}"
        return mode if self.concurrency == 1 else f"{mode} c={self.concurrency}"


@dataclass
class Run:
    """One server under one setting.

    Attributes:
        name: ``baseline``, ``drafter``, ``control`` or ``server``.
        setting: how it was asked.
        speeds: tokens per second of each repeat.
        prompts: for each prompt its name, tokens, seconds and tokens per second (medians).
        counters: the server's counters over all repeats.
        texts: the first repeat's answers, for comparison of greedy runs.
        warnings: what makes the numbers doubtful.
    """

    name: str
    setting: Setting
    speeds: list[float]
    prompts: list[dict[str, Any]]
    counters: Counters
    texts: list[str]
    warnings: list[str] = field(default_factory=list[str])

    @property
    def tok_s(self) -> float:
        """Median tokens per second over the repeats, all concurrent requests together."""
        return statistics.median(self.speeds)

    def to_json(self) -> dict[str, Any]:
        """Plain data; rates 0..1, None without speculation."""
        c = self.counters
        return {
            "name": self.name,
            "setting": self.setting.label,
            "temperature": self.setting.temperature,
            "concurrency": self.setting.concurrency,
            "tok_s": self.tok_s,
            "tok_s_repeats": self.speeds,
            "ms_per_token": 1000 / self.tok_s if self.tok_s else None,
            "acceptance_rate": c.acceptance_rate,
            "acceptance_length": c.acceptance_length,
            "per_position": c.per_position,
            "conditional": c.conditional,
            "drafts": c.drafts,
            "drafted": c.drafted,
            "accepted": c.accepted,
            "accepted_by_position": list(c.by_position),
            "prompts": self.prompts,
            "warnings": self.warnings,
        }


def warm_up(client: Client, prompts: Sequence[Prompt], concurrency: int) -> None:
    """Let a server pay for what it makes lazily, at each concurrency that follows. Raises ServerError."""
    chosen = [prompts[i % len(prompts)] for i in range(max(2, concurrency))]
    _ask(client, chosen, Setting(WARM_UP_TOKENS, 0.0, concurrency), seed=None)


def measure(
    client: Client,
    name: str,
    prompts: Sequence[Prompt],
    setting: Setting,
    progress: Callable[[str], None] = lambda _: None,
) -> Run:
    """All prompts, ``setting.repeats`` times.

    Raises:
        ServerError: the server refused a request or is gone.
    """
    speeds: list[float] = []
    answers: list[list[Answer]] = []
    total = Counters()
    warnings: list[str] = []
    for repeat in range(setting.repeats):
        progress(f"{name}, {setting.label}: pass {repeat + 1} of {setting.repeats}")
        before = client.counters()
        if before.running and "busy" not in "".join(warnings):
            warnings.append(f"the server was busy with {before.running} other requests at the start of a pass")
        start = time.perf_counter()
        # Greedy answers are the same each time; sampled ones shall differ, and be the same next week.
        answered = _ask(client, prompts, setting, seed=None if setting.temperature == 0 else 1000 + repeat)
        seconds = time.perf_counter() - start
        delta = _settled(client, before, sum(answer.tokens for answer in answered))
        tokens = sum(answer.tokens for answer in answered)
        if not delta.sound:
            warnings.append("the server's counters went back: it was started anew during the measurement")
        else:
            total = total.plus(delta)
            # Counters may lag by a step; more than a prompt's worth is somebody else's.
            if delta.generated > tokens + len(prompts):
                other = delta.generated - tokens
                warnings.append(f"other traffic: the server wrote {other} tokens that were not asked for here")
        answers.append(answered)
        speeds.append(tokens / seconds)
    rows = [_row(prompt, [repeat[i] for repeat in answers]) for i, prompt in enumerate(prompts)]
    return Run(name, setting, speeds, rows, total, [a.text for a in answers[0]], list(dict.fromkeys(warnings)))


def _settled(client: Client, before: Counters, tokens: int) -> Counters:
    """The counters' difference, once the server has counted our own tokens: it logs after it has answered."""
    delta = client.counters().since(before)
    for _ in range(20):
        if delta.generated >= tokens or not delta.sound:
            break
        time.sleep(0.05)
        delta = client.counters().since(before)
    return delta


def _ask(client: Client, prompts: Sequence[Prompt], setting: Setting, seed: int | None) -> list[Answer]:
    def one(prompt: Prompt) -> Answer:
        return client.chat(prompt.text, setting.tokens, setting.temperature, seed, setting.ignore_eos)

    _ = client.model  # ask for the name before the threads do
    if setting.concurrency == 1:
        return [one(prompt) for prompt in prompts]
    # Not a pool of threads: Python would wait for its requests after Ctrl-C, ten minutes if need be.
    waiting, answers, errors = deque(enumerate(prompts)), dict[int, Answer](), list[Exception]()

    def work() -> None:
        with suppress(IndexError):
            while not errors:
                index, prompt = waiting.popleft()
                try:
                    answers[index] = one(prompt)
                except Exception as error:
                    errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(setting.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [answers[index] for index in range(len(prompts))]


def _row(prompt: Prompt, answers: list[Answer]) -> dict[str, Any]:
    speeds = [answer.tokens / answer.seconds for answer in answers if answer.seconds > 0]
    return {
        "name": prompt.name,
        "tokens": round(statistics.median(answer.tokens for answer in answers)),
        "seconds": statistics.median(answer.seconds for answer in answers),
        "tok_s": statistics.median(speeds) if speeds else 0.0,
        "finish_reason": answers[0].finish_reason,
    }
