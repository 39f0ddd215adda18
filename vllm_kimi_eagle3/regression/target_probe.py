# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: one of our targets in vLLM's CPU engine, seen as a drafter would see it.

    python -m vllm_kimi_eagle3.regression.target_probe JOB.json RESULT.pt

The CPU engine of 0.15 to 0.19 refuses speculation, so the two halves are looked at apart: the configuration of a server
that speculates is built by vLLM, with the overlay's gates on its way; then the target alone is started, told the
boundaries that are asked for as the runner tells it, and what it returns is kept. Last, the drafter is loaded onto it
by either runner's own code, as far as the release has it.

Nothing here mends anything: what neither the overlay nor vLLM's own source does is not done.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_kimi_eagle3.regression.observe import embeddings_change


@contextlib.contextmanager
def noting(result: dict[str, Any], key: str) -> Generator[None]:
    """Keep an error instead of raising it: a test may want to see it."""
    try:
        yield
    except Exception as error:
        result[key] = f"{type(error).__name__}: {error}"
        result[f"{key} traceback"] = traceback.format_exc()


def speculating_config(engine: dict[str, Any], drafter: str) -> Any:
    """The configuration of a server on this target that speculates with EAGLE-3."""
    speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
    return EngineArgs(**engine, speculative_config=speculative).create_engine_config()


