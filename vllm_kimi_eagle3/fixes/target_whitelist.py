# SPDX-License-Identifier: Apache-2.0
"""D1: our targets are not on the list of those that may speculate with EAGLE-3.

Up to 0.21 a validator of ``SpeculativeConfig`` compares the target's model type with a list; Kimi and DeepSeek joined
it in 0.18.0, and 0.22.0 dropped the list. Before that, a server ends with "eagle3 is only supported for [...]".

Pydantic captured the validator when it built the class, and again in the schema of every configuration that holds one,
so replacing the attribute changes nothing. The list is a constant of the function's code: a code object with a longer
list, swapped into the captured function, holds for everybody at once.
"""

from __future__ import annotations

import ast
from types import CodeType, FunctionType
from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer, PatchConflict
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

TARGET = "vllm.config.speculative:SpeculativeConfig._verify_args"
NAMES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")
"""What 0.18.0 added."""
_OLDEST = {"llama", "qwen"}
"""On the list in every release that has one: how it is told from other constants."""


def listed(tree: SourceTree) -> list[tuple[str, ...]]:
    """The lists of model types in the validator's source."""
    found: list[tuple[str, ...]] = []
    for node in ast.walk(tree.function(TARGET)):
        if isinstance(node, ast.List | ast.Tuple):
            values = [item.value for item in node.elts if isinstance(item, ast.Constant)]
            names = tuple(value for value in values if isinstance(value, str))
            if set(names) >= _OLDEST:
                found.append(names)
    return found


def probe(tree: SourceTree) -> Verdict:
    """Read the list itself."""
    lists = listed(tree)
    text = tree.text(TARGET)
    if not lists:
        if "is only supported for" in text and "hf_text_config.model_type" in text:
            return Verdict(Need.REFUSED, f"{TARGET} refuses model types by something that is not a list of names")
        return Verdict(Need.RETIRED, "no list of target types any more")
    if len(lists) > 1:
        return Verdict(Need.REFUSED, f"{TARGET} has {len(lists)} lists of target types, one was expected")
    missing = [name for name in NAMES if name not in lists[0]]
    if not missing:
        return Verdict(Need.RETIRED, "Kimi and DeepSeek are on the list of target types")
    return Verdict(Need.APPLY, f"the list of target types lacks {', '.join(missing)}")


def with_names(code: CodeType) -> CodeType:
    """The same code with a longer list.

    Raises:
        PatchConflict: the code holds no such list, or several.
    """
    places = [i for i, value in enumerate(code.co_consts) if isinstance(value, tuple) and _is_list(value)]
    if len(places) != 1:
        raise PatchConflict(f"{code.co_name} holds {len(places)} lists of target types, one was expected")
    constants = list(code.co_consts)
    old: tuple[Any, ...] = constants[places[0]]
    constants[places[0]] = old + tuple(name for name in NAMES if name not in old)
    return code.replace(co_consts=tuple(constants))


def _is_list(value: tuple[Any, ...]) -> bool:
    return all(isinstance(item, str) for item in value) and _OLDEST.issubset(value)


def captured() -> FunctionType:
    """The very function that pydantic calls.

    Raises:
        PatchConflict: pydantic keeps it somewhere else.
    """
    from vllm.config.speculative import SpeculativeConfig

    decorators: Any = vars(SpeculativeConfig)["__pydantic_decorators__"]
    function = decorators.model_validators["_verify_args"].func
    if not isinstance(function, FunctionType):
        raise PatchConflict(f"pydantic holds the validator as a {type(function).__name__}, a function was expected")
    return function


def install(installer: Installer) -> None:
    """Swap the code of the captured function."""
    function = captured()
    installer.replace_code(function, with_names(function.__code__))


FIX = Fix(
    id="D1",
    name="target-whitelist",
    targets=(TARGET,),
    phase=Phase.SPECULATIVE_CONFIG,
    why='the server is refused: "eagle3 is only supported for [...]"',
    upstream="vllm#31254 asked for it; on the list from 0.18.0, no list from 0.22.0",
    retire="releases below 0.18.0 are no longer supported",
    probe=probe,
    install=install,
)
