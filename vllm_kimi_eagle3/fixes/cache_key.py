# SPDX-License-Identifier: Apache-2.0
"""D8: the compile-cache key does not cover the layers.

0.15 and 0.16 hash no layer ids at all, 0.17.0 to 0.25.1 only the top-level ones, although V1 honours the nested ones
from 0.22.0: after a change of ids, a compiled graph of the old layers is loaded. No release knows that a plugin
changed anything. The plan, this package's version and the fixes in force therefore go into ``additional_config``,
which every release hashes whole and carries to every process.
"""

from __future__ import annotations

from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

HASH = "vllm.config.vllm:VllmConfig.compute_hash"


def probe(tree: SourceTree) -> Verdict:
    """The remedy stands on ``additional_config`` being hashed."""
    if "additional_config" not in tree.text(HASH):
        return Verdict(Need.REFUSED, f"{HASH} does not hash additional_config")
    return Verdict(Need.APPLY, "the compile-cache key does not know what a plugin changed")


FIX = Fix(
    id="D8",
    name="cache-key",
    targets=(HASH,),
    phase=Phase.VLLM_CONFIG,
    why="a graph compiled for other layers, or without this overlay, is loaded from the cache",
    upstream="0.26.0 hashes the drafter's whole configuration; plugins stay unknown",
    retire="vLLM hashes what general plugins change",
    probe=probe,
    # Nothing to configure here: activation.write_record() stores the record for every server of ours.
)
