# SPDX-License-Identifier: Apache-2.0
"""Every fix, in the order in which they are applied. Read this page first.

Each module in :mod:`vllm_kimi_eagle3.fixes` tells one defect and holds its remedy. What is known and not mended stands
in :data:`UNDONE`.
"""

from __future__ import annotations

from vllm_kimi_eagle3.fixes import (
    aux_capture,
    cache_key,
    chunk_end_token,
    cpu_attention_block_size,
    cpu_draft_step_kernel,
    cpu_kernel_rebinding,
    cpu_rotary_embedding,
    cpu_sampling_expansion,
    draft_attention_backend,
    draft_block_size,
    draft_limit,
    drafter_media,
    drafter_positions,
    drafter_rope,
    eagle3_interface,
    embeddings,
    float16_stream,
    image_attribute,
    image_placeholder,
    k25_language_model,
    layer_rule,
    mla_drafter,
    mtp_rewrite,
    nested_layer_ids,
    sharded_step,
    shared_lm_head,
    target_whitelist,
    triton_mla_decode,
    use_aux_flag,
)
from vllm_kimi_eagle3.patching.spec import Fix

FIXES: tuple[Fix, ...] = (
    target_whitelist.FIX,
    mla_drafter.FIX,
    mtp_rewrite.FIX,
    nested_layer_ids.FIX,
    layer_rule.FIX,
    cache_key.FIX,
    eagle3_interface.FIX,
    aux_capture.FIX,
    image_attribute.FIX,
    k25_language_model.FIX,
    draft_block_size.FIX,
    image_placeholder.FIX,
    shared_lm_head.FIX,
    use_aux_flag.FIX,
    draft_attention_backend.FIX,
    float16_stream.SCALE,
    float16_stream.CLONE,
    chunk_end_token.FIX,
    embeddings.FIX,
    drafter_media.FIX,
    drafter_rope.FIX,
    drafter_positions.FIX,
    draft_limit.FIX,
    sharded_step.FIX,
    triton_mla_decode.FIX,
    cpu_kernel_rebinding.FIX,
    cpu_rotary_embedding.FIX,
    cpu_attention_block_size.FIX,
    cpu_sampling_expansion.FIX,
    cpu_draft_step_kernel.FIX,
)

ELSEWHERE: dict[str, str] = {
    "D9": "mended with D19 (fixes/triton_mla_decode.py): what TRITON_MLA declares from 0.22.0 to 0.25.1 becomes true,"
    " and is taken back where it does not",
    "D14": "refused when the layers are resolved (layers/resolve.py): duplicates, range, order, pipeline stages",
    "D20": "checked when the layers are resolved (layers/resolve.py), and written as num_aux_hidden_states",
}
"""Defects that have no fix of their own."""

UNDONE: dict[str, str] = {
    "C7": "on CPU (seen on 0.32.0) experts parallel end in a segmentation fault or give the ranks different inputs: the"
    " kernel takes no map from all experts to a rank's own",
    "C4": "chunked prefill and prefix caching are off with MLA on CPU by a rule of the platform: a limit, not a fault",
}
"""Defects that are known and not mended, each with its reason."""
