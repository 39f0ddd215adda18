# SPDX-License-Identifier: Apache-2.0
"""D11: V1 asks Kimi-K2.5's configuration for a key that the new schema does not have.

From 0.32.0 on, vLLM loads Kimi-K2.5 with Transformers' own configuration class, whose placeholder is
``image_token_id``; the V1 proposer still reads ``media_placeholder_token_id`` and dies of an AttributeError, or, where
a checkpoint brings both names, reads the one that nothing else goes by. When it loads the drafter, the old name is
given the new one's value: by then that is what the tokenizer says, which wins where they disagree.
"""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.fixes import _proposer
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict, with_eagle3_on_k25

OLD, NEW = "media_placeholder_token_id", "image_token_id"
_MODEL = "vllm.model_executor.models.kimi_k25:KimiK25ForConditionalGeneration"


def probe(tree: SourceTree) -> Verdict:
    """The fault: the model reads the new name while the proposer reads the old one."""
    if not tree.has(_MODEL):
        return Verdict(Need.NOT_APPLICABLE, "this release has no Kimi-K2.5")
    proposer = _proposer.find(tree, "load_model")
    if OLD not in tree.text(proposer):
        return Verdict(Need.RETIRED, f"the proposer does not read {OLD}")
    if f"config.{NEW} if hasattr(target_model.config, '{NEW}')" in tree.text(proposer):
        return Verdict(Need.RETIRED, f"the proposer reads {NEW} where there is one: the source patch")
    if NEW not in tree.text(_MODEL):
        return Verdict(Need.RETIRED, f"model and proposer both read {OLD}")
    return Verdict(Need.APPLY, f"the model reads {NEW}, the proposer {OLD}")


def install(installer: Installer) -> None:
    """Wrap the proposer's loading of the drafter."""
    target = _proposer.find(SourceTree.installed(), "load_model")
    original: Any = installer.original(target)

    def load_model(self: Any, target_model: Any, *args: Any, **kwargs: Any) -> None:
        config = getattr(target_model, "config", None)
        if type(target_model).__name__ == _MODEL.rpartition(":")[2] and hasattr(config, NEW):
            setattr(config, OLD, getattr(config, NEW))
        original(self, target_model, *args, **kwargs)

    installer.replace(target, load_model)


FIX = Fix(
    id="D11",
    name="image-placeholder",
    targets=_proposer.places("load_model"),
    phase=Phase.WORKER,
    why="Kimi-K2.5 checkpoints of the new schema crash the V1 proposer",
    upstream="none known",
    retire="the proposer reads image_token_id",
    probe=probe,
    wanted=with_eagle3_on_k25,
    install=install,
)
