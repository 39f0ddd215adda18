# SPDX-License-Identifier: Apache-2.0
"""What the patched functions do, taken from the patched source of a release, against what the overlay does.

No vLLM is imported: the functions are compiled from the text that the series leaves, with holders of the attributes
that they read. Where the pristine text gives an answer too, it is the negative control.
"""

from __future__ import annotations

import ast
import copy
import enum
import functools
import hashlib
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixes import dispatchers
from tests.fixes.lengths import LONGEST, YARN, runner, server
from tests.layers import corpus
from tests.patches.trees import ENDS, texts, touched
from tests.releases import build, definition, tree
from tests.support import sharded_decoder
from tests.support.sharded_decoder import loop_names
from vllm_kimi_eagle3.fixes import (
    cpu_draft_step_kernel,
    cpu_sampling_expansion,
    draft_attention_backend,
    draft_limit,
    drafter_positions,
    float16_stream,
    mtp_rewrite,
    triton_mla_decode,
    use_aux_flag,
)
from vllm_kimi_eagle3.layers.parse import TOP_KEY
from vllm_kimi_eagle3.source_patches import series

RULE = "VLLM_KIMI_EAGLE3_LAYER_RULE"
V1 = "vllm/v1/worker/gpu_model_runner.py"
V2 = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
CONFIG = "vllm/config/speculative.py"
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
MLA = [release for release in ENDS if series.number(release) >= (0, 18, 0)]
CHUNKS = [release for release in ENDS if series.number(release) >= (0, 19, 0)]
OLD = [release for release in ENDS if series.number(release) < (0, 18, 0)]


@functools.cache
def patched(release: str) -> dict[str, str]:
    patches = series.for_release(release)
    files = texts(tree(release), touched(patches))
    for patch in patches.patches:
        for change in patch.changes:
            files[change.path] = change.apply(files[change.path])
    return files


@functools.cache
def node(release: str, path: str, name: str, owner: str | None = None, stock: bool = False) -> Any:
    text = (
        (tree(release) / path).read_text("utf-8") if stock or path not in patched(release) else patched(release)[path]
    )
    body = ast.parse(text).body
    if owner is not None:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == owner).body
    return next(n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)


def function(release: str, path: str, name: str, owner: str | None = None, stock: bool = False, **names: Any) -> Any:
    return build(release, path, node(release, path, name, owner, stock), names)


# ---------------------------------------------------------------------------------------------------------------------
# D6, D7, D8


def spec_config(release: str, drafter: dict[str, Any], stock: bool = False) -> SimpleNamespace:
    config = SimpleNamespace(
        method="eagle3",
        draft_model_config=SimpleNamespace(
            hf_config=SimpleNamespace(**copy.deepcopy(drafter)), compute_hash=lambda: ""
        ),
    )
    if not stock:
        method = function(release, CONFIG, "eagle3_layer_rule", "SpeculativeConfig")
        config.eagle3_layer_rule = functools.partial(method, config)
    return config


def read(release: str, drafter: dict[str, Any], stock: bool = False) -> list[tuple[int, ...] | None]:
    """What both runners' readers take."""
    config = spec_config(release, drafter, stock)
    v1 = function(release, V1, "_get_eagle3_aux_layers_from_config", "GPUModelRunner", stock)
    found = [v1(SimpleNamespace(speculative_config=config))]
    if (tree(release) / V2).is_file():
        found.append(function(release, V2, "get_eagle3_aux_layers_from_config", None, stock)(config))
    return found


PLANNED = [
    name
    for name in corpus.DRAFTERS
    if (corpus.expected(name).get("ids_key") or "").endswith(TOP_KEY)
    and corpus.expected(name).get("boundaries")
    and "speculators_config" not in corpus.drafter(name)
]


def test_the_corpus_has_both_kinds() -> None:
    keys = {corpus.expected(name)["ids_key"] for name in PLANNED}
    assert len(PLANNED) >= 10 and keys >= {TOP_KEY, f"eagle_config.{TOP_KEY}"}


