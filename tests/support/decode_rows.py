# SPDX-License-Identifier: Apache-2.0
"""Batches of verify steps over a paged MLA cache, their exact attention, and the installed release's own builder.

Every slot of the cache that no request owns is NaN, and so are the blocks that unused entries of the block table name:
a row that reads one position too many is seen, whatever the numbers.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from vllm_kimi_eagle3.fixes.triton_mla_decode import rows_builder


@dataclasses.dataclass
class Batch:
    """``requests`` of ``query_lens`` new tokens, ``seq_lens`` with these; padded at the end like a graph's batch."""

    query_lens: list[int]
    seq_lens: list[int]
    padding: int
    query_start_loc: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    q: torch.Tensor
    """``[rows + padding, heads, latent + rope]``"""
    cache: torch.Tensor
    """``[blocks, block size, latent + rope]``; the first ``latent`` numbers are the value too."""
    keys: list[torch.Tensor]
    """Each request's keys in order, ``[seq_len, latent + rope]``: the cache without its pages."""
    latent: int

    @property
    def rows(self) -> int:
        """Real query tokens."""
        return sum(self.query_lens)


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    padding: int = 0,
    padded_requests: int = 0,
    block_size: int = 16,
    width: int | None = None,
    heads: int = 2,
    latent: int = 8,
    rope: int = 4,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """A batch with random numbers and scattered blocks; block 0 belongs to nobody, as in vLLM."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in seq_lens]
    owned = (torch.randperm(sum(needed), generator=generator) + 1).split(needed)
    table = torch.zeros(len(seq_lens) + padded_requests, width or max(needed) + 1, dtype=torch.int32)
    cache = torch.full((sum(needed) + 1, block_size, latent + rope), float("nan"), dtype=dtype)
    keys: list[torch.Tensor] = []
    for request, (length, blocks) in enumerate(zip(seq_lens, owned, strict=True)):
        table[request, : len(blocks)] = blocks
        own = torch.randn(length, latent + rope, generator=generator, dtype=torch.float32).to(dtype)
        keys.append(own)
        positions = torch.arange(length)
        cache[blocks[positions // block_size], positions % block_size] = own
    rows = sum(query_lens) + padding
    q = torch.randn(rows, heads, latent + rope, generator=generator, dtype=torch.float32).to(dtype)
    start = torch.tensor([0, *query_lens, *[0] * padded_requests]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([*seq_lens, *[0] * padded_requests], dtype=torch.int32)
    tensors = [tensor.to(device) for tensor in (start, lengths, table, q, cache)]
    return Batch(query_lens, seq_lens, padding, *tensors, keys, latent)


def exact(batch: Batch, scale: float, later: int = 0) -> torch.Tensor:
    """Causal attention of each request over its own keys, in float64: ``[rows, heads, latent]``.

    ``later`` shifts the mask, for a negative control.
    """
    found, q = [], batch.q.cpu().double().split([*batch.query_lens, batch.padding])
    for request, keys in enumerate(batch.keys):
        length, new = batch.seq_lens[request], batch.query_lens[request]
        scores = torch.einsum("nhd,sd->hns", q[request], keys.double()) * scale
        sees = torch.arange(length) <= torch.arange(length - new, length)[:, None] + later
        weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        found.append(torch.einsum("hns,sd->nhd", weights, keys.double()[:, : batch.latent]))
    return torch.cat(found)


def row_by_row(
    q: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor, extents: torch.Tensor, scale: float, latent: int
) -> torch.Tensor:
    """What a decode kernel does, in ``q``'s type: each row over ``extents`` positions of its own block table."""
    found = torch.full((*q.shape[:2], latent), float("nan"), dtype=q.dtype, device=q.device)
    for row, extent in enumerate(extents.tolist()):
        positions = torch.arange(extent, device=q.device)
        keys = cache[blocks[row].long()[positions // cache.shape[1]], positions % cache.shape[1]]
        if extent:
            found[row] = ((q[row] @ keys.T) * scale).softmax(-1) @ keys[:, :latent]
    return found


def common_metadata(batch: Batch, *, width: int | None = None) -> Any:
    """vLLM's own description of the batch, with the fields that this release has."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    table = batch.block_table if width is None else batch.block_table[:, :width]
    start = batch.query_start_loc.cpu()
    values = {
        "query_start_loc": batch.query_start_loc,
        "query_start_loc_cpu": start,
        "seq_lens": batch.lengths,
        "seq_lens_cpu_upper_bound": batch.lengths.cpu(),
        "_seq_lens_cpu": batch.lengths.cpu(),
        "num_reqs": len(start) - 1,
        "num_actual_tokens": batch.rows + batch.padding,
        "max_query_len": max(batch.query_lens),
        "max_seq_len": max(batch.seq_lens),
        "block_table_tensor": table,
        "slot_mapping": torch.zeros(batch.rows + batch.padding, dtype=torch.int64, device=table.device),
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{name: value for name, value in values.items() if name in known})


def settings(
    *,
    k: int | None = 3,
    max_num_seqs: int = 8,
    capture_sizes: tuple[int, ...] = (8, 16, 32),
    heads: int = 2,
    latent: int = 8,
    rope: int = 4,
    max_model_len: int = 512,
    dtype: torch.dtype = torch.float32,
    dcp: int = 1,
    pcp: int = 1,
) -> Any:
    """What the metadata builders read of a configuration, as data."""
    dims = {
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": latent,
        "qk_rope_head_dim": rope,
        "v_head_dim": latent,
    }
    prefill = SimpleNamespace(prepare_metadata=lambda metadata: None)
    prefill.clone = lambda: prefill
    layer = SimpleNamespace(prefill_backend=prefill, **dims)
    speculative = None if k is None else SimpleNamespace(num_speculative_tokens=k, parallel_drafting=False)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=dtype,
            max_model_len=max_model_len,
            get_head_size=lambda: 576,  # one that vLLM knows; sizes the prefill's workspace
            get_num_attention_heads=lambda parallel: heads,
            hf_text_config=SimpleNamespace(**dims),
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp, cp_kv_cache_interleave_size=1
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": layer}, cudagraph_capture_sizes=list(capture_sizes)
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        attention_config=SimpleNamespace(
            use_prefill_query_quantization=False,
            use_trtllm_ragged_deepseek_prefill=False,
            disable_flashinfer_prefill=True,
            use_cudnn_prefill=False,
        ),
        speculative_config=speculative,
    )


def spec(non_causal: bool = False, block_size: int = 16) -> Any:
    """What they read of a group of layers."""
    return SimpleNamespace(block_size=block_size, num_kv_heads=1, non_causal_multi_token_decode=non_causal)


def stock_builder() -> Any:
    """The builder that the remedy is laid over: TRITON_MLA's own while that takes single tokens, else the common one.

    From 0.31 on TRITON_MLA needs no remedy; what lies below it is still what it was, so that the newest release's
    splitting of batches is tried here too.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder, QueryLenSupport
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    own = TritonMLABackend.get_builder_cls()
    return own if own.query_len_support is QueryLenSupport.SINGLE_ONLY else MLACommonMetadataBuilder


def construct(cls: Any, config: Any, group: Any, device: str = "cpu") -> Any:
    """A builder as a runner makes it."""
    from vllm.config import vllm as current

    before = current._current_vllm_config
    current._current_vllm_config = config  # older releases look there for the kind of prefill
    try:
        return cls(group, ["layer"], config, torch.device(device))
    finally:
        current._current_vllm_config = before


def make_builder(config: Any, group: Any = None, device: str = "cpu") -> Any:
    """The mended builder of the installed release."""
    return construct(rows_builder(stock_builder()), config, group or spec(), device)
