# SPDX-License-Identifier: Apache-2.0
"""A folder for PYTHONPATH: vLLM with states sharded between layers, on two ranks and on the CPU engine too.

vLLM shards them with experts, tensor and data parallel together: four ranks. Everything that it has for it takes tensor
parallel alone as well, but for the one property that is replaced here, unless ``KIMI_EAGLE3_FORCE_SHARDS`` is ``0``.

The CPU engine lacks two things for it, which CUDA's has: its kernel of experts takes no map from all experts to its own
(and reads beyond its weights), and its communicator knows no rows of unequal number.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import wrapt


@functools.cache  # once a process
def _tell(what: str) -> None:
    print(what, flush=True)


@wrapt.when_imported("vllm.config.parallel")
def _without_data_parallel(module: Any) -> None:
    if os.environ.get("KIMI_EAGLE3_FORCE_SHARDS") != "0":
        module.ParallelConfig.use_sequence_parallel_moe = property(
            lambda self: self.enable_expert_parallel and self.tensor_parallel_size > 1
        )


@wrapt.when_imported("vllm.model_executor.models.deepseek_v2")
def _tell_of_layers(module: Any) -> None:
    def built(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        if getattr(instance, "use_sequence_parallel_moe", False):  # releases before 0.25.0 have none
            _tell("sequence parallel: a layer leaves a shard")

    # Its forward is traced by torch.compile, which looks through a wrapper.
    wrapt.wrap_function_wrapper(module, "DeepseekV2DecoderLayer.__init__", built)


@wrapt.when_imported("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
def _own_experts_only(module: Any) -> None:
    experts = module.CPUUnquantizedExperts
    original, names = experts.apply, list(inspect.signature(experts.apply).parameters)

    def apply(*args: Any, **kwargs: Any) -> Any:  # no wrapper of wrapt's, which torch.compile looks through
        given = dict(zip(names, args, strict=False)) | kwargs
        if given["expert_map"] is not None:
            own = given["expert_map"][given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0.0)
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
        return original(**given)

    experts.apply = apply


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
