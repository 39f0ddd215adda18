# SPDX-License-Identifier: Apache-2.0
"""C2: on CPU, the C++ rotary kernel rotates a query of several heads wrongly.

Given (tokens, heads, dim), the kernel takes one head a token and the stride between heads for the one between tokens:
with more than one head the first rows are rotated by wrong angles and the rest not at all. MLA passes its queries in
that form, so a DeepSeek-V3 target writes wrong text from the second token on. Given (tokens, heads * dim), the same
kernel is right; that is how it is called here.
"""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict, on_cpu

TARGET = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu"
_CALL = "ops.rotary_embedding(positions, query, key,"


def probe(tree: SourceTree) -> Verdict:
    """The fault is in compiled code; its source shows only in how the kernel is called, which is what we change."""
    if not tree.has(TARGET):
        return Verdict(Need.NOT_APPLICABLE, "this release has no rotary kernel for CPU")
    if tree.parameters(TARGET) != ("self", "positions", "query", "key"):
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}")
    if _CALL not in tree.text(TARGET):
        return Verdict(Need.RETIRED, "the CPU rotary kernel is no longer called with the query as it comes")
    return Verdict(Need.APPLY, "the CPU rotary kernel is called with (tokens, heads, dim)")


def install(installer: Installer) -> None:
    """Flatten heads before the kernel; a plain function, because Dynamo may trace it."""
    original: Any = installer.original(TARGET)

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() != 3:
            return original(self, positions, query, key)
        flat_key = None if key is None else key.flatten(1).contiguous()
        flat_query, flat_key = original(self, positions, query.flatten(1).contiguous(), flat_key)
        return flat_query.view(query.shape), None if key is None else flat_key.view(key.shape)

    installer.replace(TARGET, forward_cpu)


FIX = Fix(
    id="C2",
    name="cpu-rotary-embedding",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="wrong text on CPU from the second token on, with the custom operators that eager mode uses",
    upstream="none known",
    retire="the CPU rotary kernel reads the head's stride of a three-dimensional query",
    probe=probe,
    wanted=on_cpu,
    install=install,
)
