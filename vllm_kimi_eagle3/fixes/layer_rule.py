# SPDX-License-Identifier: Apache-2.0
"""D7: one list of ids, two meanings.

A checkpoint's id i means "output of layer i" to SpecForge and ModelOpt and "the stream entering layer i" to vLLM and
speculators; the two differ by one and nothing in the file says which. vLLM takes ids as they are, so a drafter of the
first kind gets every feature one layer early. The resolver in :mod:`vllm_kimi_eagle3.layers` decides; here its answer
is written as boundaries, which is how vLLM counts.
"""

from __future__ import annotations

from vllm_kimi_eagle3.fixes import _boundaries
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

_PATCHED = "vllm.config.speculative:SpeculativeConfig.eagle3_layer_rule"
_SHIFTS = "eagle3_layer_rule() == 'output'"
"""What ``patches/`` adds. Top-level ids stay boundaries there, so a plan may be written all the same."""


def probe(tree: SourceTree) -> Verdict:
    """No release knows a rule; the source patch brings one, and another of a reader's own would need another remedy."""
    readers = _boundaries.readers(tree)
    if readers and tree.has(_PATCHED) and all(_SHIFTS in tree.text(reader) for reader in readers):
        return Verdict(Need.RETIRED, "nested ids are shifted where the drafter's rule says so: the source patch")
    for reader in readers:
        if not _boundaries.reads_top_level(tree, reader):
            return Verdict(Need.REFUSED, f"{reader} does not read the top-level {_boundaries.KEY} first")
        if "layer_rule" in tree.text(reader):
            return Verdict(Need.REFUSED, f"{reader} knows a layer rule of its own")
    return Verdict(Need.APPLY, "ids are taken as boundaries, whatever the checkpoint means by them")


FIX = Fix(
    id="D7",
    name="layer-rule",
    targets=(_boundaries.V1_READER, _boundaries.V2_READER),
    phase=Phase.VLLM_CONFIG,
    why="output-rule ids are read as boundaries: every feature one layer early",
    upstream="vllm#43671 (open); sglang#25454 meets it with a heuristic",
    retire="a drafter's checkpoint says which rule its ids follow, and vLLM reads it",
    probe=probe,
    configure=_boundaries.write,
)