@pytest.mark.parametrize("release", ENDS)
def test_both_readers_take_the_plans_boundaries(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    different = 0
    for name in PLANNED:
        expected = corpus.expected(name)
        monkeypatch.setenv(RULE, expected["rule"])
        taken = read(release, corpus.drafter(name))
        assert all(sorted(ids or ()) == expected["boundaries"] for ids in taken), (name, taken)
        stock = read(release, corpus.drafter(name), stock=True)
        different += any(sorted(ids or ()) != expected["boundaries"] for ids in stock)
    assert different


@pytest.mark.parametrize("release", ENDS)
def test_rules(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RULE, raising=False)
    nested = {"eagle_config": {TOP_KEY: [1, 3, 4]}}
    says_output = {"eagle_config": {TOP_KEY: [1, 3, 4], "layer_rule": "output"}}
    assert set(read(release, nested)) == {(1, 3, 4)}
    assert set(read(release, says_output)) == {(2, 4, 5)}
    assert set(read(release, {**says_output, TOP_KEY: [7, 8, 9]})) == {(7, 8, 9)}, "top-level ids are boundaries"
    assert set(read(release, {})) == set(read(release, {"eagle_config": None})) == {None}
    monkeypatch.setenv(RULE, "output")
    assert set(read(release, nested)) == {(2, 4, 5)}
    assert set(read(release, {TOP_KEY: [7, 8, 9]})) == {(7, 8, 9)}, "what the overlay writes is not shifted again"
    monkeypatch.setenv(RULE, "boundary")
    assert set(read(release, says_output)) == {(1, 3, 4)}, "the environment goes first"
    monkeypatch.setenv(RULE, "sideways")
    with pytest.raises(ValueError, match="sideways"):
        read(release, nested)


@pytest.mark.parametrize("release", ENDS)
def test_the_cache_key_covers_them(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RULE, raising=False)

    def key(drafter: dict[str, Any], stock: bool = False) -> str:
        names = {"safe_hash": lambda data, usedforsecurity: hashlib.md5(data, usedforsecurity=False)}
        compute = function(release, CONFIG, "compute_hash", "SpeculativeConfig", stock, **names)
        config = spec_config(release, drafter)
        config.enable_adaptive_verification = False
        return compute(config)

    drafters = [{}, {TOP_KEY: [1]}, {TOP_KEY: [2]}]
    drafters += [{"eagle_config": {TOP_KEY: [n]}} for n in (1, 2)]
    drafters += [{"eagle_config": {TOP_KEY: [1], "layer_rule": "output"}}]
    keys = [key(drafter) for drafter in drafters]
    monkeypatch.setenv(RULE, "output")
    keys.append(key({}))
    assert len(set(keys)) == len(keys)
    assert len({key(drafter, stock=True) for drafter in drafters}) < len(drafters)


# ---------------------------------------------------------------------------------------------------------------------
# D15, D18, D22, D13


@pytest.mark.parametrize("release", ENDS)
@pytest.mark.parametrize("forced", [None, "TRITON_MLA"])
@pytest.mark.parametrize("chosen", [None, "FLASH_ATTN"])
@pytest.mark.parametrize("mla", [(True, False), (True, True), (False, False)])
def test_the_drafters_backend(release: str, forced: Any, chosen: Any, mla: tuple[bool, bool]) -> None:
    spec = SimpleNamespace(
        attention_backend=chosen,
        target_model_config=SimpleNamespace(use_mla=mla[0]),
        draft_model_config=SimpleNamespace(use_mla=mla[1]),
    )
    config = SimpleNamespace(attention_config=SimpleNamespace(backend=forced), speculative_config=spec)
    built = function(release, CONFIG, "with_draft_attention_backend", "SpeculativeConfig")(spec, config)
    assert config.attention_config.backend == forced, "the target's own configuration stays"
    with draft_attention_backend.own_backend(config):
        assert built.attention_config.backend == config.attention_config.backend


@pytest.mark.parametrize("release", MLA)
def test_drafters_are_no_mtp_heads(release: str) -> None:
    class Config(SimpleNamespace):
        def update(self, values: dict[str, Any]) -> None:
            vars(self).update(values)

    def override(stock: bool, **values: Any) -> Config:
        config = Config(model_type="deepseek_v3", num_nextn_predict_layers=1, **values)
        function(release, CONFIG, "hf_config_override", "SpeculativeConfig", stock)(config)
        return config

    drafters = [
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["Other"], "eagle_config": {}},
        {"architectures": ["Other"], TOP_KEY: [1]},
    ]
    for drafter in drafters:
        assert mtp_rewrite.is_eagle3_drafter(SimpleNamespace(**drafter))
        assert override(False, **drafter).model_type == "deepseek_v3"
        assert override(True, **drafter).model_type == "deepseek_mtp"
    head = {"architectures": ["DeepseekV3ForCausalLM"]}
    assert not mtp_rewrite.is_eagle3_drafter(SimpleNamespace(**head))
    assert vars(override(False, **head)) == vars(override(True, **head))


