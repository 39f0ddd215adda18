# SPDX-License-Identifier: Apache-2.0
"""D2: our targets do not say that they can be speculated on with EAGLE-3.

The runner asks ``isinstance(model, SupportsEagle3)``, a protocol with five members; up to 0.17.1 neither
``DeepseekV2ForCausalLM`` nor ``KimiK25ForConditionalGeneration`` has them, and the engine ends with "Model does not
support EAGLE3 interface". The getter of the default layers got another name in 0.18.0, together with its caller, so
it is given under the name that this release's protocol uses.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

PROTOCOL = "vllm.model_executor.models.interfaces:SupportsEagle3"
DEEPSEEK = "vllm.model_executor.models.deepseek_v2:DeepseekV2ForCausalLM"
KIMI_K25 = "vllm.model_executor.models.kimi_k25:KimiK25ForConditionalGeneration"
SETTER = "set_aux_hidden_state_layers"
GETTERS = ("get_eagle3_aux_hidden_state_layers", "get_eagle3_default_aux_hidden_state_layers")
FLAGS = {"supports_eagle3": True, "has_own_lm_head": False, "has_own_embed_tokens": False}
"""The protocol's three data members, with the values that it gives them itself."""


def _declares(tree: SourceTree, target: str) -> bool:
    node = tree.node(target)
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "SupportsEagle3" for base in node.bases)


def probe(tree: SourceTree) -> Verdict:
    """Compare the classes' bases with the protocol."""
    classes = [target for target in (DEEPSEEK, KIMI_K25) if tree.has(target)]
    missing = [target.partition(":")[2] for target in classes if not _declares(tree, target)]
    if DEEPSEEK not in classes:
        return Verdict(Need.REFUSED, f"{DEEPSEEK} is not part of this vLLM")
    if not missing:
        return Verdict(Need.RETIRED, "both targets implement SupportsEagle3")
    if not tree.has(f"{PROTOCOL}.{SETTER}") or not any(tree.has(f"{PROTOCOL}.{name}") for name in GETTERS):
        return Verdict(Need.REFUSED, f"{PROTOCOL} has another setter or getter than those known")
    return Verdict(Need.APPLY, f"SupportsEagle3 is missing on {' and '.join(missing)}")


def decoder(model: Any) -> Any:
    """The ``DeepseekV2Model`` inside a target: it holds the layers, and the ids of those to capture.

    0.15's Kimi-K2.5 holds it as ``language_model``; later ones hold a ``DeepseekV2ForCausalLM`` there.
    """
    language_model = getattr(model, "language_model", model)
    return getattr(language_model, "model", language_model)


def set_aux_hidden_state_layers(self: Any, layers: tuple[int, ...]) -> None:
    """The protocol's setter: boundaries to capture."""
    decoder(self).aux_hidden_state_layers = tuple(layers)


def default_layers(self: Any) -> tuple[int, ...]:
    """The protocol's getter, with the default of every other target of vLLM's."""
    count = len(decoder(self).layers)
    return (2, count // 2, count - 3)


def install(installer: Installer) -> None:
    """Give both classes all five members, so that the answer does not hang on what their bases bring."""
    from vllm.model_executor.models.interfaces import SupportsEagle3

    getter = next(name for name in GETTERS if name in vars(SupportsEagle3))
    members: dict[str, bool | Callable[..., Any]] = {SETTER: set_aux_hidden_state_layers, getter: default_layers}
    for target in (DEEPSEEK, KIMI_K25):
        for name, value in {**FLAGS, **members}.items():
            installer.replace(f"{target}.{name}", value, create=True)


FIX = Fix(
    id="D2",
    name="eagle3-interface",
    targets=(DEEPSEEK, KIMI_K25),
    phase=Phase.WORKER,
    why='the engine ends with "Model does not support EAGLE3 interface"',
    upstream="vllm#36361 (0.18.0)",
    retire="releases below 0.18.0 are no longer supported",
    probe=probe,
    install=install,
)
