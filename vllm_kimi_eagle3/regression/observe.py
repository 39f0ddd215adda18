# SPDX-License-Identifier: Apache-2.0
"""What the probes look at inside an engine's process, besides the drafter's calls."""

from __future__ import annotations

from typing import Any

import torch


def embeddings_change(runner: Any) -> bool | str:
    """Whether a target changes the embeddings that its caller passes in (D17); a sentence if it can't be called.

    Called as a profiling run calls it, without attention metadata: what attention returns does not matter here.
    """
    from vllm.forward_context import set_forward_context

    model, config = runner.get_model(), runner.vllm_config
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(3)
    given = torch.randn(4, config.model_config.get_hidden_size(), generator=generator).to(weight.device, weight.dtype)
    before = given.clone()
    try:
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=4):
            model(input_ids=None, positions=torch.arange(4, device=weight.device), inputs_embeds=given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return not torch.equal(before, given)


def placeholders(runner: Any) -> dict[str, Any]:
    """The token id that each part of a Kimi-K2.5 engine takes for a picture's; None where a part has none."""
    model, drafter = runner.get_model(), getattr(runner, "drafter", None)
    config = runner.model_config.hf_config
    of_drafter = getattr(getattr(getattr(drafter, "model", None), "config", None), "image_token_index", None)
    names = ("image_token_id", "media_placeholder_token_id")
    return {
        "target": getattr(model, "media_placeholder", None),
        "drafter": of_drafter,
        "config": sorted({getattr(config, name) for name in names if hasattr(config, name)}),
    }


def expanded_parameters() -> list[list[float]] | None:
    """Sampling parameters of three requests, spread over their 3, 1 and 2 draft tokens by the CPU's own kernel (C5).

    None where this vLLM has no such kernel, or does not run on a CPU. -7 is what nobody wrote.
    """
    from vllm.platforms import current_platform

    if current_platform.device_type != "cpu":
        return None
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
