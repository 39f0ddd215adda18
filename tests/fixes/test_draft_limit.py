# SPDX-License-Identifier: Apache-2.0
"""D24 and D27 on the code of each release: who is drafted for, and how far a drafter's rotary embedding reaches.

``tests/alignment`` has the engine: a request beside one at its limit, and a drafter shorter than the server's requests.
"""

from __future__ import annotations

import ast
import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests import releases
from tests.fixes.lengths import LONGEST, YARN, K, runner, server
from vllm_kimi_eagle3.fixes import draft_limit, drafter_positions
from vllm_kimi_eagle3.layers.plan import PlanError
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Need

RUNNER = "v1/worker/gpu_model_runner.py"
FILES = (RUNNER, "v1/spec_decode/llm_base_proposer.py", "v1/spec_decode/utils.py", "config/speculative.py")
KERNEL = "eagle_step_slot_mapping_metadata_kernel"


def rule(release: str) -> Any:
    """A release's own: called with a runner and the batch's longest sequence, whether its drafter runs."""
    name = "_input_fits_in_drafter"
    try:
        function = releases.function(release, RUNNER, name, "GPUModelRunner")
    except LookupError:
        sample = releases.definition(release, RUNNER, "sample_tokens", "GPUModelRunner")
        assigned = (node for node in ast.walk(sample) if isinstance(node, ast.Assign))
        (found,) = (node.value for node in assigned if ast.unparse(node.targets[0]) == name[1:])
        code = compile(ast.Expression(found), name, "eval")
        function = lambda runner, metadata: eval(code, {"self": runner, "spec_decode_common_attn_metadata": metadata})  # noqa: E731
    return lambda runner, longest: function(runner, SimpleNamespace(max_seq_len=longest))


