# SPDX-License-Identifier: Apache-2.0
"""D25: an MLA drafter's rotary embedding is not the one it was trained with.

From 0.18 to 0.27.1 the MLA drafter's layer makes its rope parameters anew from ``rope_scaling`` alone. With
Transformers 4 a drafter without scaling loses its ``rope_theta``: published Kimi drafters were trained with 50000 and
run with 10000, so their attention is wrong and acceptance falls, silently. With Transformers 5 ``rope_scaling`` is
never empty, the type becomes deepseek_yarn, and the engine ends with ``KeyError: 'factor'``. The configuration has
had the right parameters all along: they are given to the attention, as 0.28 does.
"""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.fixes.mla_drafter import has_mla
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, Verdict

MODULE = "vllm.model_executor.models.deepseek_eagle3"
LAYER = f"{MODULE}:DeepseekV2Eagle3DecoderLayer.__init__"
TARGET = f"{MODULE}:DeepseekV2MLAAttention"
"""The class under the name by which the layer calls it."""


def probe(tree: SourceTree) -> Verdict:
    """Whether the layer overwrites the parameters, and builds its attention in the way known."""
    if not tree.has_module(MODULE):
        return Verdict(Need.NOT_APPLICABLE, "this release has no MLA drafter")
    text = tree.text(LAYER)
    if "rope_params" not in text:
        return Verdict(Need.RETIRED, "the layer leaves the configuration's rope parameters alone")
    if "config.rope_parameters = rope_params" not in text:
        return Verdict(Need.REFUSED, f"{LAYER} makes rope parameters in a way that is not known")
    if "DeepseekV2MLAAttention(vllm_config=vllm_config, config=config," not in text:
        return Verdict(Need.REFUSED, f"{LAYER} builds its attention in a way that is not known")
    return Verdict(Need.APPLY, "the layer makes its rope parameters from rope_scaling alone")


def with_mla_drafter(context: Context) -> bool:
    """Servers whose drafter has DeepSeek's attention; before its configuration is known, none."""
    if not context.eagle3 or context.vllm_config is None:
        return False
    return has_mla(context.vllm_config.speculative_config.draft_model_config.hf_config)


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """A drafter's rope parameters as vLLM reads them everywhere else; a copy, since the attention renames the type."""
    given = getattr(hf_config, "rope_parameters", None)
    if given:
        return dict(given)
    return {"rope_type": "default", "rope_theta": getattr(hf_config, "rope_theta", 10000.0)}


def install(installer: Installer) -> None:
    """Put a function in the class's place in the drafter's module: it is only ever called there."""
    attention_class = installer.original(TARGET)

    def attention(*, vllm_config: Any, config: Any, **kwargs: Any) -> Any:
        # The layer passes a copy of its own.
        config.rope_parameters = rope_parameters(vllm_config.speculative_config.draft_model_config.hf_config)
        return attention_class(vllm_config=vllm_config, config=config, **kwargs)

    installer.replace(TARGET, attention)


FIX = Fix(
    id="D25",
    name="drafter-rope",
    targets=(LAYER, TARGET),
    phase=Phase.WORKER,
    why="an MLA drafter runs with a rotary base it was not trained with, or ends with KeyError: 'factor'",
    upstream="0.28.0 reads the configuration's rope_parameters",
    retire="releases below 0.28.0 are no longer supported",
    probe=probe,
    wanted=with_mla_drafter,
    install=install,
)
