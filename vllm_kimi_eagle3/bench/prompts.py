# SPDX-License-Identifier: Apache-2.0
"""What is asked: the five subjects of the measurement that this project started from, or files of the user's own.

Prompts go through the server's chat template. Raw prompts collapse acceptance and random ones inflate it
(tokenspeed#1305), so neither is offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.layers.files import load_json

MAX_FILE = 8 << 20
MAX_PROMPTS = 10_000


@dataclass(frozen=True)
class Prompt:
    """One question, and a short name for the tables."""

    name: str
    text: str


FIVE = (
    Prompt(
        "relativity",
        "Explain the general theory of relativity to a reader who knows school physics. Begin with the equivalence"
        " principle, say what curved spacetime means and how matter and curvature determine each other, and describe"
        " three observations that confirmed the theory.",
    ),
    Prompt(
        "n-queens",
        "Write a Python program that solves the N-queens problem by backtracking. Give a function that returns all"
        " solutions for a board of size n, a function that prints one board, type hints and docstrings, and explain"
        " afterwards how the search is pruned and how its cost grows with n.",
    ),
    Prompt(
        "tcp-udp",
        "Compare TCP and UDP for a programmer who has to choose between them. Cover connection set-up, ordering and"
        " reliability, flow and congestion control, header size and latency, and give for each protocol three"
        " applications that it suits and the reason why.",
    ),
    Prompt(
        "photosynthesis",
        "Describe photosynthesis step by step. Say what happens in the light-dependent reactions and in the Calvin"
        " cycle, where in the cell each takes place, what goes in and what comes out, and how plants in hot and dry"
        " places have adapted the process.",
    ),
    Prompt(
        "primes",
        "Prove that there are infinitely many prime numbers. Give Euclid's proof in full, then a second proof by a"
        " different idea, check every step, and close with what is known today about how the primes thin out.",
    ),
)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts of a file: ``.json`` (a list) or ``.jsonl`` (one a line), each a string or an object with ``prompt``.

    Any other suffix is one prompt, the whole file.

    Raises:
        PlanError: the file can't be read, or holds something else.
    """
    try:
        if not path.is_file():
            raise PlanError(f"{path} is no file of prompts")
        with path.open("rb") as file:
            raw = file.read(MAX_FILE + 1)
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror}") from None
    if len(raw) > MAX_FILE:
        raise PlanError(f"{path} is larger than {MAX_FILE} bytes, too large for a file of prompts")
    if path.suffix == ".jsonl":
        lines = [line for line in raw.splitlines() if line.strip()]
        items: list[Any] = [load_json(line, f"line {n} of {path}") for n, line in enumerate(lines, 1)]
    elif path.suffix == ".json":
        data = load_json(raw, str(path))
        if not isinstance(data, list):
            raise PlanError(f"{path} holds no JSON list, but a list of prompts was expected")
        items = cast("list[Any]", data)
    else:
        try:
            items = [raw.decode("utf-8")]
        except UnicodeDecodeError:
            raise PlanError(f"{path} is not UTF-8 text") from None
    if not 1 <= len(items) <= MAX_PROMPTS:
        raise PlanError(f"{path} holds {len(items)} prompts, but 1 to {MAX_PROMPTS} were expected")
    return tuple(_prompt(item, number, path) for number, item in enumerate(items, 1))


def _prompt(item: Any, number: int, path: Path) -> Prompt:
    text = cast("dict[str, Any]", item).get("prompt") if isinstance(item, dict) else item
    name = cast("dict[str, Any]", item).get("name") if isinstance(item, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise PlanError(f"prompt {number} of {path} is neither a text nor an object with one under `prompt`")
    return Prompt(name[:40] if isinstance(name, str) and name else f"{path.stem}-{number}"[:40], text)
