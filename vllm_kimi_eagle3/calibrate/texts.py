# SPDX-License-Identifier: Apache-2.0
"""Text that the target itself writes, and what its layers held meanwhile. On the torch reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.layers.files import load_json, read_bytes
from vllm_kimi_eagle3.reference import Cache, Target

MAX_IDS = 64 << 20


@dataclass(frozen=True)
class Written:
    """One text.

    Attributes:
        ids: T token ids, prompt and text.
        prompt: how many of them are the prompt.
        says: (T,), the target's own greedy choice after each token, from the prompt's last on.
        streams: by boundary, (T, H), in the target's dtype.
        greedy: whether the text itself is greedy.
    """

    ids: list[int]
    prompt: int
    says: Tensor
    streams: dict[int, Tensor]
    greedy: bool

    def rows(self, boundaries: Sequence[int]) -> Tensor:
        """(T, n * H), the streams side by side, in float32, which is what the drafter is run in."""
        return torch.cat([self.streams[boundary].float() for boundary in boundaries], dim=-1)


def write(
    target: Target,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    boundaries: Iterable[int],
    *,
    temperature: float,
    stop: frozenset[int] = frozenset(),
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Written]:
    """Each prompt twice: continued greedily, and sampled at ``temperature`` (0 leaves that out).

    The streams are those of the pass that wrote the text; nothing is calculated twice.
    """
    kept, generator = sorted(set(boundaries)), torch.Generator().manual_seed(seed)
    modes = [0.0] if temperature == 0 else [0.0, temperature]
    texts: list[Written] = []
    for number, prompt in enumerate(prompts):
        for mode in modes:
            progress(len(texts), len(prompts) * len(modes))
            texts.append(_write_one(target, list(prompt), tokens, kept, mode, stop, generator))
        assert number < len(prompts)
    progress(len(texts), len(texts))
    return texts


def _write_one(
    target: Target,
    prompt: list[int],
    tokens: int,
    kept: list[int],
    temperature: float,
    stop: frozenset[int],
    generator: torch.Generator,
) -> Written:
    cache, ids, pending = Cache(), list(prompt), list(prompt)
    parts: dict[int, list[Tensor]] = {boundary: [] for boundary in kept}
    says: list[Tensor] = []
    while True:
        out = target.forward(pending, cache)
        for boundary in kept:
            parts[boundary].append(out.boundaries[boundary])
        says.append(out.logits.argmax(-1))
        if len(ids) - len(prompt) >= tokens or (len(ids) > len(prompt) and ids[-1] in stop):
            break
        if temperature == 0:
            pending = [int(says[-1][-1])]
        else:
            chances = (out.logits[-1].float() / temperature).softmax(-1).cpu()
            pending = [int(torch.multinomial(chances, 1, generator=generator))]
        ids += pending
    streams = {boundary: torch.cat(pieces) for boundary, pieces in parts.items()}
    return Written(ids, len(prompt), torch.cat(says), streams, temperature == 0)


def encode(folder: Path, prompts: Sequence[str], *, chat: bool) -> list[list[int]]:
    """Prompts to token ids, by the tokenizer in the target's folder.

    Args:
        folder: the target's.
        prompts: plain texts.
        chat: put each through the chat template, as a server does.

    Raises:
        PlanError: Transformers is missing, or the tokenizer can't be loaded without running code from the folder.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise PlanError(f"calibrate needs transformers for the tokenizer: {error}; or give --ids FILE") from None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        if not chat:
            return [list(tokenizer.encode(prompt)) for prompt in prompts]
        texts: list[str] = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
        return [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    except Exception as error:
        raise PlanError(
            f"the tokenizer of {folder} can't be used ({type(error).__name__}: {' '.join(str(error).split())[:200]});"
            " give the prompts as token ids by --ids FILE"
        ) from None


def read_ids(path: Path, vocab_size: int) -> list[list[int]]:
    """Prompts as token ids: a JSON list of lists.

    Raises:
        PlanError: the file holds something else, or an id that the target has not.
    """
    data: Any = load_json(read_bytes(path, MAX_IDS), str(path))
    lists: list[Any] = data if isinstance(data, list) else [None]
    if not all(isinstance(prompt, list) and all(type(token) is int for token in prompt) for prompt in lists):
        raise PlanError(f"{path} holds no JSON list of lists of token ids")
    prompts: list[list[int]] = lists
    if not prompts or not all(prompts) or any(not 0 <= token < vocab_size for p in prompts for token in p):
        raise PlanError(f"{path} must hold non-empty lists of token ids from 0 to {vocab_size - 1}")
    return prompts
