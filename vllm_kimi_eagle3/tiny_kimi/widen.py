# SPDX-License-Identifier: Apache-2.0
"""The tiny pair in head sizes that CUDA's MLA kernels are compiled for.

The pair has heads of 32 + 64 (query) and 32 (value), which CUDA's prefill backends refuse; they take 64 + 64 and 128.
Zeros in the new places change nothing, except that attention divides by the square root of the query's size: the norm
before the query's second projection is scaled up by as much. The model is the same function, up to the rounding of
those 128 norm weights a layer to bfloat16.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NOPE, VALUE = 64, 128


def widen(source: Path, out: Path) -> Path:
    """Write the checkpoint folder ``source`` with wider heads to ``out``, and return it. GQA drafters stay as they are.

    Raises:
        FileNotFoundError: ``source`` holds no ``model.safetensors``.
    """
    shutil.copytree(source, out)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    if "kv_lora_rank" not in text:
        return out
    heads, rope = text["num_attention_heads"], text["qk_rope_head_dim"]
    nope, value = text["qk_nope_head_dim"], text["v_head_dim"]
    gain = math.sqrt((NOPE + rope) / (nope + rope))

    def rows(weight: Tensor, *sizes: tuple[int, int]) -> Tensor:
        """Per head, grow each run of rows from the first size to the second."""
        parts = weight.unflatten(0, (heads, -1)).split([old for old, _ in sizes], dim=1)
        return torch.cat([grow(p, new) for p, (_, new) in zip(parts, sizes, strict=True)], dim=1).flatten(0, 1)

    def grow(part: Tensor, size: int) -> Tensor:
        return torch.cat([part, part.new_zeros(heads, size - part.shape[1], part.shape[2])], dim=1)

    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        match name.rsplit(".", 2)[-2:]:
            case ["q_b_proj", "weight"]:
                weight = rows(weight, (nope, NOPE), (rope, rope))
            case ["kv_b_proj", "weight"]:
                weight = rows(weight, (nope, NOPE), (value, VALUE))
            case ["o_proj", "weight"] if "vision" not in name:
                weight = rows(weight.T, (value, VALUE)).T
            case ["q_a_layernorm", "weight"]:
                weight = (weight.float() * gain).to(weight.dtype)
            case _:
                pass
        tensors[name] = weight.contiguous()
    (out / "model.safetensors").unlink()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    text |= {"qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return out
