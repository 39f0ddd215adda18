# SPDX-License-Identifier: Apache-2.0
"""What the probes look at inside an engine's process, besides the drafter's calls."""

from __future__ import annotations

from typing import Any

import torch


def watch_embeddings(model: Any) -> dict[str, int]:
    """Count, from now on, the embeddings that a target's caller passes in, and those that came back changed (D17)."""
    counted = {"passed": 0, "changed": 0}
    before: list[torch.Tensor] = []

    def remember(module: Any, args: Any, kwargs: Any) -> None:
        given = kwargs.get("inputs_embeds")
        before[:] = [] if given is None else [given.clone()]

    def look(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        if before:
            counted["passed"] += 1
            counted["changed"] += not torch.equal(before[0], kwargs["inputs_embeds"])

    inner = getattr(model, "language_model", model)
    inner.register_forward_pre_hook(remember, with_kwargs=True)
    inner.register_forward_hook(look, with_kwargs=True)
    return counted


def expanded_parameters() -> list[list[float]] | None:
    """Sampling parameters of three requests, spread over their 3, 1 and 2 draft tokens by the CPU's own kernel (C5).

    None where this vLLM has no such kernel. -7 is what nobody wrote.
    """
    try:
        from vllm.utils import cpu_triton_utils
    except ImportError:
        return None
    kernel: Any = getattr(cpu_triton_utils, "_expand_kernel_impl", None)
    if kernel is None:
        return None
    ends = torch.tensor([3, 4, 6], dtype=torch.int32)
    found: list[list[float]] = []
    for values, old, new in (
        (torch.tensor([0.5, 0.0, 0.25]), 0, 1),
        (torch.tensor([5, 0, 9], dtype=torch.int32), 0, 0),
    ):
        out = torch.full((6,), -7, dtype=values.dtype)
        kernel(out, values, ends, old, new)
        found.append(out.tolist())
    return found


EXPANDED = [[0.5, 0.5, 0.5, 1.0, 0.25, 0.25], [5, 5, 5, 0, 9, 9]]
"""What ``expanded_parameters`` has to return."""
