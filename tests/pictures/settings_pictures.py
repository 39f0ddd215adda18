# SPDX-License-Identifier: Apache-2.0
"""The engines of the picture tests, and what each is asked to do.

On a GPU the same tests run in bf16, as tests/alignment does; ``ALIGNMENT_DTYPE`` says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.regression.engine import Request
from vllm_kimi_eagle3.regression.pictures import PLACEHOLDER, SHOWN, about_a_picture, about_a_told, asked, encode
from vllm_kimi_eagle3.tiny_kimi.materialize import PICTURE_BOUNDARY_IDS
from vllm_kimi_eagle3.tiny_kimi.scenes import ORDERS, question

ON_GPU = torch.cuda.is_available()
DTYPE = os.environ.get("ALIGNMENT_DTYPE", "bfloat16" if ON_GPU else "float32")
# In bf16 a picture's tokens are up to 0.03 away from the reference's; nine in ten have no other within 0.1.
EMBEDDING_BAR = None if DTYPE == "float32" else 0.06
BOUNDARIES = tuple(PICTURE_BOUNDARY_IDS)
MAX_MODEL_LEN = 384
HELD_OUT = 1_000_000
"""The first scene that the pair was not trained on."""
STOPS = [257, 258]
ROWS = next(iter(ORDERS))


def scene(number: int, *size: int) -> dict[str, Any]:
    """A picture of a scene that the pair has not seen."""
    return {"scenes": [HELD_OUT + number], **({"size": list(size)} if size else {})}


def chunk(*numbers: int) -> dict[str, Any]:
    """A video chunk of as many frames."""
    return {"scenes": [HELD_OUT + number for number in numbers]}


def ask(ids: list[int], *pictures: dict[str, Any], tokens: int = 20, joins: int = 0) -> Request:
    """A request with pictures."""
    return (ids, tokens, STOPS, joins, list(pictures))


SITUATIONS: dict[str, list[Request]] = {
    "one picture": [ask(about_a_picture(ROWS), scene(1))],
    "several": [ask(asked(f"{SHOWN} and {SHOWN} or {SHOWN} {question(ROWS)}"), scene(2), scene(3), scene(4))],
    "at the very start": [ask([PLACEHOLDER, *encode("What do you see?")], scene(5))],
    "at the very end": [ask([*encode("What do you see? "), PLACEHOLDER], scene(6))],
    "next to each other": [ask([*encode("See "), PLACEHOLDER, PLACEHOLDER, *encode("?")], scene(7), scene(8))],
    "nothing but a picture": [ask([PLACEHOLDER], scene(9))],
    "other sizes": [ask(asked(SHOWN + SHOWN + question(ROWS)), scene(10, 50, 90), scene(11, 28, 28))],
    "video chunk": [ask(about_a_picture(ROWS), chunk(12, 13, 14))],
    "picture and video chunk": [ask(asked(SHOWN + SHOWN + "?"), scene(15), chunk(16, 17, 18, 19))],
    "a placeholder typed as text": [ask(asked("What is <|media_pad|>?"))],
    "a placeholder typed behind a picture": [ask(asked(SHOWN + " or <|media_pad|>?"), scene(28))],
    "a placeholder typed before a picture": [ask(asked("<|media_pad|> or " + SHOWN + "?"), scene(29))],
    "batch": [
        ask(about_a_picture(ROWS), scene(20), tokens=40),
        ask(about_a_told(HELD_OUT + 21, ROWS), tokens=40, joins=2),
        ask(about_a_picture("column by column"), scene(22), tokens=30, joins=4),
        ask(asked(SHOWN + SHOWN + "?"), scene(23), scene(24), tokens=12, joins=5),
    ],
}
"""Where a picture can be in a prompt."""

# A step takes 64 tokens, so a prompt's first chunk ends at the 64th: before, in and behind its first picture. No two
# prompts begin alike, or a cached prefix would move the chunk.
_BEGINS = (20, 47, 48, 49, 55, 63, 64, 65)
CHUNKS: dict[str, list[Request]] = {
    f"a chunk ends {64 - begins} tokens into the picture": [
        ask(
            [*encode(f"{begins:03}" + "x" * (begins - 3)), PLACEHOLDER, *encode("What do you see, or not? " * 2)],
            scene(begins),
            tokens=12,
        )
    ]
    for begins in _BEGINS
}
CHUNKS["a chunk ends between two pictures"] = [
    ask([*encode("a" * 48), PLACEHOLDER, PLACEHOLDER, *encode("What do you see?")], scene(81), scene(82), tokens=12)
]
CHUNKS["a chunk ends in a video chunk"] = [
    ask([*encode("b" * 60), PLACEHOLDER, *encode("What do you see?")], chunk(83, 84, 85), tokens=12)
]


def _long(number: int) -> Request:
    """A picture, and behind it more text than two blocks of 32 tokens."""
    return ask([*encode("See "), PLACEHOLDER, *encode("z" * 60 + question(ROWS))], scene(number), tokens=12)


CACHED: dict[str, list[Request]] = {
    "first time": [_long(90)],
    "the same again": [_long(90)],
    "another picture in the same place": [_long(91)],
    "both at once": [_long(90), _long(91)],
}
CROWD: dict[str, list[Request]] = {
    "crowd": [ask(about_a_picture(ROWS), scene(60 + i), tokens=60 - 4 * i, joins=i) for i in range(6)]
}
"""More than the cache of ``TINY_CACHE`` holds: some have to give way and start again."""

COUNTED = 16
"""Pictures, and as many told scenes, by which acceptance is measured."""
SHOWN_SCENES: list[Request] = [
    ask(about_a_picture(list(ORDERS)[i % 3]), scene(100 + i), tokens=160) for i in range(COUNTED)
]
TOLD_SCENES: list[Request] = [
    ask(about_a_told(HELD_OUT + 100 + i, list(ORDERS)[i % 3]), tokens=160) for i in range(COUNTED)
]
MEASURED = {"shown": SHOWN_SCENES, "told": TOLD_SCENES}


WITHOUT = frozenset({"told", "a placeholder typed as text", "the same again", "both at once"})
"""Situations in which the drafter computes no row that sees a picture: there is none, or it is cached."""


@dataclass(frozen=True)
class Setting:
    """An engine and what it is asked to do; ``media`` is what its drafter is to see for pictures."""

    drafter: str
    media: str
    rounds: Mapping[str, list[Request]]
    k: int = 3
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    env: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def choice(self) -> dict[str, str]:
        """As the user says it; the default is not said."""
        return {} if self.media == "placeholder" else {"drafter_media": self.media}


# Up to 0.31 vLLM reads the old schema, and takes the image processor from the checkpoint.
NEW_SCHEMA = "image_token_id" in SourceTree.installed().path("vllm.model_executor.models.kimi_k25").read_text()
TARGET = "pictures" if NEW_SCHEMA else "pictures_legacy"
OPTIONS: dict[str, Any] = {
    **({} if NEW_SCHEMA else {"trust_remote_code": True}),
    "max_model_len": MAX_MODEL_LEN,
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"vision_chunk": 4},
    "enforce_eager": True,
    "dtype": DTYPE,
}
# The CPU platform switches chunked prefill and prefix caching off with MLA (C4), but not with ordinary attention.
CHUNKED: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "block_size": 32,
}
TINY_CACHE = {"num_gpu_blocks_override": 32, "block_size": 16}
WITHOUT_MLA = {} if ON_GPU else {"VLLM_MLA_DISABLE": "1"}
SETTINGS: dict[str, Setting] = {
    "embedding": Setting("pictures_gqa", "embedding", {**SITUATIONS, **MEASURED}),
    "placeholder": Setting("pictures_gqa", "placeholder", SITUATIONS),
    "embedding, chunked": Setting(
        "pictures_gqa", "embedding", {**CHUNKS, **CACHED}, 2, {**CHUNKED, "max_num_seqs": 4}, WITHOUT_MLA
    ),
    "last-token, chunked": Setting(
        "pictures_gqa", "last-token", {**CHUNKS, **CACHED}, 1, {**CHUNKED, "max_num_seqs": 4}, WITHOUT_MLA
    ),
    "embedding, MLA drafter, compiled": Setting(
        "pictures_mla", "embedding", {**SITUATIONS, **CROWD}, 4, {"enforce_eager": False, **TINY_CACHE}
    ),
}
