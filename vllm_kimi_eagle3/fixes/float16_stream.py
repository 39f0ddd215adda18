# SPDX-License-Identifier: Apache-2.0
"""D16 and D17: in float16 the decoder's residual stream is not the one a drafter was trained on.

DeepSeek's experts overflow float16, so vLLM divides the whole stream by ``routed_scaling_factor``: the final norm hides
it, and the captured states keep it (D16). From 0.25.0 on the division happens in place on the embeddings that the
caller passed in, because a clone was dropped (D17). bfloat16 and float32 never come here.

Both are mended around the decoder, in ``DeepseekV2ForCausalLM.forward``, which torch.compile does not trace: embeddings
are cloned on the way in, captured states multiplied on the way out. What then exceeds float16 is held at its largest
value, since one infinity would make the drafter's whole row NaN.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_kimi_eagle3.fixes.eagle3_interface import KIMI_K25, decoder
from vllm_kimi_eagle3.fixes.k25_language_model import probe as k25_probe
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, Verdict

TARGET = "vllm.model_executor.models.deepseek_v2:DeepseekV2ForCausalLM.forward"
LAYER = "vllm.model_executor.models.deepseek_v2:DeepseekV2DecoderLayer.forward"
MODEL = "vllm.model_executor.models.deepseek_v2:DeepseekV2Model.forward"
PARAMETERS = ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds")
_SCALED = "residual *= 1.0 / self.routed_scaling_factor"
_UNSCALED = "aux_hidden_states = [(state.float() * factor)."


def probe_scale(tree: SourceTree) -> Verdict:
    """D16: the layer scales the stream, and the place around the decoder is the one known."""
    if _SCALED not in tree.text(LAYER):
        return Verdict(Need.RETIRED, "the residual stream is not scaled")
    if tree.has(MODEL) and _UNSCALED in tree.text(MODEL):
        return Verdict(Need.RETIRED, "captured states are scaled back: the source patch")
    return _around(tree) or Verdict(Need.APPLY, "captured states keep the scale of the float16 guard")


def probe_clone(tree: SourceTree) -> Verdict:
    """D17: the first layer takes its input as the residual without cloning it."""
    text = tree.text(LAYER)
    if _SCALED not in text:
        return Verdict(Need.RETIRED, "the residual stream is not scaled")
    if "residual = hidden_states.clone()" in text:
        return Verdict(Need.RETIRED, "the first layer clones its input")
    if "residual = hidden_states\n" not in text:
        return Verdict(Need.REFUSED, f"{LAYER} starts the residual in a way that is not known")
    return _around(tree) or Verdict(Need.APPLY, "the first layer scales its caller's embeddings in place")


def _around(tree: SourceTree) -> Verdict | None:
    if tree.parameters(TARGET) != PARAMETERS:
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}")
    return None


def in_float16(context: Context) -> bool:
    """Servers with eagle3 whose target runs in float16; before its configuration is known, none."""
    return context.eagle3 and context.vllm_config is not None and _is_float16(context.vllm_config)


def _is_float16(vllm_config: Any) -> bool:
    return str(vllm_config.speculative_config.target_model_config.dtype) == "torch.float16"


def unscaled(states: Any, factor: float) -> Any:
    """Captured (T, H) float16 states at their true size, held within float16's range."""
    import torch

    largest = torch.finfo(torch.float16).max
    return [(state.float() * factor).clamp(-largest, largest).to(state.dtype) for state in states]


def around(original: Any) -> Any:
    """A target's forward with both remedies; other dtypes pass through."""

    @functools.wraps(original)  # vLLM asks a forward's signature what the model supports
    def forward(
        self: Any,
        input_ids: Any,
        positions: Any,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **kwargs: Any,
    ) -> Any:
        import torch

        if inputs_embeds is not None and inputs_embeds.dtype == torch.float16:
            inputs_embeds = inputs_embeds.clone()
        out = original(self, input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        if isinstance(out, tuple) and out[0].dtype == torch.float16:
            factor: float = getattr(decoder(self).config, "routed_scaling_factor", 1.0)
            return out[0], unscaled(out[1], factor)
        return out

    return forward


def install(installer: Installer) -> None:
    """Wrap the causal model; and 0.15's Kimi-K2.5, which holds the decoder without one."""
    targets = [TARGET]
    if k25_probe(SourceTree.installed()).need is Need.APPLY:
        targets.append(f"{KIMI_K25}.forward")
    for target in targets:
        installer.replace(target, around(installer.original(target)))


SCALE = Fix(
    id="D16",
    name="float16-scale",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="in float16 the drafter's features are divided by routed_scaling_factor",
    upstream="none known",
    retire="the decoder multiplies captured states by routed_scaling_factor in float16",
    probe=probe_scale,
    wanted=in_float16,
    install=install,
)

CLONE = Fix(
    id="D17",
    name="float16-clone",
    targets=(LAYER,),
    phase=Phase.WORKER,
    why="in float16 the embeddings that the caller passed in are scaled in place",
    upstream="none known; the clone was dropped in 0.25.0",
    retire="the first layer clones its input again",
    probe=probe_clone,
    wanted=in_float16,
    # Its remedy is in the one function that D16 puts around the decoder.
)
