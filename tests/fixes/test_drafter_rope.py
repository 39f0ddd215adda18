# SPDX-License-Identifier: Apache-2.0
"""D25 on the layer of each release, compiled from its source: which rope parameters its attention is built with.

``tests/engines`` has the engine: an MLA drafter with a base of its own, draft for draft, on 0.20.0 to 0.27.1.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests import releases
from vllm_kimi_eagle3.fixes import drafter_rope
from vllm_kimi_eagle3.patching.patcher import Installer

PATH, LAYER = "model_executor/models/deepseek_eagle3.py", "DeepseekV2Eagle3DecoderLayer"
PLAIN = {"rope_type": "default", "rope_theta": 50000.0}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 50000.0}


class Base:
    """In the place of ``nn.Module``."""


def hf_config(rope: dict[str, Any], transformers: int) -> Any:
    """A drafter's configuration as vLLM leaves it: Transformers 5 has rope_scaling as another name."""
    scaling = rope if transformers == 5 or rope["rope_type"] != "default" else None
    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "intermediate_size", "q_lora_rank", "kv_lora_rank"), 8)
    return SimpleNamespace(
        **sizes, rope_theta=50000.0, rope_scaling=scaling, rope_parameters=rope, hidden_act="silu", rms_norm_eps=1e-6
    )


def built(release: str, config: Any, mended: bool) -> dict[str, Any]:
    """The rope parameters that reach the attention."""
    seen: list[dict[str, Any]] = []

    def attention_class(*, vllm_config: Any, config: Any, **kwargs: Any) -> None:
        seen.append(config.rope_parameters)

    attention: list[Any] = [attention_class]
    if mended:
        installer = MagicMock(spec=Installer)
        installer.original.return_value = attention_class
        drafter_rope.install(installer)
        attention = [installer.replace.call_args.args[1]]
    names = {name: MagicMock() for name in ("get_draft_quant_config", "DeepseekV2MLP", "RMSNorm")}
    namespace = {**names, "copy": copy, "nn": SimpleNamespace(Module=Base), "DeepseekV2MLAAttention": attention[0]}
    layer = releases.build(release, PATH, releases.definition(release, PATH, LAYER), namespace)
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    layer(SimpleNamespace(cache_config=None, speculative_config=speculative), "layer", config)
    return seen[0]


@pytest.mark.parametrize("release", ["0.18.0", "0.20.2", "0.24.0", "0.27.1"])
@pytest.mark.parametrize("transformers", [4, 5])
@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
def test_the_attention_gets_the_drafters_own(release: str, transformers: int, rope: dict[str, Any]) -> None:
    config = hf_config(dict(rope), transformers)
    assert built(release, config, mended=True) == rope
    assert config.rope_parameters == rope, "the configuration is as it was"


@pytest.mark.parametrize(
    ("transformers", "found"), [(4, {"rope_type": "default"}), (5, {**PLAIN, "rope_type": "deepseek_yarn"})]
)
def test_stock_loses_the_base_or_asks_for_a_factor(transformers: int, found: dict[str, Any]) -> None:
    assert built("0.20.2", hf_config(dict(PLAIN), transformers), mended=False) == found


def test_from_0_28_on_it_is_right() -> None:
    assert built("0.28.0", hf_config(dict(PLAIN), 5), mended=False) == PLAIN


def test_a_configuration_without_them_gets_its_base() -> None:
    assert drafter_rope.rope_parameters(SimpleNamespace(rope_theta=7.0)) == {"rope_type": "default", "rope_theta": 7.0}