@pytest.mark.parametrize("release", CHUNKS)
def test_the_token_behind_each_chunk(release: str) -> None:
    numpy = pytest.importorskip("numpy")
    path = next(
        path
        for path in ("vllm/v1/spec_decode/llm_base_proposer.py", "vllm/v1/spec_decode/eagle.py")
        if path in patched(release) and "def prepare_next_token_ids_padded" in patched(release)[path]
    )

    def tokens(stock: bool) -> list[int]:
        method = copy.deepcopy(node(release, path, "prepare_next_token_ids_padded", "SpecDecodeBaseProposer", stock))
        # Only the lookup, which stands before the copy to the device.
        end = next(i for i, s in enumerate(method.body) if "copy_to_gpu" in ast.unparse(s))
        method.body = method.body[:end]
        looked_up = numpy.zeros(3, dtype=numpy.int32)
        batch = SimpleNamespace(
            num_reqs=3, req_ids=["a", "b", "c"], num_tokens_no_spec=numpy.array([10, 20, 5]), chunk_ends={1: 8}
        )
        requests = {name: SimpleNamespace(get_token_id=lambda index: index) for name in batch.req_ids}
        proposer = SimpleNamespace(backup_next_token_ids=SimpleNamespace(np=looked_up))
        arguments = {"sampled_token_ids": None, "requests": requests, "gpu_input_batch": batch}
        build(release, path, method, {"np": numpy})(proposer, discard_request_mask=None, **arguments)
        return looked_up.tolist()

    assert tokens(stock=False) == [9, 8, 4]
    assert tokens(stock=True) == [9, 19, 4]


@pytest.mark.parametrize("release", CHUNKS)
def test_the_runner_notes_where_chunks_end(release: str) -> None:
    """A request of 20 tokens of which 3 are computed and 5 scheduled: the next token has index 8."""
    numpy = pytest.importorskip("numpy")
    body = node(release, V1, "_prepare_inputs", "GPUModelRunner").body
    noted = [s for s in body if ast.unparse(s).startswith(("partial = ", "self.input_batch.chunk_ends = "))]
    assert len(noted) == 2
    runner = SimpleNamespace(
        discard_request_mask=SimpleNamespace(np=numpy.array([False, True, False, True])),
        optimistic_seq_lens_cpu=numpy.array([10, 3 + 5, 5, 99]),
        input_batch=SimpleNamespace(),
    )
    exec(compile(ast.Module(noted, []), V1, "exec"), {"self": runner, "num_reqs": 3})
    assert runner.input_batch.chunk_ends == {1: 8}


def ran(release: str, path: str, method: str, owner: str, beginnings: tuple[str, ...], **names: Any) -> None:
    """Run those statements of a patched method that begin so, wherever they stand in it."""
    found = [
        s
        for s in ast.walk(node(release, path, method, owner))
        if isinstance(s, ast.stmt) and ast.unparse(s).startswith(beginnings)
    ]
    assert len(found) == len(beginnings)
    exec(compile(ast.Module(sorted(found, key=lambda s: s.lineno), []), path, "exec"), names)


@pytest.mark.parametrize("release", ENDS)
def test_one_long_request_takes_the_drafter_from_nobody(release: str) -> None:
    """D24: as the overlay lifts the rule, for drafters that reach far enough or not, and for other servers."""
    lines = ("spec_config = self.spec", "drafter = getattr(self", "if spec_config is not None and")
    for rows in ((), (LONGEST,), (LONGEST, LONGEST - 1)):
        for given in ({}, {"method": "eagle"}, {"max_model_len": 72}):
            ours, theirs = runner(*rows, limit=72, **given), runner(*rows, limit=72, **given)
            draft_limit.lift(ours)
            ran(release, V1, "initialize_kv_cache", "GPUModelRunner", lines, self=theirs)
            assert theirs.effective_drafter_max_model_len == ours.effective_drafter_max_model_len
    stage = SimpleNamespace(speculative_config=runner().speculative_config, max_model_len=LONGEST)
    ran(release, V1, "initialize_kv_cache", "GPUModelRunner", lines, self=stage)
    assert not hasattr(stage, "effective_drafter_max_model_len")


