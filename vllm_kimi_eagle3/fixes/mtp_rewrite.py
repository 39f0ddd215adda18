# SPDX-License-Identifier: Apache-2.0
"""D18: an MLA drafter is taken for an MTP module.

vLLM rewrites the configuration of every draft model whose ``model_type`` is ``deepseek_v3`` into that of DeepSeek's
own multi-token-prediction head, whatever the speculative method. An EAGLE-3 drafter with MLA attention carries that
model type, and is refused as the unknown architecture ``Eagle3DeepSeekMTPModel``.

The remedy leaves a configuration that is an EAGLE-3 drafter's alone. A drafter is known by its architecture's name or
by keys that only EAGLE-3 drafters have; a real MTP head has neither.
"""

from __future__ import annotations

import ast
from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

TARGET = "vllm.config.speculative:SpeculativeConfig.hf_config_override"
_REWRITTEN = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")


def is_eagle3_drafter(hf_config: Any) -> bool:
    """Whether a Hugging Face configuration is an EAGLE-3 drafter's."""
    names: list[str] = list(getattr(hf_config, "architectures", None) or [])
    if any(name.startswith("Eagle3") or name.endswith("Eagle3") for name in names):
        return True
    return any(hasattr(hf_config, key) for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids"))


def probe(tree: SourceTree) -> Verdict:
    """The defect is there while the override rewrites ``deepseek_v3`` without looking at the method."""
    text = tree.text(TARGET)
    if "'deepseek_mtp'" not in text:
        return Verdict(Need.RETIRED, "draft configurations are not rewritten to MTP")
    if _leaves_drafters_alone(tree):
        return Verdict(Need.RETIRED, "EAGLE-3 drafters are left alone: the source patch")
    if "eagle3" in text.lower():
        return Verdict(Need.REFUSED, f"{TARGET} now mentions eagle3 in a way this fix does not know")
    if tree.parameters(TARGET)[:1] != ("hf_config",):
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}, not (hf_config, ...)")
    if not tree.has_module("vllm.model_executor.models.deepseek_eagle3"):
        return Verdict(Need.NOT_APPLICABLE, "this release has no MLA drafter")
    return Verdict(Need.APPLY, "a deepseek_v3 drafter is rewritten to an MTP head whatever the method")


def _leaves_drafters_alone(tree: SourceTree) -> bool:
    """Whether the function returns for an EAGLE-3 drafter before it comes to speak of MTP."""
    for statement in tree.function(TARGET).body:
        text = ast.unparse(statement)
        if "deepseek_mtp" in text:
            return False
        if (
            isinstance(statement, ast.If)
            and "'Eagle3'" in text
            and ast.unparse(statement.body[0]) == "return hf_config"
        ):
            return True
    return False


def install(installer: Installer) -> None:
    """Wrap the override; a plain function, because the drafter's ModelConfig is pickled with a reference to it."""
    original = installer.original(TARGET).__func__

    def hf_config_override(hf_config: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(hf_config, "model_type", None) in _REWRITTEN and is_eagle3_drafter(hf_config):
            return hf_config
        return original(hf_config, *args, **kwargs)

    # Pickle stores a function as the place where it is found again: ours stands where the original stood.
    hf_config_override.__module__ = original.__module__
    hf_config_override.__qualname__ = original.__qualname__
    installer.replace(TARGET, staticmethod(hf_config_override))


FIX = Fix(
    id="D18",
    name="mtp-rewrite",
    targets=(TARGET,),
    phase=Phase.SPECULATIVE_CONFIG,
    why="an MLA drafter with model_type deepseek_v3 is refused as Eagle3DeepSeekMTPModel",
    upstream="none known; MLA drafters came with vllm#36361 (0.18.0)",
    retire="hf_config_override looks at the speculative method before it rewrites to MTP",
    probe=probe,
    install=install,
)
