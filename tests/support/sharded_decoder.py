# SPDX-License-Identifier: Apache-2.0
"""A release's own decoder loop and layers on two ranks, which are threads, around parts that are a line each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch

DEEPSEEK = "model_executor/models/deepseek_v2.py"
RANKS = 2
SHARDED = (False, True, True, False, True, True)
"""Which layers leave a shard; the others are dense ones, before which the states are gathered."""


def loop_names() -> dict[str, Any]:
    """What the decoder's loop calls besides its layers, by the names it calls it."""
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    return {
        "torch": torch,
        "islice": islice,
        "get_pp_group": lambda: rank,
        "IntermediateTensors": dict,
        "_get_llama_4_scaling": None,
    }


class Ranks:
    """The collectives of two threads."""

    def __init__(self) -> None:
        self.own = threading.local()
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.given: list[torch.Tensor] = [torch.empty(0)] * RANKS

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.given[self.own.rank] = tensor
        self.barrier.wait()
        given = list(self.given)
        self.barrier.wait()
        return given

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.exchange(tensor), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return sum(self.exchange(tensor), torch.zeros(())).chunk(RANKS, dim)[self.own.rank].clone()

    def chunk(self, tensor: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(tensor, (0, 0, 0, -tensor.shape[0] % RANKS))
        return padded.chunk(RANKS)[self.own.rank].clone()

    def names(self) -> dict[str, Any]:
        """What loop and layers call."""
        return {
            **loop_names(),
            "DeepseekAttention": int,
            "DeepseekV2MLP": int,
            "get_tensor_model_parallel_world_size": lambda: RANKS,
            "tensor_model_parallel_all_gather": self.all_gather,
            "tensor_model_parallel_reduce_scatter": self.reduce_scatter,
            "sequence_parallel_chunk": self.chunk,
        }


def norm(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """Any function of a row."""
    if residual is None:
        return x.tanh()
    return (x + residual).tanh(), x + residual


def outputs(
    ranks: Ranks, loop: Callable[..., Any], layer_forward: Callable[..., Any], tokens: int, shards: bool = True
) -> list[list[torch.Tensor]]:
    """Each rank's final (T, H) states and those that it captures before layers 0 to 5 and at the end."""
    hidden_size = 4

    def attention(sharded: bool) -> Callable[..., torch.Tensor]:
        """Any function of a row and those before it, of which a rank computes its heads' part."""

        def heads(positions: torch.Tensor, hidden: torch.Tensor, scaling: Any) -> torch.Tensor:
            mixed = hidden.cumsum(0) / torch.arange(1.0, len(hidden) + 1).unsqueeze(1)
            part = mixed * (0.25, 0.75)[ranks.own.rank]
            return part if sharded else sum(ranks.exchange(part), torch.zeros(()))

        return heads

    class Layer(SimpleNamespace):
        def __call__(self, *args: Any) -> Any:
            return layer_forward(self, *args)

    layers = [
        Layer(
            use_mha=False,
            use_sequence_parallel_moe=sharded,
            routed_scaling_factor=1.0,
            layer_idx=index,
            self_attn=attention(sharded),
            input_layernorm=norm,
            post_attention_layernorm=norm,
            mlp=lambda hidden, already_sequence_parallel=False: hidden * 1.5 + 0.25,
        )
        for index, sharded in enumerate(shards and leaves_a_shard for leaves_a_shard in SHARDED)
    ]
    embeds = torch.arange(1.0, tokens * hidden_size + 1).reshape(tokens, hidden_size).sin()
    model = SimpleNamespace(
        layers=layers,
        start_layer=0,
        end_layer=len(layers),
        aux_hidden_state_layers=tuple(range(1, len(layers) + 1)),
        config=SimpleNamespace(),
        embed_input_ids=lambda ids: embeds.clone(),
        norm=norm,
        hidden_size=hidden_size,
    )

    def rank(number: int) -> list[torch.Tensor]:
        ranks.own.rank = number
        hidden, captured = loop(model, torch.zeros(tokens, dtype=torch.long), torch.arange(tokens), None, None)
        return [hidden, *captured]

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    """Whether all ranks of both have the same states."""
    return all(
        a.shape == b.shape and torch.allclose(a, b)
        for mine, yours in zip(one, other, strict=True)
        for a, b in zip(mine, yours, strict=True)
    )
