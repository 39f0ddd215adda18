# SPDX-License-Identifier: Apache-2.0
"""D26: with states sharded between layers, a step of one token is computed wrongly in eager mode.

With experts parallel, tensor and data parallel together, a layer of experts leaves each tensor-parallel rank a shard of
the rows (from 0.25.0 on). Layers and capture tell a shard by its having fewer rows than there are tokens. A step of one
token is padded to one row a rank, so that a shard looks whole: nobody gathers it, rank 0 goes on with the token and the
others with padding, and their halves of the next attention are added up. States, text and the KV cache are wrong from
the second sharded layer on. With EAGLE-3 such a step is the prompt of one token or the last token of a chunk or behind
a cached prefix. torch.compile traces the comparison with many tokens and gathers always, so its graphs are right.

A sharded layer ends such a step with the whole row on every rank, which the code around it takes for what it is.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, Verdict

TARGET = "vllm.model_executor.models.deepseek_v2:DeepseekV2DecoderLayer.forward"
PARAMETERS = ("self", "positions", "hidden_states", "residual", "llama_4_scaling")
FLAG = "use_sequence_parallel_moe"
_TOLD_BY_ROWS = "hidden_states.shape[0] != full_num_tokens"
_WHOLE = "full_num_tokens == 1"


def probe(tree: SourceTree) -> Verdict:
    """Whether layers pass shards on, and tell them by the number of rows."""
    text = tree.text(TARGET)
    if FLAG not in text:
        return Verdict(Need.NOT_APPLICABLE, "states are whole between layers")
    if _WHOLE in text:
        return Verdict(Need.RETIRED, "a step of one token is gathered: the source patch")
    if _TOLD_BY_ROWS not in text or tree.parameters(TARGET) != PARAMETERS:
        return Verdict(Need.REFUSED, f"{TARGET} tells a shard of the states in a way that is not known")
    return Verdict(Need.APPLY, "a shard of one row is taken for the whole of a step of one token")


def in_eager_shards(context: Context) -> bool:
    """Servers with eagle3 that shard states between layers and are not compiled."""
    if not context.eagle3 or context.vllm_config is None:
        return False
    compiled = bool(context.vllm_config.compilation_config.mode)
    return context.vllm_config.parallel_config.use_sequence_parallel_moe and not compiled


def whole(original: Any) -> Any:
    """A layer's forward after which a step of one token has its (1, H) states on every rank."""

    @functools.wraps(original)
    def forward(self: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states, residual = original(self, positions, *args, **kwargs)
        if not self.use_sequence_parallel_moe or positions.shape[0] != 1:
            return hidden_states, residual
        import torch
        from vllm.distributed.communication_op import tensor_model_parallel_all_gather

        states = tensor_model_parallel_all_gather(torch.stack([hidden_states, residual], dim=1), 0)
        return states[:1, 0], states[:1, 1]

    return forward


def install(installer: Installer) -> None:
    """Wrap the decoder's layer."""
    installer.replace(TARGET, whole(installer.original(TARGET)))


FIX = Fix(
    id="D26",
    name="sharded-step",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="with experts, tensor and data parallel together, eager mode computes a step of one token wrongly",
    upstream="none known; states are sharded between layers from 0.25.0 on",
    retire="a layer knows whether its input is sharded without counting rows",
    probe=probe,
    wanted=in_eager_shards,
    install=install,
)
