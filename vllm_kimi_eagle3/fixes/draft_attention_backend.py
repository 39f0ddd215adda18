# SPDX-License-Identifier: Apache-2.0
"""D15: an attention backend chosen for the target is forced on the drafter.

``--attention-backend TRITON_MLA`` and its like hold for every layer that is built, and a drafter with ordinary
attention then refuses to start: "Selected backend ... is not valid for this configuration". V1 separates the two from
0.21.0 on; V2 does only when the user names a backend for the drafter as well. While a drafter of the other kind of
attention is built, the choice is taken back, so that the drafter finds its backend by itself, as it does on V1 today.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from vllm_kimi_eagle3.fixes import _proposer
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

V2_MODULE = "vllm.v1.worker.gpu.spec_decode.eagle.utils"
_V2 = f"{V2_MODULE}:load_eagle_model"
_OVERRIDES = "vllm.config.speculative:SpeculativeConfig.apply_draft_overrides"
_LOADER = "get_model"


def faulty(tree: SourceTree) -> list[str]:
    """The modules whose ``get_model`` builds a drafter under the target's choice of backend.

    Raises:
        SourceMissing: V1's proposer is in none of the places known.
    """
    found: list[str] = []
    proposer = next((t for t in _proposer.places("_get_model") if tree.has(t)), None)
    proposer = proposer or _proposer.find(tree, "load_model")
    config = proposer.rpartition(".")[0] + "._create_draft_vllm_config"
    text = tree.text(proposer) + (tree.text(config) if tree.has(config) else "")
    if not _separates(text):
        found.append(proposer.partition(":")[0])
    if tree.has(_V2) and not _separates(tree.text(_V2)):
        found.append(V2_MODULE)
    return found


def _separates(text: str) -> bool:
    """Whether code that builds a drafter gives it a backend of its own, or automatic choice; not only if one is set."""
    if "with_draft_attention_backend(" in text:  # the source patch
        return True
    return "attention_config=replace(" in text and "attention_backend is not None" not in text


def probe(tree: SourceTree) -> Verdict:
    """Look where each runner's drafter is built."""
    if tree.has(_OVERRIDES) and "is not None" not in tree.text(_OVERRIDES):
        return Verdict(Need.REFUSED, f"{_OVERRIDES} overlays the drafter's settings in a way that is not known")
    modules = faulty(tree)
    if not modules:
        return Verdict(Need.RETIRED, "both runners choose the drafter's backend for itself")
    for module in modules:
        if f"{_LOADER}(" not in tree.path(module).read_text(encoding="utf-8"):
            return Verdict(Need.REFUSED, f"{module} builds the drafter in a way that is not known")
    runners = " and ".join("V2" if module == V2_MODULE else "V1" for module in modules)
    return Verdict(Need.APPLY, f"the drafter is built with the target's backend on {runners}")


@contextlib.contextmanager
def own_backend(vllm_config: Any) -> Generator[None]:
    """Take a forced backend back while a drafter of another kind of attention is built."""
    speculative_config, attention = vllm_config.speculative_config, vllm_config.attention_config
    forced = attention.backend
    chosen = getattr(speculative_config, "attention_backend", None)
    target, drafter = speculative_config.target_model_config, speculative_config.draft_model_config
    if forced is None or chosen is not None or target.use_mla == drafter.use_mla:
        yield
        return
    attention.backend = None
    try:
        yield
    finally:
        attention.backend = forced


def install(installer: Installer) -> None:
    """Wrap ``get_model`` where the drafters' modules see it; the target's loader does not pass there."""
    for module in faulty(SourceTree.installed()):
        target = f"{module}:{_LOADER}"
        installer.replace(target, _with_own_backend(installer.original(target)))


def _with_own_backend(original: Any) -> Any:
    def get_model(*, vllm_config: Any, **kwargs: Any) -> Any:
        with own_backend(vllm_config):
            return original(vllm_config=vllm_config, **kwargs)

    return get_model


FIX = Fix(
    id="D15",
    name="draft-attention-backend",
    targets=(*_proposer.places("_get_model"), *_proposer.places("load_model"), _V2),
    phase=Phase.WORKER,
    why="a forced MLA backend is forced on the drafter too, which refuses it",
    upstream="0.21.0 separates the two on V1; none known for V2",
    retire="V2 takes an unset backend of the drafter for automatic",
    probe=probe,
    install=install,
)