@pytest.mark.parametrize("release", MLA)
def test_what_is_masked_stays_masked(release: str) -> None:
    """D24: a position of 0 would be 1 in the drafter's next step; ``tests/fixes`` has the steps."""
    split, base = series.number(release) >= (0, 21, 0), series.number(release) >= (0, 20, 0)
    path = f"vllm/v1/spec_decode/{'llm_base_proposer' if base else 'eagle'}.py"
    method = "_update_positions_dependent_metadata" if split else "propose"
    out = torch.tensor([0, 5])
    names = {
        "self": SimpleNamespace(max_model_len=LONGEST),
        "out_pos": out,
        "common_attn_metadata": SimpleNamespace(slot_mapping=torch.tensor([-1, 70])),
        "PADDING_SLOT_ID": -1,
    }
    ran(release, path, method, "SpecDecodeBaseProposer", ("out_pos.masked_fill_(",), **names)
    assert out.tolist() == [LONGEST - 1, 5]


@pytest.mark.parametrize("release", [r for r in ENDS if series.number(r) < (0, 27, 0)])
@pytest.mark.parametrize("own", [64, 128, 4096, None])
@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear"}, {"rope_type": "dynamic"}, YARN, None])
def test_the_drafters_positions_are_the_targets(release: str, own: int | None, rope: dict[str, Any] | None) -> None:
    """D27: raised where the overlay raises it."""
    ours, theirs = server(own, rope_parameters=rope), server(own, rope_parameters=rope)
    drafter_positions.configure(SimpleNamespace(vllm_config=ours))  # type: ignore[arg-type]
    speculative = theirs.speculative_config
    speculative.method = "eagle3"
    lines = ("if self.method == 'eagle3':\n    draft_hf_config",)
    ran(release, CONFIG, "__post_init__", "SpeculativeConfig", lines, self=speculative)
    assert speculative.draft_model_config == ours.speculative_config.draft_model_config


@pytest.mark.parametrize("release", [r for r in ENDS if (0, 17, 0) <= series.number(r) < (0, 33, 0)])
@pytest.mark.parametrize(
    "drafter", [{}, {"eagle_config": None}, *({"eagle_config": {"use_aux_hidden_state": v}} for v in (True, False))]
)
def test_the_drafter_is_asked_for_auxiliary_states(release: str, drafter: dict[str, Any]) -> None:
    init = node(release, "vllm/v1/worker/gpu/model_runner.py", "__init__", "GPUModelRunner")
    flag = "self.use_aux_hidden_state_outputs = eagle_config.get("
    (block,) = [
        n for n in ast.walk(init) if isinstance(n, ast.If) and any(ast.unparse(s).startswith(flag) for s in n.body)
    ]
    end = next(i for i, s in enumerate(block.body) if ast.unparse(s).startswith(flag)) + 1
    runner = SimpleNamespace(speculative_config=spec_config(release, drafter, stock=True))
    exec(compile(ast.Module(block.body[:end], []), "init", "exec"), {"self": runner})
    assert bool(runner.use_aux_hidden_state_outputs) == use_aux_flag.wants_states(runner.speculative_config)


@pytest.mark.parametrize("release", ["0.17.0", "0.17.1"])
@pytest.mark.parametrize("method", ["propose", "set_inputs_first_pass"])
def test_slots_are_counted_in_the_kernels_blocks(release: str, method: str) -> None:
    """D10: a manager's blocks of 64 tokens, a kernel's of 32."""

    def size(stock: bool) -> int:
        found = node(release, "vllm/v1/spec_decode/eagle.py", method, "SpecDecodeBaseProposer", stock)
        lines = [
            statement
            for statement in ast.walk(found)
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in ("builder", "block_size")
        ]
        builder = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=64), get_metadata_builder=lambda *_: builder)
        names: dict[str, Any] = {"self": SimpleNamespace(draft_attn_groups=[group])}
        exec(compile(ast.Module(sorted(lines, key=lambda line: line.lineno)[-2:], []), method, "exec"), names)
        return names["block_size"]

    assert size(stock=False) == 32
    assert size(stock=True) == 64


