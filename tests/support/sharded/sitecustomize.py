# SPDX-License-Identifier: Apache-2.0
"""A folder for PYTHONPATH: vLLM with states sharded between layers, on two ranks and on the CPU engine too.

vLLM shards them with experts, tensor and data parallel together: four ranks. Everything that it has for it takes tensor
parallel alone as well, but for the one property that is replaced here, unless ``KIMI_EAGLE3_FORCE_SHARDS`` is ``0``.

The CPU engine lacks two things for it, which CUDA's has: its kernel of experts takes no map from all experts to its own
(and reads beyond its weights), and its communicator knows no rows of unequal number.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import wrapt


def _told(what: str, _said: set[str] = set()) -> None:  # noqa: B006 - once a process
    if what not in _said:
        _said.add(what)
        print(what, flush=True)


@wrapt.when_imported("vllm.config.parallel")
def _without_data_parallel(module: Any) -> None:
    if os.environ.get("KIMI_EAGLE3_FORCE_SHARDS") != "0":
        module.ParallelConfig.use_sequence_parallel_moe = property(
            lambda self: self.enable_expert_parallel and self.tensor_parallel_size > 1
        )


@wrapt.when_imported("vllm.model_executor.models.deepseek_v2")
def _tell(module: Any) -> None:
    def chunk(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        _told("sequence parallel: a rank keeps a shard")
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "sequence_parallel_chunk", chunk)


@wrapt.when_imported("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
def _own_experts_only(module: Any) -> None:
    def apply(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        given = inspect.signature(wrapped).bind(*args, **kwargs)
        arguments = given.arguments
        if arguments["expert_map"] is not None:
            own = arguments["expert_map"][arguments["topk_ids"].long()]
            arguments["topk_weights"] = arguments["topk_weights"].masked_fill(own < 0, 0.0)
            arguments["topk_ids"] = own.clamp(min=0).to(arguments["topk_ids"].dtype)
        return wrapped(*given.args, **given.kwargs)

    wrapt.wrap_function_wrapper(module, "CPUUnquantizedExperts.apply", apply)


@wrapt.when_imported("vllm.distributed.device_communicators.cpu_communicator")
def _unequal_rows(module: Any) -> None:
    import torch

    def gathered(self: Any, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        sizes = sizes or [rows.shape[0]] * self.world_size
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, torch.Tensor):
            return gathered(self, input_, sizes)
        return [gathered(self, rows, sizes) for rows in input_]

    def reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        whole = input_.clone()
        torch.distributed.all_reduce(whole, group=self.device_group)
        return whole.split(sizes)[self.rank_in_group].contiguous()

    module.CpuCommunicator.all_gatherv = all_gatherv
    module.CpuCommunicator.reduce_scatterv = reduce_scatterv
