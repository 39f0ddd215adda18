# SPDX-License-Identifier: Apache-2.0
"""The decoder's forward that D3 installs, in a module of its own: it imports vLLM, and Dynamo traces it.

It is a plain function at module level, because torch.compile serialises the globals of what it traces and vLLM puts
this file's text into the compile-cache key. Annotations are evaluated (no ``from __future__ import annotations``) and
are those of the original, because ``support_torch_compile`` reads from them which arguments vary in length.
"""

from itertools import islice
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.models.deepseek_v2 import (
    _get_llama_4_scaling,  # pyright: ignore[reportPrivateUsage]
)
from vllm.sequence import IntermediateTensors


def forward(
    self: Any,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    intermediate_tensors: IntermediateTensors | None,
    inputs_embeds: torch.Tensor | None = None,
) -> Any:
    """(T,) ids or (T, H) embeddings in; (T, H) out, with the list of captured (T, H) streams beside it if any.

    A captured stream is what enters a layer: hidden states plus residual, before the layer's norm. The last one,
    boundary L, is what enters the final norm.
    """
    stream: Any
    residual: Any
    if not get_pp_group().is_first_rank:
        assert intermediate_tensors is not None
        stream = intermediate_tensors["hidden_states"]
        residual = intermediate_tensors["residual"]
    else:
        stream = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None

    scaling = None
    scaling_config = getattr(self.config, "llama_4_scaling", None)
    if scaling_config is not None:
        scaling = _get_llama_4_scaling(
            original_max_position_embeddings=scaling_config["original_max_position_embeddings"],
            scaling_beta=scaling_config["beta"],
            positions=positions,
        )

    wanted = self.aux_hidden_state_layers
    captured: list[torch.Tensor] = []
    for index, layer in enumerate(islice(self.layers, self.start_layer, self.end_layer), start=self.start_layer):
        if index in wanted:
            # A copy before layer 0, which makes its input the residual that later kernels add to in place.
            captured.append(stream.clone() if residual is None else stream + residual)
        stream, residual = layer(positions, stream, residual, scaling)

    if not get_pp_group().is_last_rank:
        return IntermediateTensors({"hidden_states": stream, "residual": residual})
    if self.end_layer in wanted:
        captured.append(stream + residual)
    stream, _ = self.norm(stream, residual)
    return (stream, captured) if captured else stream
