# SPDX-License-Identifier: Apache-2.0
"""Runners and servers of which only lengths count: the longest request's, and how far a drafter reaches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

K, LONGEST = 3, 128
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


class Rotary(torch.nn.Module):
    """Of which only the table's length counts."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.zeros(rows, 4))


def runner(*rows: int, limit: int = LONGEST, **speculative: Any) -> Any:
    """A V1 runner whose drafter has rotary embeddings of so many rows."""
    given = {"method": "eagle3", "num_speculative_tokens": K, "max_model_len": None, "use_dflash": lambda: False}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**{**given, **speculative}),
        drafter=SimpleNamespace(model=torch.nn.ModuleList([torch.nn.Linear(2, 2), *map(Rotary, rows)])),
        max_model_len=LONGEST,
        num_spec_tokens=K,
        effective_drafter_max_model_len=limit,
    )


def server(own: Any, longest: int = LONGEST, v2: bool | None = None, **more: Any) -> Any:
    """A server's configuration; ``own`` is the drafter's max_position_embeddings, ``more`` the rest of what it says."""
    hf_config = SimpleNamespace(**({} if own is None else {"max_position_embeddings": own}), **more)
    speculative = SimpleNamespace(
        draft_model_config=SimpleNamespace(hf_config=hf_config),
        target_model_config=SimpleNamespace(max_model_len=longest),
    )
    config = SimpleNamespace(speculative_config=speculative)
    if v2 is not None:
        config.use_v2_model_runner = v2
    return config
