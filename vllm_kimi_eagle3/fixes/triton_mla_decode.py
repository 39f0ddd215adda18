# SPDX-License-Identifier: Apache-2.0
"""D19: TRITON_MLA verifies draft tokens by its prefill path, outside CUDA graphs; with it D9, a false declaration.

Up to 0.30 its metadata builder says that the decode path takes one query token a request. A verify step of k + 1 tokens
then goes down the prefill path, which expands the whole context of every request again in every layer, and full CUDA
graphs are off for the whole server. From 0.22.0 to 0.25.1 the builder also claims that graphs of several tokens work,
and the capture ends in an assertion (D9).

The kernel runs one program for each row of ``q``, with an extent and a block table of that row's own. So nothing is
needed but to tell a request's tokens as rows (:mod:`._decode_rows`) in the metadata, once a step and not once a layer.
The rows lie in buffers of fixed address that the builder owns, because a captured graph reads them again at every
replay; batches of one token a request keep the tensors that they came with, which draft steps change in place.

Left as they are: decode and prefill context parallelism, groups with non-causal blocks, servers without speculation,
and every other backend. A batch of more rows than :func:`most_rows` says takes the prefill path as before.
"""

from __future__ import annotations

import ast
import importlib
import itertools
from typing import TYPE_CHECKING, Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, Verdict

if TYPE_CHECKING:
    import torch

_MODULE = "vllm.v1.attention.backends.mla.triton_mla"
_COMMON_MODULE = "vllm.model_executor.layers.attention.mla_attention"
_COMMON = f"{_COMMON_MODULE}:MLACommonMetadataBuilder"
_BUILD, _BUILD_DECODE = f"{_COMMON}.build", f"{_COMMON}._build_decode"
TARGET = f"{_MODULE}:TritonMLABackend.get_builder_cls"
_FORWARDS = (f"{_MODULE}:TritonMLAImpl.forward_mqa", f"{_MODULE}:TritonMLAImpl._forward_decode")
_DECODE_PARAMETERS = (
    "self",
    "block_table_tensor",
    "seq_lens_device",
    "max_seq_len",
    "query_start_loc_cpu",
    "query_start_loc_device",
    "num_decode_tokens",
    "dcp_tot_seq_lens_device",
)
_RESERVES = ("_compute_num_kv_splits(self.model_config.max_model_len, ", "lse_dim = self.mla_dims.kv_lora_rank + 1")
_LARGEST_DEFAULT_GRAPH = 512
_SEVERAL = tuple(itertools.product(("", ": ClassVar[QueryLenSupport]"), ("UNIFORM", "VARLEN")))


def builder_in_use(tree: SourceTree) -> str:
    """The class that TRITON_MLA's metadata builder has in this release.

    Raises:
        SourceMissing: there is no such backend.
    """
    if not tree.has(TARGET):
        return _COMMON
    returned = [node for node in ast.walk(tree.node(TARGET)) if isinstance(node, ast.Return)]
    name = returned[-1].value if returned else None
    return f"{_MODULE}:{name.id}" if isinstance(name, ast.Name) else TARGET


def probe(tree: SourceTree) -> Verdict:
    """Look at what the builder in use says of itself, and at what the remedy stands on."""
    if not tree.has_module(_MODULE):
        return Verdict(Need.NOT_APPLICABLE, "this release has no TRITON_MLA")
    builder = builder_in_use(tree)
    if builder == TARGET or not tree.has(builder):
        return Verdict(Need.REFUSED, f"{TARGET} names its builder in a way that is not known")
    if any(f"query_len_support{kind} = QueryLenSupport.{level}" in tree.text(builder) for kind, level in _SEVERAL):
        return Verdict(Need.RETIRED, "TRITON_MLA verifies several tokens as decode")
    forward = next((tree.text(target) for target in _FORWARDS if tree.has(target)), "")
    reads = ("decode_attention_fwd(", "attn_metadata.decode.block_table", "attn_metadata.decode.seq_lens")
    if not all(text in forward for text in reads):
        return Verdict(Need.REFUSED, f"{_FORWARDS[0]} no longer reads one extent and one block table a row")
    if not tree.has(_BUILD_DECODE) or tree.parameters(_BUILD_DECODE) != _DECODE_PARAMETERS:
        return Verdict(Need.REFUSED, f"{_BUILD_DECODE} is not the hook that is known")
    if "require_uniform=self.query_len_support != QueryLenSupport.VARLEN" not in tree.text(_BUILD):
        return Verdict(Need.REFUSED, f"{_BUILD} tells decodes from prefills in a way that is not known")
    reserved = f"{builder}._reserve_attn_logits_workspace"
    if tree.has(reserved) and not all(text in tree.text(reserved) for text in _RESERVES):
        return Verdict(Need.REFUSED, f"{reserved} sizes the kernel's scratch memory in a way that is not known")
    return Verdict(Need.APPLY, "TRITON_MLA verifies draft tokens by its prefill path")


