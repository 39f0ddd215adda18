# SPDX-License-Identifier: Apache-2.0
"""Pictures for requests: as vLLM takes them, and as the reference embeds them.

A picture is described by {"scenes": [number, …], "size": [width, height]}: one scene is a picture, several are the
frames of a video chunk; the size crops, and is optional. Descriptions travel in a probe's job.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vllm_kimi_eagle3.reference import Vision, patchify
from vllm_kimi_eagle3.reference.ops import Media
from vllm_kimi_eagle3.tiny_kimi.materialize import HERE
from vllm_kimi_eagle3.tiny_kimi.scenes import Scene, question

Picture = dict[str, Any]
PLACEHOLDER = 266
SHOWN = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
"""A picture in a prompt, as Kimi's chat template writes it."""


def images(picture: Picture) -> list[Any]:
    """The picture's frames as PIL images."""
    made: list[Any] = []
    for number in picture["scenes"]:
        image = Scene.random(number).draw()
        size: list[int] = picture.get("size") or list(image.size)
        made.append(image.crop((0, 0, *size)))
    return made


def vision_chunks(pictures: Sequence[Picture]) -> dict[str, list[Any]]:
    """What vLLM takes as ``multi_modal_data``, in Kimi's one modality for pictures and video."""
    items: list[Any] = []
    for picture in pictures:
        frames = images(picture)
        if len(frames) == 1:
            items.append({"type": "image", "image": frames[0], "uuid": None})
        else:
            items.append({"type": "video_chunk", "video_chunk": frames, "uuid": None, "prompt": "", "video_idx": 0})
    return {"vision_chunk": items}


def rows(vision: Vision, pictures: Sequence[Picture]) -> Tensor:
    """What stands in for the placeholders of these pictures, (M, H), by the reference."""
    processor = json.loads((HERE / "checkpoint" / "preprocessor_config.json").read_text())["media_proc_cfg"]
    found: list[Tensor] = []
    for picture in pictures:
        frames = [
            torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8).view(i.height, i.width, 3)
            for i in images(picture)
        ]
        patches, grid = patchify(torch.stack(frames), mean=processor["image_mean"], std=processor["image_std"])
        found.append(vision.forward(patches.to(next(iter(vision.weights.values())).dtype), grid))
    return torch.cat(found)


def media(vision: Vision, request_ids: Sequence[int], prompt_ids: Sequence[int], pictures: Sequence[Picture]) -> Media:
    """The rows by place in the engine's prompt, in which each picture's placeholder stands as often as it has tokens.

    vLLM gives pictures to placeholders from the left; one that is left over was typed.

    Raises:
        ValueError: the engine's prompt is not the request's with its placeholders repeated so.
    """
    parts = [rows(vision, [picture]) for picture in pictures]
    expected, places, left = list[int](), list[int](), iter(parts)
    for token in request_ids:
        part = next(left, None) if token == PLACEHOLDER else None
        if part is not None:
            places += range(len(expected), len(expected) + len(part))
        expected += [token] * (1 if part is None else len(part))
    if list(prompt_ids) != expected:
        raise ValueError(f"the engine's prompt is {list(prompt_ids)}, expected {expected}")
    return dict(zip(places, torch.cat(parts), strict=True))


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(HERE / "checkpoint" / "tokenizer.json"))


def encode(text: str) -> list[int]:
    """Token ids of a text with Kimi's special tokens."""
    return list(_tokenizer().encode(text).ids)


def asked(content: str) -> list[int]:
    """Token ids of one user turn, as the chat template makes them."""
    return encode(f"<|im_user|>user<|im_middle|>{content}<|im_end|><|im_assistant|>assistant<|im_middle|>")


def about_a_picture(order: str) -> list[int]:
    """The question that the picture pair knows, after one picture."""
    return asked(SHOWN + question(order))


def about_a_told(number: int, order: str) -> list[int]:
    """The same question after the scene in words."""
    return asked(Scene.random(number).told() + question(order))
