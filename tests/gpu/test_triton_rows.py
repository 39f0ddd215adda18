# SPDX-License-Identifier: Apache-2.0
"""D19 on a GPU: the installed release's own ``forward`` and Triton kernels over the rows that the overlay writes.

Needs one CUDA device, torch, a vLLM that has the defect (0.15.0 to 0.30) and pytest, nothing else:

    python -m pytest --noconftest -rs tests/gpu

CI has no GPU and says that these are skipped. Errors are measured, not chosen: what the kernel computes may be off by
twice what plain torch is off in the same dtype, with the same numbers, and by one rounding.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import decode_rows
from tests.support.decode_rows import Batch, common_metadata, exact, make_batch, make_builder, row_by_row

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="no CUDA device: run `python -m pytest --noconftest tests/gpu` on a GPU"),
]

HEADS, LATENT, ROPE = 16, 512, 64
SCALE = 1 / math.sqrt(192)
CONTEXTS = (1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 4_095, 8_192, 30_000)
"""Around the ends of blocks of 16 and 64 tokens, and of the kernel's splits."""
LONGEST = 30_720
DTYPES = [torch.bfloat16, torch.float16]


@functools.cache
def layer(k_scale: float) -> SimpleNamespace:
    """Made before a graph is captured: a copy from the host cannot be."""
    return SimpleNamespace(_k_scale=torch.tensor(k_scale, device=DEVICE))


def forward(batch: Batch, metadata: Any, cache: torch.Tensor | None = None, k_scale: float = 1.0) -> torch.Tensor:
    """The release's own decode forward, given what it reads of the layer: ``[rows, heads, latent]``."""
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

    impl = SimpleNamespace(
        kv_lora_rank=LATENT,
        scale=SCALE,
        kv_cache_dtype="auto",
        dcp_world_size=1,
        _sm_count=torch.cuda.get_device_properties(0).multi_processor_count,
    )
    own = getattr(TritonMLAImpl, "forward_mqa", None) or TritonMLAImpl._forward_decode  # 0.15 has the older name
    return own(impl, batch.q, batch.cache if cache is None else cache, metadata, layer(k_scale))[0]


def same_dtype(batch: Batch, metadata: Any) -> torch.Tensor:
    """Plain torch in the batch's dtype, row by row."""
    decode = metadata.decode
    return row_by_row(batch.q, batch.cache, decode.block_table, decode.seq_lens, SCALE, LATENT)


def excess(batch: Batch, found: torch.Tensor, plain: torch.Tensor, right: torch.Tensor) -> list[float]:
    """For each request, the largest error as a part of what is allowed: at most 1 is right."""
    parts = []
    requests = (x[: batch.rows].cpu().split(batch.query_lens) for x in (found, plain, right))
    for own, reference, true in zip(*requests, strict=True):
        rounding = torch.finfo(reference.dtype).eps * true.abs().max()
        allowed = 2 * (reference.double() - true).abs().max() + rounding
        parts.append(float((own.double() - true).abs().max() / allowed))
    return parts


def long_batch(new: int | list[int], dtype: torch.dtype, block_size: int, padding: int = 0, **more: Any) -> Batch:
    query_lens = [new] * len(CONTEXTS) if isinstance(new, int) else new
    seq_lens = [before + added - 1 for before, added in zip(CONTEXTS, query_lens, strict=True)]
    shape = {"heads": HEADS, "latent": LATENT, "rope": ROPE, "block_size": block_size, "dtype": dtype}
    return make_batch(query_lens, seq_lens, padding=padding, device=DEVICE, **shape, **more)


def builder(k: int, dtype: torch.dtype, block_size: int, **more: Any) -> Any:
    shape = {"heads": HEADS, "latent": LATENT, "rope": ROPE, "max_model_len": LONGEST, "dtype": dtype}
    config = decode_rows.settings(k=k, max_num_seqs=more.pop("max_num_seqs", 32), **shape, **more)
    return make_builder(config, decode_rows.spec(block_size=block_size), DEVICE)


def one_position_less(metadata: Any) -> Any:
    decode = metadata.decode
    less = SimpleNamespace(block_table=decode.block_table, seq_lens=(decode.seq_lens - 1).clamp(min=1))
    return SimpleNamespace(decode=less, **{k: v for k, v in vars(metadata).items() if k != "decode"})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("new", range(2, 7))
