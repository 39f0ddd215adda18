# SPDX-License-Identifier: Apache-2.0
"""C5: on CPU, sampling with speculation divides by temperatures that were never written.

The rejection sampler spreads each request's temperature, top-k and top-p over its draft tokens. Without Triton a C++
kernel does that on 64-bit integers; its Python wrapper converts the tensors, and the kernel writes into the converted
copy, which is dropped. The caller's tensor stays as it was allocated: drafts of sampled requests are accepted by
chance (0 of 219 at the second position in our measurement), and the text is of another temperature. Greedy requests
take another path.

The wrapper's code is swapped in place, because the table of kernels has captured the function before any fix can run.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict, on_cpu

if TYPE_CHECKING:
    import torch

TARGET = "vllm.utils.cpu_triton_utils:_expand_kernel_impl"
_PARAMETERS = ("output", "input_val", "cu_num_tokens", "replace_from", "replace_to", "MAX_NUM_TOKENS")


def probe(tree: SourceTree) -> Verdict:
    """The fault is a conversion of the output that nobody copies back."""
    if not tree.has(TARGET):
        return Verdict(Need.NOT_APPLICABLE, "this release has no C++ kernel for the expansion")
    text = tree.text(TARGET)
    if "_ensure_int64(output)" not in text or ".copy_(" in text:
        return Verdict(Need.RETIRED, "the expansion writes into the caller's tensor")
    if tree.parameters(TARGET) != _PARAMETERS:
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}")
    return Verdict(Need.APPLY, "the expansion writes into a converted copy of its output")


def expand(
    output: Any, input_val: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None
) -> None:
    """Spread (batch,) values over (tokens,), ``replace_from`` becoming ``replace_to``.

    Only this function's code is used, inside vLLM's module: no name but torch may occur in it.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    values = input_val.masked_fill(input_val == replace_from, replace_to).repeat_interleave(counts)
    output[: values.shape[0]] = values


def install(installer: Installer) -> None:
    """Swap the code; whoever captured the function runs the new one."""
    original = installer.original(TARGET)
    assert isinstance(original, FunctionType)
    installer.replace_code(original, expand.__code__)


FIX = Fix(
    id="C5",
    name="cpu-sampling-expansion",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="sampled requests are verified at undefined temperatures on CPU: hardly a draft is accepted, text is off",
    upstream="none known",
    retire="_expand_kernel_impl writes into the tensor it was given",
    probe=probe,
    wanted=on_cpu,
    install=install,
)