# ---------------------------------------------------------------------------------------------------------------------
# C5


@pytest.mark.parametrize("release", [r for r in ENDS if series.number(r) >= (0, 20, 0)])
def test_sampling_parameters_are_spread_as_the_overlay_does(release: str) -> None:
    torch = pytest.importorskip("torch")
    code = cpu_sampling_expansion.expand
    overlays = FunctionType(code.__code__, {"torch": torch}, None, code.__defaults__)
    patched_expand = function(release, "vllm/utils/cpu_triton_utils.py", "_expand_kernel_impl", torch=torch)

    def spread(expand: Any, values: Any, old: float, new: float) -> list[Any]:
        out = torch.full((7,), -7, dtype=values.dtype)
        expand(out, values, torch.tensor([3, 4, 6], dtype=torch.int32), old, new)
        return out.tolist()

    for values, old, new, wanted in (
        (torch.tensor([0.5, 0.0, 0.25]), 0, 1, [0.5, 0.5, 0.5, 1.0, 0.25, 0.25, -7.0]),
        (torch.tensor([5, 0, 9], dtype=torch.int32), 0, 0, [5, 5, 5, 0, 9, 9, -7]),
        (torch.tensor([5, 0, 9]), 0, 7, [5, 5, 5, 7, 9, 9, -7]),
    ):
        assert spread(patched_expand, values, old, new) == spread(overlays, values, old, new)
        assert spread(patched_expand, values, old, new) == wanted


# ---------------------------------------------------------------------------------------------------------------------
# C6


@pytest.mark.parametrize(("target", "kernel"), cpu_draft_step_kernel.KERNELS.items())
def test_dispatchers_get_wrappers_that_take_their_names(target: str, kernel: str) -> None:
    release = "0.30.0"
    get = functools.partial(function, release)
    runner = node(release, "vllm/v1/worker/cpu_model_runner.py", "_postprocess_triton", "CPUModelRunner")
    setters = [n for n in ast.walk(runner) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Attribute)]
    owner = target.partition(":")[2]
    (value,) = [n.value for n in setters if ast.unparse(n.targets[0]).endswith(f".{owner}.kernel")]
    assert ast.unparse(value) == f"cpu_tl.{kernel}"
    seen: list[dict[str, Any]] = []
    made = dispatchers.dispatcher(get, target, kernel)
    made.kernel = dispatchers.wrapper(get, kernel, seen)
    given = dispatchers.launch(made)
    (arguments,) = seen
    dispatchers.arrived(arguments, given)


# ---------------------------------------------------------------------------------------------------------------------
# D3, D16


def decode(release: str, forward: Any, dtype: Any, wanted: tuple[int, ...], factor: float) -> Any:
    """Run a decoder of five layers, each of which adds its own power of two to the stream."""

    class Layer:
        use_sequence_parallel_moe = False

        def __init__(self, index: int) -> None:
            self.index = index

        def __call__(self, positions: Any, hidden: Any, residual: Any, scaling: Any) -> Any:
            total = hidden if residual is None else hidden + residual
            return total.new_full(total.shape, 2.0**self.index), total

    model = SimpleNamespace(
        layers=[Layer(index) for index in range(5)],
        start_layer=0,
        end_layer=5,
        aux_hidden_state_layers=wanted,
        config=SimpleNamespace(routed_scaling_factor=factor),
        embed_input_ids=lambda ids: torch.zeros(len(ids), 2, dtype=dtype),
        norm=lambda hidden, residual: (hidden + residual, None),
        hidden_size=2,
    )
    return forward(model, torch.zeros(3, dtype=torch.long), torch.arange(3), None, None)


def overlay_forward() -> Any:
    """The function that the overlay installs up to 0.17.1, without the imports of its module."""
    from vllm_kimi_eagle3.fixes import k25_language_model

    path = Path(k25_language_model.__file__).with_name("_capturing_forward.py")
    (found,) = [n for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.FunctionDef)]
    return build("overlay", path.name, found, loop_names())


