# SPDX-License-Identifier: Apache-2.0
"""D3: the target's decoder shows nothing to a drafter.

EAGLE-3 needs the residual stream at a few layers; up to 0.17.1 ``DeepseekV2Model.forward`` returns the last hidden
state only. Nothing can be added to it from outside, because torch.compile traces it, so it is replaced by a function
in our own words that does the same and captures besides: :mod:`._capturing_forward`.

The replacement stands for one text of the original, so it is refused where the text is another.
"""

from __future__ import annotations

import hashlib

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

MODEL = "vllm.model_executor.models.deepseek_v2:DeepseekV2Model"
TARGET = f"{MODEL}.forward"
ATTRIBUTE = "aux_hidden_state_layers"
PARAMETERS = ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds")
KNOWN = "5f242e0928ad3871c49ead84024533fbb198623d99dd2ba298df96a3b2a5dd0d"
"""SHA-256 of the body's normal form, 0.15.0 to 0.17.1."""


def digest(tree: SourceTree) -> str:
    """What :data:`KNOWN` is compared with."""
    return hashlib.sha256(tree.text(TARGET).encode()).hexdigest()


def probe(tree: SourceTree) -> Verdict:
    """The decoder captures, or it is the one that the replacement stands for."""
    if ATTRIBUTE in tree.text(TARGET):
        return Verdict(Need.RETIRED, "the decoder captures auxiliary hidden states")
    if tree.parameters(TARGET) != PARAMETERS:
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}")
    if digest(tree) != KNOWN:
        return Verdict(Need.REFUSED, f"{TARGET} is not the function that ours can stand for")
    return Verdict(Need.APPLY, "the decoder captures nothing")


def install(installer: Installer) -> None:
    """Replace the method before a model is built: torch.compile takes it from the instance."""
    from vllm_kimi_eagle3.fixes import _capturing_forward

    installer.replace(TARGET, _capturing_forward.forward)
    installer.replace(f"{MODEL}.{ATTRIBUTE}", (), create=True)


FIX = Fix(
    id="D3",
    name="aux-capture",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="the drafter gets no auxiliary hidden states",
    upstream="vllm#36361 (0.18.0)",
    retire="releases below 0.18.0 are no longer supported",
    probe=probe,
    install=install,
)
