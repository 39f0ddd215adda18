# SPDX-License-Identifier: Apache-2.0
"""D6: the layer ids that most trainers write are not read.

SpecForge, ModelOpt and TorchSpec store the layers under ``eagle_config.eagle_aux_hidden_state_layer_ids``. The V1
runner ignores that key up to 0.21; the V2 runner, default from 0.29.0, ignores it in every release and captures its
default layers instead. Text stays right, acceptance is low, and nothing says so.
"""

from __future__ import annotations

from vllm_kimi_eagle3.fixes import _boundaries
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict


def probe(tree: SourceTree) -> Verdict:
    """Look in both runners' readers for the nested key."""
    readers = _boundaries.readers(tree)
    if not readers:
        return Verdict(Need.REFUSED, "neither runner has a function that reads the drafter's layer ids")
    for reader in readers:
        if not _boundaries.reads_top_level(tree, reader):
            return Verdict(Need.REFUSED, f"{reader} does not read the top-level {_boundaries.KEY} first")
    deaf = [r for r in readers if not _boundaries.reads_nested(tree, r)]
    if not deaf:
        return Verdict(Need.RETIRED, "both runners read the nested layer ids")
    names = " and ".join("V1" if r == _boundaries.V1_READER else "V2" for r in deaf)
    return Verdict(Need.APPLY, f"the nested layer ids are not read on {names}")


FIX = Fix(
    id="D6",
    name="nested-layer-ids",
    targets=(_boundaries.V1_READER, _boundaries.V2_READER),
    phase=Phase.VLLM_CONFIG,
    why="nested layer ids are ignored and the default layers are captured: silently low acceptance, or an fc crash",
    upstream="vllm#42764 made V1 read them (0.22.0); vllm#40551 is open for V2",
    retire="both runners read eagle_config.eagle_aux_hidden_state_layer_ids",
    probe=probe,
    configure=_boundaries.write,
)