@pytest.mark.parametrize("release", OLD)
@pytest.mark.parametrize("wanted", [(), (1,), (1, 3, 5), (5, 2)])
def test_the_decoder_shows_what_the_overlays_does(release: str, wanted: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    ours = decode(
        release, function(release, DEEPSEEK, "forward", "DeepseekV2Model", **loop_names()), torch.float32, wanted, 1.0
    )
    theirs = decode(release, overlay_forward(), torch.float32, wanted, 1.0)
    if not wanted:
        assert torch.equal(ours, theirs)
        return
    assert torch.equal(ours[0], theirs[0])
    assert [state[0, 0].item() for state in ours[1]] == [2.0**index - 1 for index in sorted(wanted)]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


@pytest.mark.parametrize("release", ENDS)
@pytest.mark.parametrize("factor", [2.5, 1e5])
def test_float16_states_have_their_true_size(release: str, factor: float) -> None:
    torch = pytest.importorskip("torch")
    forward = function(release, DEEPSEEK, "forward", "DeepseekV2Model", **loop_names())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        hidden, states = decode(release, forward, dtype, (1, 3, 4), factor)
        plain = [torch.full((3, 2), 2.0**index - 1, dtype=dtype) for index in (1, 3, 4)]
        wanted = float16_stream.unscaled(plain, factor) if dtype == torch.float16 else plain
        assert all(torch.equal(a, b) for a, b in zip(states, wanted, strict=True))
        assert torch.equal(hidden, torch.full((3, 2), 31.0, dtype=dtype)), "the text's own stream is not touched"


# ---------------------------------------------------------------------------------------------------------------------
# D19

TRITON = "vllm/v1/attention/backends/mla/triton_mla.py"
COMMON = "model_executor/layers/attention/mla_attention.py"
ROWWISE = [release for release in ENDS if series.number(release) < (0, 31, 0)]


def builders(release: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any, Any]:
    """The base that both stand on, the patch's builder, the overlay's, and the release's levels of graph support.

    The base is the release's own ``_init_reorder_batch_threshold`` and graph support under a ``build`` that hands its
    arguments on, so that what either adds shows.
    """
    owner = "AttentionMetadataBuilder"
    backend = "v1/attention/backend.py"
    support = build(release, backend, definition(release, backend, "AttentionCGSupport"), {"Enum": enum.Enum})
    levels = build(release, COMMON, definition(release, COMMON, "QueryLenSupport"), {"Enum": enum.Enum})
    names = {"max_decode_query_len": None}

    class Base:
        _cudagraph_support = support.UNIFORM_SINGLE_TOKEN_DECODE
        query_len_support = levels.SINGLE_ONLY
        _init_reorder_batch_threshold = build(
            release, backend, definition(release, backend, "_init_reorder_batch_threshold", owner), names
        )
        __class_getitem__ = classmethod(lambda cls, item: cls)

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            return cls._cudagraph_support

        def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
            self.vllm_config = vllm_config
            self._init_reorder_batch_threshold(1, self.query_len_support is not levels.SINGLE_ONLY)

        def build_for_cudagraph_capture(self, common: Any) -> Any:
            return self.build(0, common)

        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            return self.reorder_batch_threshold, self._build_decode(
                block_table_tensor=common.table,
                seq_lens_device=common.seq_lens,
                max_seq_len=9,
                query_start_loc_cpu=common.query_start_loc_cpu,
                query_start_loc_device=common.query_start_loc_cpu,
                num_decode_tokens=common.num_actual_tokens,
                dcp_tot_seq_lens_device=None,
            )

        def _build_decode(self, **decode: Any) -> Any:
            return decode

    scope = {"torch": torch, "AttentionCGSupport": support, "QueryLenSupport": levels, "MLACommonMetadata": None}
    scope |= {"MLACommonMetadataBuilder": Base, "TritonMLAMetadataBuilder": Base, "_MIN_DECODE_ROWS": 512}
    for name in ("_serves_rows", "_graph_rows", "_most_rows", "_num_decode_rows", "_write_decode_rows"):
        scope[name] = function(release, TRITON, name, **scope)
    patch = function(release, TRITON, "TritonMLARowsMetadataBuilder", **scope)
    for module, name, value in (
        ("vllm.model_executor.layers.attention.mla_attention", "QueryLenSupport", levels),
        ("vllm.v1.attention.backend", "AttentionCGSupport", support),
    ):
        holder = ModuleType(module)
        setattr(holder, name, value)
        for parent in (".".join(module.split(".")[:i]) for i in range(1, module.count(".") + 1)):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, module, holder)
    return Base, patch, triton_mla_decode.rows_builder(Base), support


