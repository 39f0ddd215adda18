# SPDX-License-Identifier: Apache-2.0
"""Every fix, in the order in which they are applied. Read this page first.

Each module in :mod:`vllm_kimi_eagle3.fixes` tells one defect and holds its remedy.
"""

from __future__ import annotations

from vllm_kimi_eagle3.fixes import (
    cache_key,
    chunk_end_token,
    cpu_attention_block_size,
    cpu_kernel_rebinding,
    cpu_rotary_embedding,
    image_placeholder,
    layer_rule,
    mtp_rewrite,
    nested_layer_ids,
)
from vllm_kimi_eagle3.patching.spec import Fix

FIXES: tuple[Fix, ...] = (
    mtp_rewrite.FIX,
    nested_layer_ids.FIX,
    layer_rule.FIX,
    cache_key.FIX,
    image_placeholder.FIX,
    chunk_end_token.FIX,
    cpu_kernel_rebinding.FIX,
    cpu_rotary_embedding.FIX,
    cpu_attention_block_size.FIX,
)
