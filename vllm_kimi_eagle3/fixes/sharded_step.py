# SPDX-License-Identifier: Apache-2.0
"""D26: with states sharded between layers, a step of one token is computed wrongly where vLLM does not compile.

With experts, tensor and data parallel together, a layer of experts leaves each tensor-parallel rank a shard of the rows
(from 0.25.0 on). Layers and capture tell a shard by its having fewer rows than there are tokens. A step of one token is
padded to one row a rank, so that a shard looks whole: nobody gathers it, rank 0 goes on with the token and the others
with padding, and their parts of the next attention are added up. From that layer on states, text and the KV cache are
wrong. With EAGLE-3 such a step is, among others, a prompt of one token, or the token that is left over from a chunk;
without speculation every step of a lone request is one. Where vLLM compiles, its one trace compares many tokens and
gathers always.

A sharded layer ends such a step with the whole row on every rank, which the code around it takes for what it is.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, Verdict

_MODULE = "vllm.model_executor.models.deepseek_v2"
TARGET = f"{_MODULE}:DeepseekV2DecoderLayer.forward"
LOOP = f"{_MODULE}:DeepseekV2Model.forward"
PARAMETERS = ("self", "positions", "hidden_states", "residual", "llama_4_scaling")
FLAG = "use_sequence_parallel_moe"
_TOLD_BY_ROWS = "hidden_states.shape[0] != full_num_tokens"
_CAPTURED_BY_ROWS = "aux_hidden_state.shape[0] != positions.shape[0]"
_WHOLE = "full_num_tokens == 1"
_TRACED_ONCE = (2, 3)
"""CompilationMode.DYNAMO_TRACE_ONCE and VLLM_COMPILE."""


def probe(tree: SourceTree) -> Verdict:
    """Whether layers pass shards on, and tell them by the number of rows."""
    text = tree.text(TARGET)
    if FLAG not in text:
        return Verdict(Need.NOT_APPLICABLE, "states are whole between layers")
    if _WHOLE in text:
        return Verdict(Need.RETIRED, "a step of one token is gathered: the source patch")
    if _TOLD_BY_ROWS not in text or tree.parameters(TARGET) != PARAMETERS:
        return Verdict(Need.REFUSED, f"{TARGET} tells a shard of the states in a way that is not known")
    if _CAPTURED_BY_ROWS not in tree.text(LOOP):
        return Verdict(Need.REFUSED, f"{LOOP} tells a shard of the states in a way that is not known")
    return Verdict(Need.APPLY, "a shard of one row is taken for the whole of a step of one token")


def in_shards(context: Context) -> bool:
    """Servers with eagle3 that shard states between layers, but for those that are traced once, with many tokens."""
    config = context.vllm_config
    if not context.eagle3 or config is None or not config.parallel_config.use_sequence_parallel_moe:
        return False
    mode = config.compilation_config.mode
    if config.model_config.enforce_eager:
        return True
    if mode is None:  # not settled yet: a guess for the server's log line, since workers ask again
        return config.optimization_level == 0
    return mode not in _TRACED_ONCE


def whole(original: Any) -> Any:
    """A layer's forward after which a step of one token has its (1, H) states on every rank."""
    # Not in the function: model.compile() of CompilationMode.STOCK_TORCH_COMPILE traces it.
    import torch
    from vllm.distributed.communication_op import tensor_model_parallel_all_gather

    @functools.wraps(original)
    def forward(self: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states, residual = original(self, positions, *args, **kwargs)
        if not self.use_sequence_parallel_moe or positions.shape[0] != 1:
            return hidden_states, residual
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
    why="with experts, tensor and data parallel together, a step of one token is wrong where vLLM does not compile",
    upstream="none known; states are sharded between layers from 0.25.0 on",
    retire="a layer knows whether its input is sharded without counting rows",
    probe=probe,
    wanted=in_shards,
    install=install,
)
