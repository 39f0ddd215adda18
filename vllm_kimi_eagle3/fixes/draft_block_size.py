# SPDX-License-Identifier: Apache-2.0
"""D10: 0.17 computes the drafter's cache slots with the wrong block size.

The block table counts in the blocks of the attention kernel, while the proposer multiplies with the block size of the
cache manager. Where the two differ, every draft position after the first reads and writes foreign slots: acceptance
collapses there, and text stays right. The metadata builder knows the kernel's size, so the group's specification is
replaced by the builder's.
"""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

_CLASS = "vllm.v1.spec_decode.eagle:SpecDecodeBaseProposer"
TARGET = f"{_CLASS}.initialize_attn_backend"
_WRONG = "self.draft_attn_groups[0].kv_cache_spec.block_size"


def probe(tree: SourceTree) -> Verdict:
    """The fault is the read of the group's own block size, in a class that has no ``block_size`` of its own."""
    if not tree.has(TARGET):
        return Verdict(Need.NOT_APPLICABLE, "the proposer of this release is another one, and right")
    if _WRONG not in tree.text(_CLASS):
        return Verdict(Need.RETIRED, "the proposer takes the kernel's block size")
    if tree.parameters(TARGET) != ("self", "kv_cache_config", "kernel_block_sizes"):
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}")
    if "create_metadata_builders" not in tree.text(TARGET):
        return Verdict(Need.REFUSED, f"{TARGET} builds no metadata builders")
    return Verdict(Need.APPLY, "the proposer takes the manager's block size for the kernel's")


def install(installer: Installer) -> None:
    """After the draft groups are built, give each its builder's specification."""
    original = installer.original(TARGET)

    def initialize_attn_backend(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for group in self.draft_attn_groups:
            # The groups are the proposer's own; it reads nothing but the block size from them afterwards.
            group.kv_cache_spec = group.get_metadata_builder().kv_cache_spec

    installer.replace(TARGET, initialize_attn_backend)


FIX = Fix(
    id="D10",
    name="draft-block-size",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="acceptance collapses after the first draft position when manager and kernel block size differ",
    upstream="0.18.0 takes the builder's block size",
    retire="0.17 is no longer supported",
    probe=probe,
    install=install,
)
