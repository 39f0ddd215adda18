# SPDX-License-Identifier: Apache-2.0
"""D19: several query tokens a request as rows of decode, by themselves, in vLLM's builder, and in its own kernels."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import releases
from tests.support import decode_rows
from tests.support.decode_rows import common_metadata, exact, make_batch, make_builder, row_by_row, spec
from vllm_kimi_eagle3.fixes import triton_mla_decode
from vllm_kimi_eagle3.fixes._decode_rows import write_decode_rows
from vllm_kimi_eagle3.fixes.triton_mla_decode import FIX, TARGET, graph_rows, most_rows, rows_builder
from vllm_kimi_eagle3.patching.patcher import Patcher
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Need

SCALE = 0.3
RAGGED = ([4, 1, 6, 2, 3], [4, 17, 33, 64, 47])


def rows_of(start: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, rows: int) -> tuple[Any, Any]:
    extents = torch.full((rows,), -7, dtype=lengths.dtype)
    blocks = torch.full((rows, table.shape[1]), -7, dtype=table.dtype)
    write_decode_rows(start, lengths, table, extents, blocks)
    return extents, blocks


# ---------------------------------------------------------------------------------------------------------------------
# the transformation


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30_000)), min_size=1, max_size=12),
    padding=st.integers(0, 9),
)
def test_rows_are_those_of_a_plain_loop(requests: list[tuple[int, int]], padding: int) -> None:
    query_lens = [new for new, _ in requests]
    seq_lens = [new + before for new, before in requests]
    start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    table = torch.arange(len(requests) * 5, dtype=torch.int32).reshape(-1, 5)
    extents, blocks = rows_of(start, torch.tensor(seq_lens, dtype=torch.int32), table, sum(query_lens) + padding)
    wanted = [
        (length - new + j + 1, request)
        for request, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for j in range(new)
    ]
    wanted += [(min(1, seq_lens[0]), 0)] * padding
    assert extents.tolist() == [extent for extent, _ in wanted]
    assert torch.equal(blocks, table[[request for _, request in wanted]])


@pytest.mark.parametrize("new", range(2, 7))
@pytest.mark.parametrize("block_size", [16, 32])
def test_attention_of_the_rows_is_causal_attention(new: int, block_size: int) -> None:
    lengths = [new, block_size - 1, block_size, block_size + 1, block_size + new - 1, block_size + new, 3 * block_size]
    batch = make_batch([new] * len(lengths), [max(new, n) for n in lengths], padding=new + 1, block_size=block_size)
    rows = batch.rows + batch.padding
    extents, blocks = rows_of(batch.query_start_loc, batch.lengths, batch.block_table, rows)
    found = row_by_row(batch.q, batch.cache, blocks, extents, SCALE, batch.latent)
    torch.testing.assert_close(found[: batch.rows], exact(batch, SCALE), rtol=0, atol=1e-12)
    assert found.isfinite().all(), "a row of padding reached for what nobody owns"


def test_ragged_batches_and_a_mask_one_off() -> None:
    batch = make_batch(*RAGGED, padding=3, padded_requests=2)
    extents, blocks = rows_of(batch.query_start_loc, batch.lengths, batch.block_table, batch.rows + batch.padding)
    right = exact(batch, SCALE)

    def attend(extents: torch.Tensor) -> torch.Tensor:
        return row_by_row(batch.q, batch.cache, blocks, extents, SCALE, batch.latent)[: batch.rows]

    torch.testing.assert_close(attend(extents), right, rtol=0, atol=1e-12)
    one_less = attend((extents - 1).clamp(min=0))
    assert not torch.isclose(one_less, right, atol=1e-6).all(-1).any(), "one position less must change every row"
    # One more: the next draft token, or, in a request's last row, a slot that nobody wrote.
    assert not torch.isclose(attend(extents + 1), right, atol=1e-6).all(-1).any()
    last = batch.lengths.repeat_interleave(batch.query_start_loc.diff()).to(extents)
    no_mask = attend(torch.cat([last, extents[batch.rows :]]))
    wrong = ~torch.isclose(no_mask, right, atol=1e-6).all(-1).all(-1)
    ends = (batch.query_start_loc[1:6] - 1).tolist()
    assert wrong.tolist() == [row not in ends for row in range(batch.rows)]


# ---------------------------------------------------------------------------------------------------------------------
# the installed release's builder


def build(builder: Any, batch: Any) -> Any:
    return builder.build(0, common_metadata(batch))


def attend(batch: Any, metadata: Any) -> torch.Tensor:
    decode = metadata.decode
    rows = metadata.num_decode_tokens
    assert decode.seq_lens.shape == (rows,)
    assert decode.block_table.shape[0] == rows
    return row_by_row(batch.q[:rows], batch.cache, decode.block_table, decode.seq_lens, SCALE, batch.latent)


def test_a_ragged_verify_step_is_all_decode() -> None:
    builder = make_builder(decode_rows.settings(k=5))
    batch = make_batch(*RAGGED, padding=2, padded_requests=1)
    metadata = build(builder, batch)
    assert (metadata.num_decodes, metadata.num_prefills) == (6, 0)
    torch.testing.assert_close(attend(batch, metadata)[: batch.rows], exact(batch, SCALE), rtol=0, atol=1e-12)


def test_the_stock_builder_sends_it_down_the_prefill_path() -> None:
    builder = decode_rows.construct(decode_rows.stock_builder(), decode_rows.settings(k=5), spec())
    metadata = builder.build(0, common_metadata(make_batch([4, 4], [4, 4])))
    assert (metadata.num_decodes, metadata.num_prefills) == (0, 2)


def test_decodes_before_a_prefill() -> None:
    builder = make_builder(decode_rows.settings(k=3))
    batch = make_batch([1, 4, 3, 30], [9, 20, 3, 30])
    metadata = build(builder, batch)
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens) == (3, 1, 8)
    torch.testing.assert_close(attend(batch, metadata), exact(batch, SCALE)[:8], rtol=0, atol=1e-12)


def test_one_token_a_request_keeps_its_tensors() -> None:
    """Draft steps raise ``seq_lens`` in place and build nothing anew."""
    builder = make_builder(decode_rows.settings())
    batch = make_batch([1, 1, 1], [16, 17, 40])
    common = common_metadata(batch)
    metadata = builder.build(0, common)
    assert metadata.decode.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert metadata.decode.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    common.seq_lens += 1
    assert metadata.decode.seq_lens.tolist() == [17, 18, 41]


def test_a_replay_reads_what_the_last_build_wrote() -> None:
    builder = make_builder(decode_rows.settings(max_num_seqs=16))
    width = 9
    captured = builder.build_for_cudagraph_capture(common_metadata(make_batch([4] * 4, [4] * 4, width=width)))
    for seed, lengths in enumerate(([20, 33, 4, 100], [64, 5])):
        batch = make_batch([4] * len(lengths), lengths, padding=16 - 4 * len(lengths), width=width, seed=seed)
        with torch.inference_mode(seed == 0):  # runners build in inference mode, others need not
            build(builder, batch)
        torch.testing.assert_close(attend(batch, captured)[: batch.rows], exact(batch, SCALE), rtol=0, atol=1e-12)
    # A batch that no graph holds must not disturb one that is being replayed.
    before = captured.decode.seq_lens.clone()
    assert build(builder, make_batch([4] * 10, [30] * 10, width=width)).num_decode_tokens == 40
    assert torch.equal(captured.decode.seq_lens, before)


def test_a_graph_that_the_buffers_cannot_hold_is_refused() -> None:
    builder = make_builder(decode_rows.settings(max_num_seqs=64, capture_sizes=(8,)))
    with pytest.raises(RuntimeError, match="12 query tokens is to be captured, and TRITON_MLA's buffers hold 8"):
        builder.build_for_cudagraph_capture(common_metadata(make_batch([4] * 3, [4] * 3)))


def test_too_many_rows_take_the_prefill_path() -> None:
    config = decode_rows.settings(k=1, max_num_seqs=1000)
    assert most_rows(config, 2) == 1000
    builder = make_builder(config)
    within, beyond = ([2] * 500, [2] * 500), ([2] * 501, [2] * 501)
    assert build(builder, make_batch(*within)).num_decodes == 500
    assert build(builder, make_batch(*beyond)).num_decodes == 0
    assert builder.reorder_batch_threshold == 2
    assert build(builder, make_batch(*within)).num_decodes == 500


@pytest.mark.parametrize(
    ("sequences", "sizes", "rows"),
    [
        (8, (1, 2, 4), 32),
        (256, (1, 512), 512),
        (100, (1, 200), 400),
        (1024, (512,), 1024),
        (1024, (2048,), 2048),
        (8, (), 32),
    ],
)
def test_how_many_rows_are_reserved(sequences: int, sizes: tuple[int, ...], rows: int) -> None:
    config = decode_rows.settings(max_num_seqs=sequences, capture_sizes=sizes)
    assert most_rows(config, 4) == rows
    assert graph_rows(decode_rows.settings(capture_sizes=(6, 10)), 4) == 12


@pytest.mark.parametrize(
    ("config", "group"),
    [
        pytest.param({"dcp": 2}, {}, id="decode context parallelism"),
        pytest.param({"pcp": 2}, {}, id="prefill context parallelism"),
        pytest.param({"k": None}, {}, id="no speculation"),
        pytest.param({}, {"non_causal": True}, id="non-causal blocks"),
    ],
)
def test_what_is_left_as_it_is(config: dict[str, Any], group: dict[str, Any]) -> None:
    made, stock = decode_rows.settings(**config), decode_rows.stock_builder()
    builder = rows_builder(stock)
    assert builder.get_cudagraph_support(made, spec(**group)).value <= 1 or group, "only what the base may promise"
    mended, bare = (decode_rows.construct(cls, made, spec(**group)) for cls in (builder, stock))
    assert mended.reorder_batch_threshold == bare.reorder_batch_threshold
    assert mended.query_len_support is bare.query_len_support


def test_what_graphs_are_promised() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    class Promises(decode_rows.stock_builder()):
        _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH  # as 0.22.0 to 0.25.1 have it

    class Never(decode_rows.stock_builder()):
        _cudagraph_support = AttentionCGSupport.NEVER

    for base in (Promises, Never):
        assert rows_builder(base).get_cudagraph_support(decode_rows.settings(), spec()).name == "UNIFORM_BATCH"
    parallel = decode_rows.settings(dcp=2)
    assert rows_builder(Promises).get_cudagraph_support(parallel, spec()).name == "UNIFORM_SINGLE_TOKEN_DECODE"
    assert rows_builder(Never).get_cudagraph_support(parallel, spec()).name == "NEVER"
    assert rows_builder(Promises).get_cudagraph_support(parallel, spec(non_causal=True)).name == "UNIFORM_BATCH"


def test_the_backend_names_it_and_forgets_it_again() -> None:
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    patcher, stock = Patcher(), TritonMLABackend.get_builder_cls()
    triton_mla_decode.install(patcher.for_fix(FIX.label))
    mended = TritonMLABackend.get_builder_cls()
    assert issubclass(mended, stock) and mended is not stock and TritonMLABackend.get_builder_cls() is mended
    assert patcher.patched() == [TARGET] and patcher.revert() == []
    assert TritonMLABackend.get_builder_cls() is stock


@pytest.mark.parametrize(
    ("platform", "eagle3", "backend", "wanted"),
    [
        ("cuda", True, None, True),
        ("cuda", True, "TRITON_MLA", True),
        ("cuda", True, "FLASHMLA", False),
        ("cuda", False, None, False),
        ("cpu", True, None, False),
        ("rocm", True, None, False),
    ],
)
def test_which_servers_get_it(platform: str, eagle3: bool, backend: str | None, wanted: bool) -> None:
    chosen = None if backend is None else SimpleNamespace(name=backend)
    config = SimpleNamespace(attention_config=SimpleNamespace(backend=chosen))
    assert FIX.wanted(Context("DeepseekV3ForCausalLM", platform, eagle3, config)) is wanted
    if backend is None:
        assert FIX.wanted(Context("DeepseekV3ForCausalLM", platform, eagle3)) is wanted


@pytest.mark.parametrize(
    ("path", "old", "new", "need"),
    [
        ("backend", "", "", Need.APPLY),
        ("backend", "        return TritonMLAMetadataBuilder", "        return choose()", Need.REFUSED),
        ("backend", "attn_metadata.decode.seq_lens,", "attn_metadata.decode.lengths,", Need.REFUSED),
        ("backend", "            self.model_config.max_model_len,", "            self.longest,", Need.REFUSED),
        ("backend", "class TritonMLAMetadataBuilder(", "class Other(", Need.REFUSED),
        ("common", "        num_decode_tokens: int,\n        dcp", "        dcp", Need.REFUSED),
        ("common", "self.query_len_support != QueryLenSupport.VARLEN)", "True)", Need.REFUSED),
        (
            "backend",
            "    _cudagraph_support: ClassVar",
            "    query_len_support = QueryLenSupport.UNIFORM\n    _cudagraph_support: ClassVar",
            Need.RETIRED,
        ),
    ],
)
def test_the_probe_knows_the_shape(tmp_path: Path, path: str, old: str, new: str, need: Need) -> None:
    files = {
        "backend": "v1/attention/backends/mla/triton_mla.py",
        "common": "model_executor/layers/attention/mla_attention.py",
    }
    for name, file in files.items():
        releases.altered(tmp_path, "0.26.0", file, *((old, new) if name == path else ()))
    assert triton_mla_decode.probe(SourceTree(tmp_path)).need is need


# ---------------------------------------------------------------------------------------------------------------------
# the releases' own kernels, run by Triton's interpreter

KERNELS = ("0.15.0", "0.18.0", "0.20.2", "0.22.0", "0.24.0", "0.30.0")
"""One release for each text that the kernels have had up to 0.30."""


def test_the_kernels_read_rows_as_we_write_them() -> None:
    job = [sys.executable, "-m", "tests.fixes.test_triton_mla_decode", *KERNELS]
    done = subprocess.run(job, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-len(KERNELS) :] == [f"{release} is right" for release in KERNELS]


def run_kernels(release: str) -> None:
    """Ragged rows and padding through ``decode_attention_fwd`` of a release; TRITON_INTERPRET is set."""
    import triton
    import triton.language as tl
    import vllm.triton_utils

    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl  # on a CPU vLLM holds its own off
    path = releases.tree(release) / "vllm/v1/attention/ops/triton_decode_attention.py"
    found = importlib.util.spec_from_file_location("kernels", path)
    assert found is not None and found.loader is not None
    kernels = importlib.util.module_from_spec(found)
    found.loader.exec_module(kernels)
    batch = make_batch(*RAGGED, padding=3, padded_requests=1, heads=3, latent=256, rope=32, dtype=torch.float32)
    rows = batch.rows + batch.padding
    extents, blocks = rows_of(batch.query_start_loc, batch.lengths, batch.block_table, rows)
    scale = 0.02  # weights of one size, so that each position counts
    forward, cache = kernels.decode_attention_fwd, batch.cache.unsqueeze(2)
    extra = {"is_mla": True} if "is_mla" in inspect.signature(forward).parameters else {}

    def attend(extents: torch.Tensor) -> torch.Tensor:
        out, lse = torch.zeros(rows, 3, 256), torch.zeros(rows, 3)
        scratch = torch.full((rows, 3, 4, 257), float("nan"))
        forward(batch.q, cache, cache[..., :256], out, lse, blocks, extents, scratch, 4, scale, 16, **extra)
        return out

    out, right = attend(extents), exact(batch, scale).float()
    torch.testing.assert_close(out[: batch.rows], right, rtol=1e-5, atol=1e-5)
    assert out.isfinite().all(), "padding"
    print(f"{release} is right")
    if release != KERNELS[-1]:
        return
    assert not torch.isclose(attend((extents - 1).clamp(min=0))[: batch.rows], right, atol=1e-4).all(-1).any()
    assert attend(torch.zeros_like(extents)).isnan().all(), "an extent of 0 is NaN: why padding has 1"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run_kernels(name)