@pytest.mark.parametrize("limit", [LONGEST, LONGEST // 2], ids=["as long as the target", "short drafter"])
@pytest.mark.parametrize("release", releases.RELEASES)
def test_a_long_request_takes_nothing_from_the_others(release: str, limit: int) -> None:
    """For every length that the longest sequence of a batch may have."""
    drafts = rule(release)
    mended, stock = runner(LONGEST, limit=limit), runner(LONGEST, limit=limit)
    draft_limit.lift(mended)
    for longest in range(1, LONGEST + 1):
        assert drafts(mended, longest)
        assert drafts(stock, longest) is (longest + K <= limit)


def test_it_is_decided_when_the_models_are_there() -> None:
    installer, seen = MagicMock(spec=Installer), []
    installer.original.return_value = lambda self, config, is_profiling=False: seen.append((config, is_profiling))
    draft_limit.install(installer)
    target, wrapper = installer.replace.call_args_list[0].args
    self = runner(LONGEST)
    wrapper(self, "config", is_profiling=True)
    assert target.endswith("GPUModelRunner.initialize_kv_cache")
    assert seen == [("config", True)]
    assert self.effective_drafter_max_model_len == LONGEST + K


@pytest.mark.parametrize("rows", [(LONGEST,), (LONGEST, 2 * LONGEST)])
def test_where_the_rotary_embedding_reaches(rows: tuple[int, ...]) -> None:
    """With --max-model-len -1 the drafter's loop has not heard how long a request may be."""
    self = runner(*rows)
    self.drafter.max_model_len = 10 * LONGEST
    draft_limit.lift(self)
    assert self.effective_drafter_max_model_len == LONGEST + K
    assert self.drafter.max_model_len == LONGEST


def test_the_shortest_rotary_embedding_keeps_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    draft_limit._say.cache_clear()
    self = runner(LONGEST, LONGEST - 1, limit=LONGEST - 1)
    with caplog.at_level(logging.WARNING, "vllm.kimi_eagle3"):
        draft_limit.lift(self)
    assert self.effective_drafter_max_model_len == LONGEST - 1
    assert "knows 127 positions" in caplog.text and "--max-model-len 127" in caplog.text


def test_other_servers_keep_theirs() -> None:
    user = runner(LONGEST, limit=72, max_model_len=72)
    other = runner(LONGEST, limit=72, method="eagle")
    unknown = runner(limit=72)
    stage = runner(LONGEST, limit=72)
    del stage.drafter
    alone = SimpleNamespace(speculative_config=None)
    for self in (user, other, unknown, stage, alone):
        before = dict(vars(self))
        draft_limit.lift(self)
        assert vars(self) == before


def one_step(
    *, positions_1d: Any, block_table_tensor: Any, seq_lens: Any, block_size: int, max_model_len: int,
    out_clamped_positions: Any, out_slot_mapping: Any, input_batch_size: int
) -> None:  # fmt: skip
    """What every release's kernel does to a batch, from 0.18.0 on; its lines are looked at below."""
    new = positions_1d + 1
    exceeds = new >= max_model_len
    clamped = torch.where(exceeds, 0, new)
    columns = (clamped // block_size).clamp(max=block_table_tensor.shape[1] - 1)
    slots = block_table_tensor.gather(1, columns[:, None])[:, 0] * block_size + clamped % block_size
    out_slot_mapping.fill_(-1)
    out_slot_mapping[: len(new)] = torch.where(exceeds, -1, slots)
    seq_lens.copy_(torch.where(exceeds, 1, seq_lens + 1).clamp(max=max_model_len))
    out_clamped_positions.copy_(clamped)


def slots_of(step: Any, last: int, steps: int) -> list[list[int]]:
    """The slots that a proposer's loop writes behind two requests' last rows; the first of them stays in its place."""
    positions = torch.tensor([last, 20])
    table = torch.arange(2 * LONGEST // 16).view(2, -1) + 100
    seq_lens, buffer, found = torch.tensor([last + 1, 21], dtype=torch.int32), torch.empty(3, dtype=torch.int64), []
    for _ in range(steps):
        out = positions.clone()
        step(
            positions_1d=positions, block_table_tensor=table.int(), seq_lens=seq_lens, block_size=16,
            max_model_len=LONGEST, out_clamped_positions=out, out_slot_mapping=buffer, input_batch_size=3,
        )  # fmt: skip
        positions = out
        found.append(buffer.tolist())
    return found


def masked(step: Any) -> Any:
    """The remedy's step over another."""
    installer = MagicMock(spec=Installer)
    installer.original.return_value = step
    draft_limit.install(installer)
    return installer.replace.call_args_list[1].args[1]


def engines_step(**arguments: Any) -> None:
    """The kernel of the installed CPU engine, as the release's own function calls it."""
    import vllm._custom_ops  # noqa: F401  # which loads the kernels
    from vllm.utils import cpu_triton_utils

    given = SimpleNamespace(**arguments)
    given.out_slot_mapping.fill_(draft_limit.PADDING_SLOT_ID)
    cpu_triton_utils._eagle_step_slot_mapping_metadata_kernel_impl(
        given.positions_1d,
        given.block_table_tensor,
        given.block_table_tensor.stride(0),
        given.seq_lens,
        given.out_clamped_positions,
        given.out_slot_mapping,
        given.block_size,
        given.max_model_len,
        given.block_table_tensor.shape[1],
        draft_limit.PADDING_SLOT_ID,
    )


@pytest.mark.parametrize("step", [one_step, engines_step])
@pytest.mark.parametrize("last", [LONGEST - 8, LONGEST - 3, LONGEST - 2])
def test_nothing_is_written_beyond_the_longest_request(step: Any, last: int) -> None:
    """The negative control is the step without the remedy: from the second position beyond on, it starts at 1 again."""
    own = lambda i: (100 + (last + 1 + i) // 16) * 16 + (last + 1 + i) % 16  # noqa: E731
    other = [(108 + (21 + i) // 16) * 16 + (21 + i) % 16 for i in range(10)]
    inside = [own(i) for i in range(LONGEST - 1 - last)]
    right = [[slot, beside, -1] for slot, beside in zip([*inside, *[-1] * (10 - len(inside))], other, strict=True)]
    assert slots_of(masked(step), last, 10) == right
    stock = slots_of(step, last, 10)
    assert stock[: len(inside) + 1] == right[: len(inside) + 1]
    assert [slot for slot, *_ in stock[len(inside) + 1 :]] == [1601 + i for i in range(9 - len(inside))]


@pytest.mark.parametrize("release", [r for r in releases.RELEASES if int(r.split(".")[1]) >= 18])
def test_every_release_s_step_is_that_one(release: str) -> None:
    kernel = ast.unparse(releases.definition(release, "v1/spec_decode/utils.py", KERNEL))
    for line in (
        "new_position = position + 1",
        "exceeds_max = new_position >= max_model_len",
        "clamped_position = tl.where(exceeds_max, 0, new_position)",
        "slot_id = tl.where(exceeds_max, PAD_ID, slot_id)",
        "new_seq_len = tl.where(exceeds_max, 1, seq_len + 1)",
    ):
        assert line in kernel
    assert "PADDING_SLOT_ID = -1" in releases.source(release, "v1/spec_decode/utils.py")


# ---------------------------------------------------------------------------------------------------------------------
# D27


@pytest.mark.parametrize(("own", "after"), [(64, 128), (127, 128), (128, 128), (4096, 4096), (None, None)])
def test_the_drafter_is_built_for_the_longest_request(own: int | None, after: int | None) -> None:
    config = server(own)
    drafter_positions.configure(SimpleNamespace(vllm_config=config))  # type: ignore[arg-type]
    hf_config = config.speculative_config.draft_model_config.hf_config
    assert getattr(hf_config, "max_position_embeddings", None) == after


def test_upstream_raises_it_alike() -> None:
    """What the remedy is modelled on, from the release on that retires it."""
    path, name = "config/speculative.py", "_maybe_override_draft_max_position_embeddings"
    node = releases.definition("0.27.1", path, name, "SpeculativeConfig")
    function = releases.build("0.27.1", path, node, {"logger": logging.getLogger("vllm")})
    for own in (64, 127, 128, 4096):
        ours, theirs = server(own), SimpleNamespace(max_position_embeddings=own)
        drafter_positions.configure(SimpleNamespace(vllm_config=ours))  # type: ignore[arg-type]
        function(theirs, LONGEST)
        assert ours.speculative_config.draft_model_config.hf_config == theirs


def test_upstream_knows_the_same_kinds() -> None:
    (kinds,) = (
        ast.literal_eval(node.value.args[0])
        for node in releases.module_ast("0.33.0", "config/speculative.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_CACHE_ONLY_ROPE_TYPES"
        if isinstance(node.value, ast.Call)
    )
    assert set(drafter_positions.LENGTH_ONLY) <= kinds
    assert not kinds & {"yarn", "deepseek_yarn", "dynamic", "longrope"}


@pytest.mark.parametrize(
    ("config", "reach"),
    [
        ({"rope_parameters": YARN}, 64),
        ({"rope_scaling": {"type": "deepseek_yarn", "factor": 4, "original_max_position_embeddings": 32}}, 128),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 48),
        ({"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": None}, 48),
        ({"rope_parameters": {**YARN, "rope_type": "linear"}}, None),
        ({"rope_parameters": {"rope_theta": 50000.0}}, None),
        ({"rope_scaling": "yarn"}, None),
        ({}, None),
    ],
)
def test_how_far_a_rotary_embedding_reaches(config: dict[str, Any], reach: int | None) -> None:
    drafter = {**config, "max_position_embeddings": 48}
    assert drafter_positions.fixed_reach(drafter) == reach
    given = server(48, **config)
    drafter_positions.configure(SimpleNamespace(vllm_config=given))  # type: ignore[arg-type]
    after = given.speculative_config.draft_model_config.hf_config.max_position_embeddings
    assert after == (LONGEST if reach is None else 48)


def test_a_short_yarn_is_refused_on_v2_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(SourceTree, "installed", lambda: SourceTree(releases.tree("0.32.0")))
    short = {"rope_parameters": YARN}
    for config in (server(64, v2=False, **short), server(64, **short), server(64, 64, v2=True, **short), server(64)):
        drafter_positions.check(config)
    refused = r"knows 64 positions, but a request may have 128.*--max-model-len 64 or less"
    with pytest.raises(PlanError, match=refused):
        drafter_positions.check(server(64, v2=True, **short))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(PlanError, match=refused):
        drafter_positions.check(server(64, **short))
    # It lowers the server's longest request itself.
    monkeypatch.setattr(SourceTree, "installed", lambda: SourceTree(releases.tree("0.33.0")))
    drafter_positions.check(server(64, v2=True, **short))


@pytest.mark.parametrize(
    ("probe", "path", "old", "new"),
    [
        (draft_limit.probe, RUNNER, "self.effective_drafter_max_model_len = draft_config.max_model_len", "pass"),
        (draft_limit.probe, RUNNER, "<= self.effective_drafter_max_model_len", "<= self.drafter_length"),
        (draft_limit.probe, RUNNER, "    def initialize_kv_cache(\n        self,\n", "    def initialize_kv_cache(\n"),
        (draft_limit.probe, "v1/spec_decode/llm_base_proposer.py", "out_clamped_positions=out_pos", "out=out_pos"),
        (draft_limit.probe, "v1/spec_decode/llm_base_proposer.py", "eagle_step_update", "next_step"),
        (draft_limit.probe, "v1/spec_decode/utils.py", "exceeds_max, PAD_ID", "exceeds_max, slot_id"),
        (drafter_positions.probe, "config/speculative.py", "_maybe_override_draft_max_model_len(", "_length_of("),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Any, probe: Any, path: str, old: str, new: str) -> None:
    for name in FILES:
        releases.altered(tmp_path, "0.26.0", name)
    file = tmp_path / "vllm" / path
    assert probe(SourceTree(tmp_path)).need is Need.APPLY
    changed = tmp_path / "changed"
    for name in FILES:
        releases.altered(changed, "0.26.0", name)
    text = file.read_text()
    assert old in text
    (changed / "vllm" / path).write_text(text.replace(old, new))
    verdict = probe(SourceTree(changed))
    assert verdict.need is Need.REFUSED and len(verdict.reason) > 20
