# SPDX-License-Identifier: Apache-2.0
"""D23: boundary 0, the embeddings, cannot be captured.

The decoder adds ``hidden_states + residual`` for every layer it captures, and before layer 0 there is no residual yet:
a drafter that reads the embeddings ends the engine with a TypeError. The loop is traced by torch.compile and stays as
it is. The embeddings are taken around it, in the causal model, which is not traced, and put in front of what the loop
captures. Below 0.18 the loop is the overlay's own (D3), which knows boundary 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_kimi_eagle3.fixes.aux_capture import ATTRIBUTE
from vllm_kimi_eagle3.fixes.aux_capture import TARGET as LOOP
from vllm_kimi_eagle3.fixes.eagle3_interface import DEEPSEEK, SETTER
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

TARGET = f"{DEEPSEEK}.{SETTER}"
FORWARD = f"{DEEPSEEK}.forward"
PARAMETERS = ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds")
FLAG = "kimi_eagle3_embeddings"
"""Set on a decoder whose embeddings are captured: they are not in its own list of layers."""


def probe(tree: SourceTree) -> Verdict:
    """Whether the loop adds a residual that may not be there, and the places around it are those known."""
    loop = tree.text(LOOP)
    if ATTRIBUTE not in loop:
        return Verdict(Need.RETIRED, "nothing is captured here; the loop that D3 installs knows boundary 0")
    if "hidden_states.clone() if residual is None else hidden_states + residual" in loop:
        return Verdict(Need.RETIRED, "the loop knows that there is no residual before layer 0")
    if "hidden_states + residual" not in loop:
        return Verdict(Need.REFUSED, f"{LOOP} captures in a way that is not known")
    if tree.parameters(FORWARD) != PARAMETERS or not tree.has(f"{LOOP.rpartition('.')[0]}.embed_input_ids"):
        return Verdict(Need.REFUSED, f"{FORWARD} takes {tree.parameters(FORWARD)}, or the decoder has no embeddings")
    if f"self.model.{ATTRIBUTE} = layers" not in tree.text(TARGET):
        return Verdict(Need.REFUSED, f"{TARGET} hands the layers on in a way that is not known")
    return Verdict(Need.APPLY, "the loop adds a residual that is not there before layer 0")


def with_embeddings(model: Any) -> Callable[..., Any]:
    """``model``'s forward that returns the (T, H) embeddings in front of the captured states."""
    forward: Callable[..., Any] = type(model).forward.__get__(model)

    @functools.wraps(forward)
    def capturing(
        input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> Any:
        # A copy: layer 0 makes its input the residual, to which later kernels add in place.
        first = model.model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        out = forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        hidden, captured = out if isinstance(out, tuple) else (out, [])
        return hidden, [first, *captured]

    return capturing


def install(installer: Installer) -> None:
    """Replace the setter: where boundary 0 is asked for, it changes its own model's forward and no other."""
    original = installer.original(TARGET)

    def set_aux_hidden_state_layers(self: Any, layers: tuple[int, ...]) -> None:
        original(self, tuple(layer for layer in layers if layer != 0))
        vars(self).pop("forward", None)
        setattr(self.model, FLAG, 0 in layers)
        if 0 in layers:
            vars(self)["forward"] = with_embeddings(self)

    installer.replace(TARGET, set_aux_hidden_state_layers)


FIX = Fix(
    id="D23",
    name="embeddings",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="a drafter that reads the embeddings (boundary 0) ends the engine with a TypeError",
    upstream="none known",
    retire="the capture loop takes hidden_states alone where there is no residual",
    probe=probe,
    install=install,
)
