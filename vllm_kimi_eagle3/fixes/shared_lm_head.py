# SPDX-License-Identifier: Apache-2.0
"""D12: V2 does not find the lm_head of Kimi-K2.5.

A drafter without an lm_head borrows the target's. Up to 0.25 the V2 runner looks for it on the target itself, and
Kimi-K2.5 keeps it on its language model: nothing is borrowed, and the drafter proposes from random weights. While the
drafter loads, the wrapper shows its language model's lm_head as its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict, with_eagle3_on_k25

MODULE = "vllm.v1.worker.gpu.spec_decode.eagle.utils"
TARGET = f"{MODULE}:load_eagle_model"
_ALIASES = ("vllm.v1.worker.gpu.spec_decode.eagle.speculator:load_eagle_model",)
_WRONG = ("target_model.lm_head", "getattr(target_model, 'lm_head', None)")


def probe(tree: SourceTree) -> Verdict:
    """The fault is the look at the target alone."""
    if not tree.has(TARGET):
        return Verdict(Need.NOT_APPLICABLE, "this release's V2 runner has no EAGLE drafter")
    text = tree.text(TARGET)
    if "get_target_lm_head(" in text:
        return Verdict(Need.RETIRED, "V2 looks for the lm_head on the language model first")
    if tree.parameters(TARGET) != ("target_model", "vllm_config") or not any(wrong in text for wrong in _WRONG):
        return Verdict(Need.REFUSED, f"{TARGET} looks for the lm_head in a way that is not known")
    return Verdict(Need.APPLY, "V2 looks for the lm_head on the wrapper")


@contextlib.contextmanager
def with_lm_head(target_model: Any) -> Generator[None]:
    """Show the language model's lm_head on the wrapper that has none."""
    head = None
    if not hasattr(target_model, "lm_head") and hasattr(target_model, "get_language_model"):
        head = getattr(target_model.get_language_model(), "lm_head", None)
    if head is None:
        yield
        return
    # The instance's own dictionary, so that torch does not register the module a second time.
    vars(target_model)["lm_head"] = head
    try:
        yield
    finally:
        del vars(target_model)["lm_head"]


def install(installer: Installer) -> None:
    """Wrap the function that loads the drafter."""
    original = installer.original(TARGET)

    def load_eagle_model(target_model: Any, vllm_config: Any) -> Any:
        with with_lm_head(target_model):
            return original(target_model, vllm_config)

    installer.replace(TARGET, load_eagle_model, aliases=_ALIASES)


FIX = Fix(
    id="D12",
    name="shared-lm-head",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="a drafter without an lm_head proposes from random weights: near-zero acceptance",
    upstream="0.26.0 looks on the language model first",
    retire="releases below 0.26.0 are no longer supported",
    probe=probe,
    wanted=with_eagle3_on_k25,
    install=install,
)
