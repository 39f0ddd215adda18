# SPDX-License-Identifier: Apache-2.0
"""D18, before 0.18.0: there is no MLA drafter at all.

Up to 0.17.1 vLLM has only the Llama drafter, and refuses an MLA one with a list of every architecture it knows. The
whole model would have to be brought along, which is more than a patch should do; the refusal now says in one sentence
what to do instead.
"""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.fixes.mtp_rewrite import TARGET, is_eagle3_drafter
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

FIRST = "0.18.0"
"""The first release with an MLA drafter."""
_MODEL = "vllm.model_executor.models.deepseek_eagle3"


def probe(tree: SourceTree) -> Verdict:
    """Whether the release brings the model."""
    if tree.has_module(_MODEL):
        return Verdict(Need.RETIRED, "this release has an MLA drafter")
    if tree.parameters(TARGET)[:1] != ("hf_config",):
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}, not (hf_config, ...)")
    return Verdict(Need.APPLY, "this release has no MLA drafter")


def has_mla(hf_config: Any) -> bool:
    """Whether a drafter's attention is DeepSeek's."""
    return getattr(hf_config, "kv_lora_rank", None) is not None or any(
        "Deepseek" in name for name in getattr(hf_config, "architectures", None) or []
    )


def install(installer: Installer) -> None:
    """Look at every draft configuration as vLLM does: before the architecture is searched for."""
    original = installer.original(TARGET).__func__

    def hf_config_override(hf_config: Any, *args: Any, **kwargs: Any) -> Any:
        if is_eagle3_drafter(hf_config) and has_mla(hf_config):
            raise ValueError(
                f"vllm-kimi-eagle3: this drafter has MLA attention ({', '.join(hf_config.architectures)}), which vLLM"
                f" serves from {FIRST} on; update vLLM, or take a drafter with Llama attention"
            )
        return original(hf_config, *args, **kwargs)

    # Pickle stores a function as the place where it is found again: ours stands where the original stood.
    hf_config_override.__module__ = original.__module__
    hf_config_override.__qualname__ = original.__qualname__
    installer.replace(TARGET, staticmethod(hf_config_override))


FIX = Fix(
    id="D18",
    name="mla-drafter-refusal",
    targets=(TARGET,),
    phase=Phase.SPECULATIVE_CONFIG,
    why="an MLA drafter is refused with a list of all architectures that vLLM knows",
    upstream="vllm#36361 brought MLA drafters (0.18.0)",
    retire="releases below 0.18.0 are no longer supported",
    probe=probe,
    install=install,
)