def tell_layers(boundaries: tuple[int, ...], seen: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """Let the runner do to a target it loads what it does when a drafter reads it, and keep what comes out."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    runner: Any = CPUModelRunner
    original = runner.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        result["supports_eagle3"] = bool(supports_eagle3(self.model))
        if not result["supports_eagle3"]:
            return
        self.model.set_aux_hidden_state_layers(boundaries)
        self.use_aux_hidden_state_outputs = True

        def keep(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            if isinstance(out, tuple):
                ids = kwargs.get("input_ids")
                states: Any = out[1]
                seen.append(
                    {
                        "ids": None if ids is None else ids.clone(),
                        "positions": kwargs["positions"].clone(),
                        "states": [state.clone() for state in states],
                    }
                )

        self.model.register_forward_hook(keep, with_kwargs=True)

    runner.load_model = load_model


def load_drafter(config: Any, target: Any, result: dict[str, Any]) -> None:
    """Both runners' own loading of a drafter onto the target in this process."""
    head: Any = target
    for name in ("language_model", "lm_head"):
        head = getattr(head, name, head)
    if not hasattr(head, "weight"):
        head = target.lm_head  # 0.15's Kimi-K2.5
    config.compilation_config.static_forward_context.clear()
    with noting(result, "V1 error"), set_current_vllm_config(config):
        from vllm.v1.spec_decode.eagle import EagleProposer

        make: Any = EagleProposer
        proposer: Any = make(config, torch.device("cpu"), None)
        proposer.load_model(target)
        result["V1 shares lm_head"] = proposer.model.lm_head is head
        if hasattr(proposer, "initialize_attn_backend"):
            result["V1 block size"] = draft_block_size(proposer)
    config.compilation_config.static_forward_context.clear()
    with noting(result, "V2 error"), set_current_vllm_config(config):
        from vllm.v1.worker.gpu.spec_decode.eagle import utils

        result["V2 shares lm_head"] = utils.load_eagle_model(target, config).lm_head is head


def draft_block_size(proposer: Any) -> int:
    """What the proposer multiplies slots with, for a manager's blocks of 64 tokens and a kernel's of 32."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    layers = sorted(proposer._draft_attn_layer_names)
    spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=torch.float32)
    group = KVCacheGroupSpec(layer_names=layers, kv_cache_spec=spec)
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group])
    proposer.initialize_attn_backend(cache, kernel_block_sizes=[32])
    own = getattr(proposer, "block_size", None)
    return own if own is not None else proposer.draft_attn_groups[0].kv_cache_spec.block_size


def asked_backends(config: Any, target: Any) -> list[str]:
    """Which attention backend V2 asks the platform for while it builds a drafter, when the user forced an MLA one."""
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    asked: list[str] = []
    platform: Any = type(current_platform)
    choose: Any = selector
    original = platform.get_attn_backend_cls

    def ask(backend: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(str(backend and backend.name))
        return original(None, *args, **kwargs)

    platform.get_attn_backend_cls = staticmethod(ask)
    choose._cached_get_attn_backend.cache_clear()
    config.compilation_config.static_forward_context.clear()
    config.attention_config.backend = AttentionBackendEnum.TRITON_MLA
    try:
        with set_current_vllm_config(config):
            utils.load_eagle_model(target, config)
        assert config.attention_config.backend is AttentionBackendEnum.TRITON_MLA, "the target's choice is gone"
    finally:
        platform.get_attn_backend_cls = original
        choose._cached_get_attn_backend.cache_clear()
        config.attention_config.backend = None
    return asked


def with_and_without(activation: Any, config: Any, target: Any, result: dict[str, Any]) -> None:
    """Load the drafter as things are; then, where the overlay is, without its fixes that concern the loading."""
    # A worker builds the target from the configuration that D4 gave another name to; here they are two.
    own, target.config = target.config, config.model_config.hf_config
    result["drafter"], result["drafter without"] = {}, {}
    load_drafter(config, target, result["drafter"])
    target.config = own
    if config.model_config.use_mla:
        with noting(result, "backends error"):
            result["backends"] = asked_backends(config, target)
    if activation is None:
        return
    for fix in activation.ENGINE.fixes:
        if fix.id in ("D5", "D10", "D12", "D15"):
            activation.ENGINE.patcher.revert(fix.label)
    load_drafter(config, target, result["drafter without"])
    if config.model_config.use_mla:
        with noting(result, "backends without error"):
            result["backends without"] = asked_backends(config, target)


def main(job_file: str, result_file: str) -> None:
    """Run the job and write what was seen."""
    job = json.loads(Path(job_file).read_text())
    result: dict[str, Any] = {"vllm": vllm.__version__}
    seen: list[dict[str, Any]] = []
    if job.get("cuda_device_is_cpu"):
        # 0.15's Kimi-K2.5 asks for the CUDA device by name, whatever the platform.
        device: Any = torch.cuda
        device.current_device = lambda: "cpu"
    config: Any = None
    with noting(result, "config error"):
        config = speculating_config(job["engine"], job["drafter"])
        result["plan"] = config.additional_config.get("kimi_eagle3", {}).get("plan")
    with noting(result, "mla config error"):
        speculating_config(job["engine"], job["mla_drafter"])
    activation = sys.modules.get("vllm_kimi_eagle3.activation")
    if activation is not None and config is not None:
        activation.prepare_worker(config)
    tell_layers(tuple(job["boundaries"]), seen, result)
    llm: Any = LLM(**job["engine"])
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    seen.clear()
    prompts = [{"prompt_token_ids": job["prompt"]}]
    result["output_ids"] = list(llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids)
    result["seen"] = list(seen)
    if "other_boundaries" in job and result["supports_eagle3"]:
        seen.clear()
        runner.model.set_aux_hidden_state_layers(tuple(job["other_boundaries"]))
        with noting(result, "other boundaries error"):
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
        result["seen at other boundaries"] = list(seen)
        runner.model.set_aux_hidden_state_layers(tuple(job["boundaries"]))
    if job["engine"]["dtype"] == "float16":
        result["embeddings change"] = embeddings_change(runner)
    if activation is not None:
        result["states"] = {s.fix.label: s.state.value for s in activation.ENGINE.statuses()}
        result["patched"] = activation.ENGINE.patcher.patched()
        for label in job.get("revert", []):
            activation.ENGINE.patcher.revert(label)
            seen.clear()
            llm.generate(prompts, params, use_tqdm=False)
            result[f"seen without {label}"] = list(seen)
    if config is not None and job["load_drafter"]:
        with_and_without(activation, config, runner.model, result)
    torch.save(result, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
