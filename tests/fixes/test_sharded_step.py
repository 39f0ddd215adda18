# SPDX-License-Identifier: Apache-2.0
"""D26 on the decoder loop and the layer of each release, on two ranks: states and captures of few tokens.

``tests/verify`` has the engine, on two ranks with states sharded between layers.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.releases import RELEASES, build, definition
from tests.support.sharded_decoder import DEEPSEEK, Ranks, outputs, same
from vllm_kimi_eagle3.fixes import sharded_step
from vllm_kimi_eagle3.patching.spec import Context

AFFECTED = [release for release in RELEASES if tuple(map(int, release.split("."))) >= (0, 25, 0)]


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
    ("eagle3", "shards", "mode", "wanted"),
    [
        (True, True, 0, True),
        (True, True, None, True),
        (True, True, 3, False),
        (True, False, 0, False),
        (False, True, 0, False),
    ],
)
def test_who_gets_it(eagle3: bool, shards: bool, mode: int | None, wanted: bool) -> None:
    """Compiled code gathers always."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(use_sequence_parallel_moe=shards),
        compilation_config=SimpleNamespace(mode=mode),
    )
    assert sharded_step.in_eager_shards(Context("DeepseekV3ForCausalLM", "cuda", eagle3, config)) is wanted
    assert not sharded_step.in_eager_shards(Context("DeepseekV3ForCausalLM", "cuda", eagle3))
