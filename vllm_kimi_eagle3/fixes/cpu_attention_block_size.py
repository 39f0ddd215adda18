# SPDX-License-Identifier: Apache-2.0
"""C3: on CPU, an MLA target and a GQA drafter find no common block size.

The target and its drafter share one KV-cache group. The CPU MLA kernel is compiled for blocks of 16 tokens only; the
ordinary CPU attention declares multiples of 32 only, although the same module has a kernel for multiples of 16
(``vec16``) and picks it by itself for such blocks. The declaration is widened to what the kernels can do; that blocks
of 16 give the right attention, in prefill and in decode, is tested against a reference forward.
"""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict, on_cpu

_MODULE = "vllm.v1.attention.backends.cpu_attn"
TARGET = f"{_MODULE}:CPUAttentionBackend.get_supported_kernel_block_sizes"
_KERNELS = f"{_MODULE}:_get_attn_isa"
_MLA = "vllm.v1.attention.backends.mla.cpu_mla"


def probe(tree: SourceTree) -> Verdict:
    """The fault needs the narrow declaration, the wider kernels, and MLA on CPU."""
    if not tree.has_module(_MLA):
        return Verdict(Need.NOT_APPLICABLE, "this release has no MLA on CPU")
    declared = tree.text(TARGET)
    if "MultipleOf(16)" in declared:
        return Verdict(Need.RETIRED, "CPU attention declares multiples of 16")
    if "MultipleOf(32)" not in declared:
        return Verdict(Need.REFUSED, f"{TARGET} declares neither multiples of 32 nor of 16: {declared}")
    if "'vec16'" not in tree.text(_KERNELS):
        return Verdict(Need.REFUSED, f"{_KERNELS} no longer has a kernel for blocks of 16")
    return Verdict(Need.APPLY, "CPU attention declares multiples of 32, CPU MLA only 16")


def install(installer: Installer) -> None:
    """Declare what the kernels can do."""
    from vllm.v1.attention.backend import MultipleOf

    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        del kv_cache_spec
        return [MultipleOf(16)]

    installer.replace(TARGET, staticmethod(get_supported_kernel_block_sizes))


FIX = Fix(
    id="C3",
    name="cpu-attention-block-size",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why='"No common block size for 16 (CPU_MLA: [16]; CPU_ATTN: [MultipleOf(32)])"',
    upstream="none known",
    retire="CPU attention declares multiples of 16, or CPU MLA takes multiples of 32",
    probe=probe,
    wanted=on_cpu,
    install=install,
)
