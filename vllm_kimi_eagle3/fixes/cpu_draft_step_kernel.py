# SPDX-License-Identifier: Apache-2.0
"""C6: on CPU, 0.30.0 does not draft a second token: "TypeError: Cannot inspect kernel parameters for function".

There the Triton kernels of speculation are held by dispatchers, which bind a launch's arguments to the kernel's
parameters by name. Without Triton, the CPU runner puts C++ kernels in their place; but those of the drafter's steps and
of the rejection sampler it puts where the kernels stood before, and where nobody looks any more. Their dispatchers keep
plain functions, and the first step of a drafter, or the first verification, ends the engine.

The C++ wrappers have the Triton kernels' parameters in the same order, but not all under the same names. So a
dispatcher is given a kernel that has the Triton kernel's names, and passes the arguments on by position.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict, on_cpu

TARGET = "vllm.v1.worker.cpu_model_runner:CPUModelRunner._postprocess_triton"
_WRAPPERS = "vllm.utils.cpu_triton_utils"
KERNELS = {
    "vllm.v1.spec_decode.utils:_eagle_step_slot_mapping_metadata": "eagle_step_slot_mapping_metadata_kernel",
    "vllm.v1.sample.rejection_sampler:_rejection_greedy_sample": "rejection_greedy_sample_kernel",
    "vllm.v1.sample.rejection_sampler:_rejection_random_sample": "rejection_random_sample_kernel",
    "vllm.v1.sample.rejection_sampler:_expand": "expand_kernel",
    "vllm.v1.sample.rejection_sampler:_sample_recovered_tokens": "sample_recovered_tokens_kernel",
}
"""The dispatchers on EAGLE-3's path that are left out, and the name of each one's kernel, in Triton and in C++."""


def probe(tree: SourceTree) -> Verdict:
    """The fault is a dispatcher whose ``kernel`` the CPU runner does not set."""
    if not all(tree.has(dispatcher) for dispatcher in KERNELS):
        return Verdict(Need.NOT_APPLICABLE, "this release calls the kernels of speculation by their names")
    if not tree.has(TARGET):
        return Verdict(Need.RETIRED, "the CPU runner leaves it to the table of kernels to set the dispatchers'")
    text = tree.text(TARGET)
    left = [dispatcher for dispatcher in KERNELS if f".{dispatcher.partition(':')[2]}.kernel = " not in text]
    if not left:
        return Verdict(Need.RETIRED, "the CPU runner sets the dispatchers' kernels")
    for dispatcher in left:
        kernel = KERNELS[dispatcher]
        wrapper = f"{_WRAPPERS}:_{kernel}_impl"
        if not tree.has(wrapper):
            return Verdict(Need.REFUSED, f"{wrapper} is not part of this vLLM")
        expected = tree.parameters(f"{dispatcher.partition(':')[0]}:{kernel}")
        if len(expected) != len(tree.parameters(wrapper)):
            return Verdict(Need.REFUSED, f"{wrapper} takes {tree.parameters(wrapper)}, {kernel} takes {expected}")
    return Verdict(Need.APPLY, f"the CPU runner does not set the kernel of {', '.join(left)}")


class ByPosition:
    """A kernel for a dispatcher: launched with the Triton kernel's names, it calls a function by position."""

    def __init__(self, names: tuple[str, ...], function: Callable[..., None]) -> None:
        self.arg_names = names
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, **arguments: Any) -> None:
        """Call the function, in the order of the names; the grid does not matter, for it works on whole tensors."""
        self.function(*(arguments[name] for name in self.arg_names))


def set_kernels() -> None:
    """Give every dispatcher that still holds its Triton kernel the C++ one."""
    wrappers: Any = importlib.import_module(_WRAPPERS)
    for target, name in KERNELS.items():
        module, _, attribute = target.partition(":")
        dispatcher = getattr(importlib.import_module(module), attribute)
        if inspect.isfunction(dispatcher.kernel):
            names = tuple(inspect.signature(dispatcher.kernel).parameters)
            dispatcher.kernel = ByPosition(names, getattr(wrappers, name).func)


def install(installer: Installer) -> None:
    """Let the CPU runner set the kernels that it leaves out."""
    original: Any = installer.original(TARGET)

    def _postprocess_triton(self: Any) -> None:
        from vllm.triton_utils import HAS_TRITON

        original(self)
        if not HAS_TRITON:
            set_kernels()

    installer.replace(TARGET, _postprocess_triton)


FIX = Fix(
    id="C6",
    name="cpu-draft-step-kernel",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="no speculation on CPU: TypeError 'Cannot inspect kernel parameters for function' at the first draft",
    upstream="0.31.0 sets the dispatchers' kernels from one table",
    retire="0.30.0 is no longer supported",
    probe=probe,
    wanted=on_cpu,
    install=install,
)