def test_uniform_blocks(new: int, block_size: int, dtype: torch.dtype) -> None:
    batch = long_batch(new, dtype, block_size, seed=new)
    metadata = builder(new - 1, dtype, block_size).build(0, common_metadata(batch))
    assert (metadata.num_decodes, metadata.num_prefills) == (len(CONTEXTS), 0)
    right, plain = exact(batch, SCALE), same_dtype(batch, metadata)
    parts = excess(batch, forward(batch, metadata), plain, right)
    assert max(parts) <= 1, parts
    # A mask that is one position off shows in short contexts, where each position counts for more than a rounding.
    wrong = excess(batch, forward(batch, one_position_less(metadata)), plain, right)
    assert min(wrong[:7]) > 1, wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_blocks_and_padding(dtype: torch.dtype) -> None:
    batch = long_batch([6, 1, 3, 2, 5, 4, 1, 6, 2, 1, 3, 5, 4], dtype, 16, padding=21, padded_requests=3)
    metadata = builder(5, dtype, 16).build(0, common_metadata(batch))
    found = forward(batch, metadata)
    parts = excess(batch, found, same_dtype(batch, metadata), exact(batch, SCALE))
    assert max(parts) <= 1, parts
    assert found.isfinite().all(), "a row of padding is not a number"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_fp8_cache(dtype: torch.dtype) -> None:
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    if "fp8" not in TritonMLABackend.supported_kv_cache_dtypes:
        pytest.skip("TRITON_MLA of this release takes no fp8 cache")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    batch, k_scale = long_batch([4] * len(CONTEXTS), dtype, 16), 0.05

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return (x.float() / k_scale).to(torch.float8_e4m3fn)

    cache = rounded(batch.cache)
    # The kernel multiplies in float32 and rounds to the queries' dtype, and so do both references.
    batch.cache = (cache.float() * k_scale).to(dtype)
    batch.keys = [(rounded(keys).float() * k_scale).to(dtype) for keys in batch.keys]
    metadata = builder(3, dtype, 16).build(0, common_metadata(batch))
    parts = excess(batch, forward(batch, metadata, cache, k_scale), same_dtype(batch, metadata), exact(batch, SCALE))
    assert max(parts) <= 1, parts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_is_replayed_with_other_lengths(dtype: torch.dtype) -> None:
    requests, width, blocks = 8, LONGEST // 16, 1 + 8 * LONGEST // 16
    made = builder(3, dtype, 16, capture_sizes=(4, 32), max_num_seqs=requests)
    shape = {"heads": HEADS, "latent": LATENT, "rope": ROPE, "width": width, "dtype": dtype, "device": DEVICE}
    held = make_batch([4] * requests, [4] * requests, **shape)
    held.cache = torch.zeros(blocks, 16, LATENT + ROPE, dtype=dtype, device=DEVICE)
    common = common_metadata(held)
    common.max_seq_len = LONGEST  # the number of splits is fixed with the graph
    captured = made.build_for_cudagraph_capture(common)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward(held, captured)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(held, captured)

    batches = [[4, 20, 33, 1_000], [30_000, 5, 64, 65, 511, 512, 513, 29_999], [17]]
    for seed, lengths in enumerate(batches):
        missing = requests - len(lengths)
        batch = make_batch(
            [4] * len(lengths), lengths, padding=4 * missing, padded_requests=missing, seed=seed, **shape
        )
        held.q.copy_(batch.q)
        held.cache[: len(batch.cache)].copy_(batch.cache)
        if seed:  # without a new build, the graph still reads the last batch's rows
            graph.replay()
            stale = out[: batch.rows].clone()
            assert not torch.allclose(stale.cpu().double(), exact(batch, SCALE), atol=1e-2), "the control sees nothing"
        common = common_metadata(batch)
        common.max_seq_len = LONGEST
        torch.cuda.set_sync_debug_mode("error")
        try:
            metadata = made.build(0, common)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        torch.cuda.synchronize()
        parts = excess(batch, out, same_dtype(batch, metadata), exact(batch, SCALE))
        assert max(parts) <= 1, (lengths, parts)
        assert out.isfinite().all(), "a row of padding is not a number"


def test_the_workspace_is_large_enough_when_it_is_locked() -> None:
    from vllm.v1.attention.backends.mla import triton_mla

    if not hasattr(triton_mla, "current_workspace_manager"):
        pytest.skip("the kernel's scratch memory is not taken from a workspace in this release")
    from vllm.v1.worker import workspace

    config = decode_rows.settings(
        k=3, max_num_seqs=8, capture_sizes=(32,), heads=HEADS, latent=LATENT, rope=ROPE, max_model_len=LONGEST
    )
    batch = make_batch([4] * 8, [40] * 8, heads=HEADS, latent=LATENT, rope=ROPE, dtype=torch.bfloat16, device=DEVICE)
    common = common_metadata(batch)
    common.max_seq_len = LONGEST
    for cls, enough in ((decode_rows.rows_builder(decode_rows.stock_builder()), True), (None, False)):
        workspace.init_workspace_manager(torch.device(DEVICE))
        try:
            if cls is None:  # what stock vLLM reserves is too small for the rows
                decode_rows.construct(decode_rows.stock_builder(), config, decode_rows.spec(), DEVICE)
            else:
                made = decode_rows.construct(cls, config, decode_rows.spec(), DEVICE)
            workspace.lock_workspace()
            metadata = made.build(0, common)  # pyright: ignore[reportPossiblyUnbound]
            if enough:
                assert forward(batch, metadata).isfinite().all()
            else:
                with pytest.raises(AssertionError, match="locked"):
                    forward(batch, metadata)
        finally:
            workspace.reset_workspace_manager()