def serves_rows(vllm_config: Any, kv_cache_spec: Any) -> bool:
    """Whether a group of layers is one that the remedy is for."""
    parallel = vllm_config.parallel_config
    return (
        vllm_config.speculative_config is not None
        and parallel.decode_context_parallel_size == 1
        and getattr(parallel, "prefill_context_parallel_size", 1) == 1
        and not getattr(kv_cache_spec, "non_causal_multi_token_decode", False)
    )


def graph_rows(vllm_config: Any, tokens: int) -> int:
    """The most rows that a CUDA graph of ``tokens`` query tokens a request may have; 0 without graphs."""
    largest = max(vllm_config.compilation_config.cudagraph_capture_sizes or [0])
    return -(-largest // tokens) * tokens


def most_rows(vllm_config: Any, tokens: int) -> int:
    """How many rows the decode path takes; a larger batch verifies by the prefill path, as in stock vLLM.

    The kernel's scratch memory is proportional to this: heads x splits x (latent + 1) float32 a row, which for a rank
    of Kimi-K2.5 at tensor parallel 8, a context of 262,144 tokens and a GPU of 188 multiprocessors is
    8 x 376 x 513 x 4 bytes, 6 MB. Stock vLLM needs ``max_num_seqs`` rows, and some releases reserve it after they
    measured how much memory is left, so ``k + 1`` times as much might not be there.
    """
    sequences = vllm_config.scheduler_config.max_num_seqs
    return min(sequences * tokens, max(sequences, _LARGEST_DEFAULT_GRAPH, graph_rows(vllm_config, tokens)))


def rows_builder(base: Any) -> Any:
    """A subclass of TRITON_MLA's metadata builder that verifies several tokens a request as decode."""
    import torch
    from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
    from vllm.v1.attention.backend import AttentionCGSupport

    from vllm_kimi_eagle3.fixes._decode_rows import write_decode_rows

    class TritonMLARowsBuilder(base):
        """Rows of decode instead of short prefills; see the module."""

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            """What the base says where its own path is taken, except that it must not promise what it cannot do."""
            if serves_rows(vllm_config, kv_cache_spec):
                return AttentionCGSupport.UNIFORM_BATCH
            said = super().get_cudagraph_support(vllm_config, kv_cache_spec)
            promised = said is AttentionCGSupport.UNIFORM_BATCH
            if promised and not getattr(kv_cache_spec, "non_causal_multi_token_decode", False):
                return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE  # D9
            return said

        def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
            if serves_rows(vllm_config, kv_cache_spec):
                self.query_len_support = QueryLenSupport.VARLEN  # before the base derives the threshold from it
            self._row_buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        @property
        def _as_rows(self) -> bool:
            return self.query_len_support is QueryLenSupport.VARLEN

        def _reserve_attn_logits_workspace(self) -> None:
            super()._reserve_attn_logits_workspace()
            if self._as_rows:
                reserve(self, most_rows(self.vllm_config, self.reorder_batch_threshold))

        def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
            tokens = self.reorder_batch_threshold
            rows, limit = common_attn_metadata.num_actual_tokens, graph_rows(self.vllm_config, tokens)
            if self._as_rows and common_attn_metadata.max_query_len > 1 and rows > limit:
                raise RuntimeError(
                    f"a CUDA graph of {rows} query tokens is to be captured, and TRITON_MLA's buffers hold {limit}:"
                    " its replays would read stale memory; name that size in cudagraph_capture_sizes"
                )
            return super().build_for_cudagraph_capture(common_attn_metadata)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            tokens = self.reorder_batch_threshold
            if not self._as_rows or _decode_rows(common_attn_metadata, tokens) <= most_rows(self.vllm_config, tokens):
                return super().build(common_prefix_len, common_attn_metadata, fast_build)
            self.reorder_batch_threshold = 1
            try:
                return super().build(common_prefix_len, common_attn_metadata, fast_build)
            finally:
                self.reorder_batch_threshold = tokens

        def _build_decode(self, **decode: Any) -> Any:
            start = decode["query_start_loc_cpu"]
            if self._as_rows and int((start[1:] - start[:-1]).max()) > 1:
                lengths, table = decode["seq_lens_device"], decode["block_table_tensor"]
                extents, blocks = self._rows(decode["num_decode_tokens"], lengths, table)
                write_decode_rows(decode["query_start_loc_device"], lengths, table, extents, blocks)
                decode |= {"seq_lens_device": extents, "block_table_tensor": blocks}
            return super()._build_decode(**decode)

        def _rows(self, rows: int, seq_lens: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Where the rows go: the same memory at every step for what a graph may replay, fresh memory otherwise."""
            width = blocks.shape[1]
            held = graph_rows(self.vllm_config, self.reorder_batch_threshold)
            if rows > held:
                return seq_lens.new_empty(rows), blocks.new_empty(rows, width)
            if width not in self._row_buffers:
                with torch.inference_mode(False):  # written in and outside of inference mode
                    self._row_buffers[width] = (
                        torch.zeros(held, dtype=seq_lens.dtype, device=seq_lens.device),
                        torch.zeros(held, width, dtype=blocks.dtype, device=blocks.device),
                    )
            extents, table = self._row_buffers[width]
            return extents[:rows], table[:rows]

    return TritonMLARowsBuilder


def _decode_rows(common_attn_metadata: Any, tokens: int) -> int:
    """Rows of the requests that are short enough for decode; padding included where a graph is replayed."""
    if common_attn_metadata.max_query_len <= tokens:
        return int(common_attn_metadata.num_actual_tokens)
    start = common_attn_metadata.query_start_loc_cpu
    lengths = start[1:] - start[:-1]
    return int(lengths[lengths <= tokens].sum())


def reserve(builder: Any, rows: int) -> None:
    """Grow the shared workspace to what the kernel's forward asks for with that many rows, before it is locked."""
    import torch

    triton_mla: Any = importlib.import_module(_MODULE)  # what it takes the memory with, whatever that imports
    if not triton_mla.is_workspace_manager_initialized():
        return
    units = triton_mla.current_platform.num_compute_units()
    splits = triton_mla._compute_num_kv_splits(builder.model_config.max_model_len, units)
    shape = (rows, builder.num_heads, splits, builder.mla_dims.kv_lora_rank + 1)
    triton_mla.current_workspace_manager().get_simultaneous((shape, torch.float32))


def install(installer: Installer) -> None:
    """Name another builder; whoever asks the backend for one finds it."""
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    builder = rows_builder(TritonMLABackend.get_builder_cls())

    def get_builder_cls() -> Any:
        return builder

    installer.replace(TARGET, staticmethod(get_builder_cls))


def on_cuda_with_triton_mla(context: Context) -> bool:
    """Servers that may run TRITON_MLA on a GPU of NVIDIA's: those that name no other backend."""
    if not context.eagle3 or context.platform != "cuda":
        return False
    attention = getattr(context.vllm_config, "attention_config", None)
    chosen = getattr(attention, "backend", None)
    return chosen is None or getattr(chosen, "name", str(chosen)) == "TRITON_MLA"


FIX = Fix(
    id="D19",
    name="triton-mla-decode",
    targets=(TARGET, *_FORWARDS, _BUILD, _BUILD_DECODE),
    phase=Phase.WORKER,
    why="TRITON_MLA verifies draft tokens by its prefill path, without full CUDA graphs: many times slower",
    upstream="0.31.0 verifies them as decode, row by row in every layer's forward",
    retire="the oldest supported release is 0.31.0",
    probe=probe,
    wanted=on_cuda_with_triton_mla,
    install=install,
)
