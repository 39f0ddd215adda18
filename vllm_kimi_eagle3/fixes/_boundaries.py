# SPDX-License-Identifier: Apache-2.0
"""Write a plan's boundaries where every reader of vLLM's looks first.

Both runners read the drafter configuration's top-level ``eagle_aux_hidden_state_layer_ids`` before anything else, as
boundaries, and the compile-cache key covers it from 0.17.0 on. D6, D7 and D8 are three faults with this one remedy.
"""

from __future__ import annotations

from vllm_kimi_eagle3.layers import config_updates
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context

KEY = "eagle_aux_hidden_state_layer_ids"
V1_READER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_eagle3_aux_layers_from_config"
V2_READER = "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils:get_eagle3_aux_layers_from_config"


def readers(tree: SourceTree) -> list[str]:
    """The functions of this release that turn a drafter's configuration into layers."""
    return [target for target in (V1_READER, V2_READER) if tree.has(target)]


def reads_top_level(tree: SourceTree, reader: str) -> bool:
    """Whether a reader takes the top-level key, and takes it first."""
    text = tree.text(reader)
    position = text.find(f"hf_config, '{KEY}'")
    if position < 0:
        position = text.find(f"hf_config.{KEY}")
    others = [p for p in (text.find("dflash_config"), text.find("eagle_config")) if p >= 0]
    return position >= 0 and all(position < other for other in others)


def reads_nested(tree: SourceTree, reader: str) -> bool:
    """Whether a reader also takes the key out of a nested dictionary, as trainers write it."""
    text = tree.text(reader)
    return f".get('{KEY}'" in text or f"['{KEY}']" in text


def write(context: Context) -> None:
    """Put the plan into the drafter's configuration; idempotent."""
    if context.plan is None:
        return
    hf_config = context.vllm_config.speculative_config.draft_model_config.hf_config
    for key, value in config_updates(context.plan, hf_config.to_dict()).items():
        setattr(hf_config, key, value)
