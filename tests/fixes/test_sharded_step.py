# SPDX-License-Identifier: Apache-2.0
"""D26 on the decoder loop and the layer of each release, on two ranks: states and captures of few tokens.

``tests/verify`` has the engine, on two ranks with states sharded between layers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.releases import RELEASES, altered, build, definition
from tests.support.sharded_decoder import DEEPSEEK, Ranks, outputs, same
from vllm_kimi_eagle3.fixes import sharded_step
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Need
from vllm_kimi_eagle3.source_patches import series

AFFECTED = [release for release in RELEASES if series.number(release) >= (0, 25, 0)]


def functions(release: str, ranks: Ranks) -> tuple[Any, Any]:
    """The release's loop and its layer's forward."""
    loop, layer = (
        build(release, DEEPSEEK, definition(release, DEEPSEEK, "forward", owner), ranks.names())
        for owner in ("DeepseekV2Model", "DeepseekV2DecoderLayer")
    )
    return loop, layer


@pytest.mark.parametrize("release", AFFECTED)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_every_rank_has_the_whole_states(release: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    loop, layer = functions(release, ranks)
    whole = outputs(ranks, loop, layer, tokens, shards=False)
    assert same(whole[:1], whole[1:]) and len(whole[0]) == 7
    assert same(outputs(ranks, loop, layer, tokens), whole) == (tokens > 1), "stock: wrong for one token"
    for name in ("vllm", "vllm.distributed", "vllm.distributed.communication_op"):
        module = ModuleType(name)
        vars(module)["tensor_model_parallel_all_gather"] = ranks.all_gather
        monkeypatch.setitem(sys.modules, name, module)
    assert same(outputs(ranks, loop, sharded_step.whole(layer), tokens), whole)


@pytest.mark.parametrize(
    ("release", "old", "new", "need"),
    [
        ("0.24.0", "", "", Need.NOT_APPLICABLE),
        ("0.33.0", "", "", Need.APPLY),
        ("0.33.0", "and hidden_states.shape[0] != full_num_tokens", "and self.follows_a_shard", Need.REFUSED),
        ("0.33.0", "if aux_hidden_state.shape[0] != positions.shape[0]:", "if self.shards:", Need.REFUSED),
        (
            "0.33.0",
            "        residual: torch.Tensor | None,\n        llama_4_scaling: torch.Tensor | None = None,\n",
            "        residual: torch.Tensor | None,\n",
            Need.REFUSED,
        ),
        (
            "0.33.0",
            "        if self.use_sequence_parallel_moe:\n            hidden_states = self.mlp(",
            "        if full_num_tokens == 1:\n            pass\n"
            "        if self.use_sequence_parallel_moe:\n            hidden_states = self.mlp(",
            Need.RETIRED,
        ),
    ],
)
def test_the_probe_knows_the_shape(tmp_path: Path, release: str, old: str, new: str, need: Need) -> None:
    altered(tmp_path, release, DEEPSEEK, old, new)
    assert sharded_step.probe(SourceTree(tmp_path)).need is need


@pytest.mark.parametrize(
    ("mode", "eager", "level", "wanted"),
    [
        (0, False, 2, True),  # CompilationMode
        (1, False, 2, True),
        (2, False, 2, False),
        (3, False, 2, False),
        (3, True, 2, True),  # before vLLM has settled it
        (None, True, 2, True),
        (None, False, 2, False),
        (None, False, 0, True),
    ],
)
def test_who_gets_it(mode: int | None, eager: bool, level: int, wanted: bool) -> None:
    """Code that is traced once gathers always."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(use_sequence_parallel_moe=True),
        compilation_config=SimpleNamespace(mode=mode),
        model_config=SimpleNamespace(enforce_eager=eager),
        optimization_level=level,
    )
    assert sharded_step.in_shards(Context("DeepseekV3ForCausalLM", "cuda", True, config)) is wanted
    assert not sharded_step.in_shards(Context("DeepseekV3ForCausalLM", "cuda", False, config))
    assert not sharded_step.in_shards(Context("DeepseekV3ForCausalLM", "cuda", True))
    config.parallel_config.use_sequence_parallel_moe = False
    assert not sharded_step.in_shards(Context("DeepseekV3ForCausalLM", "cuda", True, config))
