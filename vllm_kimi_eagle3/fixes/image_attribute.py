# SPDX-License-Identifier: Apache-2.0
"""D4: V1 asks Kimi-K2.5's configuration for a placeholder under a name that it never had.

Up to 0.17.1 the proposer reads ``image_token_index`` from the configuration of every multimodal target that is not on
its list of names; Kimi-K2.5's says ``media_placeholder_token_id``, and the engine dies of an AttributeError. No drafter
reads the value, so the configuration is given the other name.
"""

from __future__ import annotations

from vllm_kimi_eagle3.fixes import _proposer
from vllm_kimi_eagle3.fixes.eagle3_interface import KIMI_K25
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, Verdict, with_eagle3_on_k25

ASKED, PRESENT = "image_token_index", "media_placeholder_token_id"


def probe(tree: SourceTree) -> Verdict:
    """The proposer knows Kimi-K2.5 by name, or it falls through to the attribute."""
    if not tree.has(KIMI_K25):
        return Verdict(Need.NOT_APPLICABLE, "this release has no Kimi-K2.5")
    text = tree.text(_proposer.find(tree, "load_model"))
    if "KimiK25ForConditionalGeneration" in text or f"target_model.config.{ASKED}" not in text:
        return Verdict(Need.RETIRED, f"the proposer does not ask Kimi-K2.5 for {ASKED}")
    if PRESENT not in tree.text(KIMI_K25):
        return Verdict(Need.REFUSED, f"the proposer asks for {ASKED}, and Kimi-K2.5 has no {PRESENT}")
    return Verdict(Need.APPLY, f"the proposer asks Kimi-K2.5 for {ASKED}")


def configure(context: Context) -> None:
    """Give the target's configuration the name that the proposer asks for."""
    hf_config = context.vllm_config.model_config.hf_config
    if not hasattr(hf_config, ASKED):
        setattr(hf_config, ASKED, getattr(hf_config, PRESENT))


FIX = Fix(
    id="D4",
    name="image-attribute",
    targets=_proposer.places("load_model"),
    phase=Phase.WORKER,
    why="AttributeError: 'KimiK25Config' object has no attribute 'image_token_index'",
    upstream="0.18.0 knows Kimi-K2.5 by name",
    retire="releases below 0.18.0 are no longer supported",
    probe=probe,
    wanted=with_eagle3_on_k25,
    configure=configure,
)
