# SPDX-License-Identifier: Apache-2.0
"""C1: on CPU, replacing Triton kernels trips over an object that only pretends to have a ``__dict__``.

Without Triton, vLLM points every reference to a Triton kernel at a C++ one. It walks the attributes of every imported
module and asks ``vars(value).get("kernel")``. llvmlite's library handle answers every attribute access, ``__dict__``
included, with a function; once numba is imported, as Kimi-K2.5's processor does, the engine dies of an AttributeError.

A builtin that a module shadows is the smallest place to mend it: the walk gets a ``vars`` that returns a dictionary or
an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict, on_cpu

WALK = "vllm.triton_utils.dispatcher:_rebind_kernels"


def probe(tree: SourceTree) -> Verdict:
    """The fault is the unguarded ``vars(value).get``."""
    if not tree.has(WALK):
        return Verdict(Need.NOT_APPLICABLE, "this release rebinds no kernels on CPU")
    if "vars(value).get(" in tree.text(WALK):
        return Verdict(Need.APPLY, "the walk over modules trusts every __dict__")
    return Verdict(Need.RETIRED, "the walk over modules no longer trusts every __dict__")


def instance_dict(value: Any) -> Mapping[str, Any]:
    """``vars(value)``, which is a mapping but no dictionary for a class; an empty one where it is no mapping at all."""
    found: Any = vars(value)
    return found if isinstance(found, Mapping) else {}


def install(installer: Installer) -> None:
    """Shadow the builtin in the dispatcher's module."""
    installer.replace("vllm.triton_utils.dispatcher:vars", instance_dict, create=True)


FIX = Fix(
    id="C1",
    name="cpu-kernel-rebinding",
    targets=(WALK,),
    phase=Phase.WORKER,
    why="Kimi-K2.5 does not start on CPU: AttributeError '_lib_fn_wrapper' object has no attribute 'get'",
    upstream="none known",
    retire="_rebind_kernels checks that what vars() returns is a dictionary",
    probe=probe,
    wanted=on_cpu,
    install=install,
)