def settings(k: int | None = 3, dcp: int = 1, sizes: tuple[int, ...] = (8, 32)) -> SimpleNamespace:
    speculative = None if k is None else SimpleNamespace(num_speculative_tokens=k, parallel_drafting=False)
    return SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp, prefill_context_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=list(sizes)),
        scheduler_config=SimpleNamespace(max_num_seqs=400),
    )


def step(query_lens: list[int], padding: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(len(query_lens))
    start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.randint(0, 99, (len(query_lens),), generator=generator, dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc_cpu=start,
        seq_lens=lengths + torch.tensor(query_lens, dtype=torch.int32),
        table=torch.randint(0, 99, (len(query_lens), 7), generator=generator, dtype=torch.int32),
        num_actual_tokens=int(start[-1]) + padding,
        max_query_len=max(query_lens),
    )


STEPS = [
    step([1, 1, 1]),
    step([4, 4]),
    step([4, 1, 3, 2], padding=6),
    step([2] * 30),
    step([1, 2, 9]),
    step([4] * 128),
    step([4] * 129),
]


@pytest.mark.parametrize("release", ROWWISE)
def test_rows_of_decode(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patch, overlay, _ = builders(release, monkeypatch)
    ours, theirs, bare = (cls(None, [], settings(), "cpu") for cls in (overlay, patch, stock))
    differ = 0
    for common in STEPS:
        (threshold, found), (expected, wanted) = (builder.build(0, common) for builder in (theirs, ours))
        assert threshold == expected
        for name in ("seq_lens_device", "block_table_tensor"):
            assert torch.equal(found[name], wanted[name])
            differ += found[name].shape != bare.build(0, common)[1][name].shape
    assert differ, "stock vLLM gives rows too"
    assert [(b.reorder_batch_threshold, b.build(0, STEPS[-1])[0]) for b in (ours, theirs)] == [(4, 1)] * 2
    first = [builder.build(0, STEPS[1])[1]["seq_lens_device"].data_ptr() for builder in (theirs, ours)]
    again = [builder.build(0, STEPS[2])[1]["seq_lens_device"].data_ptr() for builder in (theirs, ours)]
    assert first == again, "the address changed"
    for builder in (theirs, ours):
        with pytest.raises(RuntimeError, match="60 query tokens is to be captured"):
            builder.build_for_cudagraph_capture(STEPS[3])
        builder.build_for_cudagraph_capture(STEPS[1])


@pytest.mark.parametrize("release", ROWWISE)
def test_what_graphs_are_promised(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patch, overlay, support = builders(release, monkeypatch)
    for said in support:
        stock._cudagraph_support = said
        answers = [
            [cls.get_cudagraph_support(config, group).name for cls in (patch, overlay)]
            for config in (settings(), settings(k=None), settings(dcp=2))
            for group in (SimpleNamespace(), SimpleNamespace(non_causal_multi_token_decode=True))
        ]
        assert all(theirs == ours for theirs, ours in answers)
        assert answers[0] == ["UNIFORM_BATCH"] * 2


# ---------------------------------------------------------------------------------------------------------------------
# D26


@pytest.mark.parametrize("release", [release for release in ENDS if series.number(release) >= (0, 25, 0)])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_step_of_one_token_is_whole_on_every_rank(release: str, tokens: int) -> None:
    ranks = sharded_decoder.Ranks()
    loop, layer, stock = (
        function(release, DEEPSEEK, "forward", owner, is_stock, **ranks.names())
        for owner, is_stock in (
            ("DeepseekV2Model", False),
            ("DeepseekV2DecoderLayer", False),
            ("DeepseekV2DecoderLayer", True),
        )
    )
    whole = sharded_decoder.outputs(ranks, loop, stock, tokens, shards=False)
    assert sharded_decoder.same(sharded_decoder.outputs(ranks, loop, layer, tokens), whole)
    assert sharded_decoder.same(sharded_decoder.outputs(ranks, loop, stock, tokens), whole) == (tokens > 1)
