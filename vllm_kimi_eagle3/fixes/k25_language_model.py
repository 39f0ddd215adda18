# SPDX-License-Identifier: Apache-2.0
"""D5: 0.15's Kimi-K2.5 keeps its parts where the proposer does not look.

There the wrapper holds the decoder itself as its language model, and the lm_head beside it. The proposer wants the
language model's ``.model.embed_tokens`` and ``.lm_head``: the first access dies of an AttributeError, and without the
second a drafter that borrows the lm_head keeps random weights. While the drafter loads, the wrapper shows its parts in
the shape that every other target has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from vllm_kimi_eagle3.fixes import _proposer
from vllm_kimi_eagle3.fixes.eagle3_interface import KIMI_K25
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict, with_eagle3_on_k25

TARGET = "vllm.v1.spec_decode.eagle:SpecDecodeBaseProposer.load_model"
_INIT = f"{KIMI_K25}.__init__"


def probe(tree: SourceTree) -> Verdict:
    """What the wrapper builds as its language model."""
    if not tree.has(KIMI_K25):
        return Verdict(Need.NOT_APPLICABLE, "this release has no Kimi-K2.5")
    text = tree.text(_INIT)
    if "self.language_model = DeepseekV2Model(" not in text:
        return Verdict(Need.RETIRED, "Kimi-K2.5's language model is a whole DeepseekV2ForCausalLM")
    proposer = _proposer.find(tree, "load_model")
    if proposer != TARGET or tree.parameters(TARGET) != ("self", "target_model"):
        return Verdict(Need.REFUSED, f"{proposer} takes {tree.parameters(proposer)}")
    if "if not hasattr(target_language_model, 'model'):" in tree.text(TARGET):
        return Verdict(Need.RETIRED, "the proposer knows a bare decoder: the source patch")
    if "target_model.get_language_model()" not in tree.text(TARGET) or "self.lm_head" not in text:
        return Verdict(Need.REFUSED, f"{TARGET} looks for the target's parts in a way that is not known")
    return Verdict(Need.APPLY, "Kimi-K2.5's language model is a bare decoder, its lm_head is on the wrapper")


@contextlib.contextmanager
def parts_where_expected(target_model: Any) -> Generator[None]:
    """Let a wrapper around a bare decoder answer ``get_language_model()`` with ``.model`` and ``.lm_head``."""
    decoder = target_model.get_language_model() if hasattr(target_model, "get_language_model") else None
    if decoder is None or hasattr(decoder, "model"):
        yield
        return
    parts = SimpleNamespace(model=decoder, lm_head=target_model.lm_head)
    # The instance's own dictionary, so that torch does not register the decoder a second time.
    vars(target_model)["get_language_model"] = lambda: parts
    try:
        yield
    finally:
        del vars(target_model)["get_language_model"]


def install(installer: Installer) -> None:
    """Wrap the proposer's loading of the drafter."""
    original = installer.original(TARGET)

    def load_model(self: Any, target_model: Any) -> None:
        with parts_where_expected(target_model):
            original(self, target_model)

    installer.replace(TARGET, load_model)


FIX = Fix(
    id="D5",
    name="k25-language-model",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="AttributeError: 'DeepseekV2Model' object has no attribute 'model', or a drafter with a random lm_head",
    upstream="0.16.0 wraps a whole DeepseekV2ForCausalLM",
    retire="releases below 0.16.0 are no longer supported",
    probe=probe,
    wanted=with_eagle3_on_k25,
    install=install,
)
