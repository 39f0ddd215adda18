# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: one of our targets in vLLM's CPU engine, seen as a drafter would see it.

    python probe_target.py JOB.json RESULT.pt

The CPU engine of 0.15 to 0.19 refuses speculation, so the two halves are looked at apart: the configuration of a server
that speculates is built by vLLM, with the overlay's gates on its way; then the target alone is started, told the
boundaries of that configuration's plan as the runner tells it, and what it returns is kept. Last, the drafter is loaded
onto it by either runner's own code, as far as the release has it.

Nothing here mends anything: what the overlay does not do is not done.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


@contextlib.contextmanager
def noting(result: dict[str, Any], key: str) -> Iterator[None]:
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

    original = CPUModelRunner.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        result["supports_eagle3"] = bool(supports_eagle3(self.model))
        if not result["supports_eagle3"]:
            return
        self.model.set_aux_hidden_state_layers(boundaries)
        self.use_aux_hidden_state_outputs = True
        inner: Any = self.model

        def keep(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            if isinstance(out, tuple):
                ids = kwargs.get("input_ids")
                seen.append(
                    {
                        "ids": None if ids is None else ids.clone(),
                        "positions": kwargs["positions"].clone(),
                        "states": [state.clone() for state in out[1]],
                    }
                )

        inner.register_forward_hook(keep, with_kwargs=True)

    CPUModelRunner.load_model = load_model


def load_drafter(config: Any, runner: Any, result: dict[str, Any]) -> None:
    """Both runners' own loading of a drafter onto the target in this process."""
    head = runner.model
    for name in ("language_model", "lm_head"):
        head = getattr(head, name, head)
    with noting(result, "V1 drafter error"), set_current_vllm_config(config):
        from vllm.v1.spec_decode.eagle import EagleProposer

        proposer: Any = EagleProposer(config, torch.device("cpu"), runner)
        proposer.load_model(runner.model)
        result["V1 shares lm_head"] = proposer.model.lm_head is head
    config.compilation_config.static_forward_context.clear()
    with noting(result, "V2 drafter error"), set_current_vllm_config(config):
        from vllm.v1.worker.gpu.spec_decode.eagle import speculator

        model: Any = speculator.load_eagle_model(runner.model, config)
        result["V2 shares lm_head"] = model.lm_head is head


def main(job_file: str, result_file: str) -> None:
    """Run the job and write what was seen."""
    job = json.loads(Path(job_file).read_text())
    result: dict[str, Any] = {"vllm": vllm.__version__}
    seen: list[dict[str, Any]] = []
    if job.get("cuda_device_is_cpu"):
        # 0.15's Kimi-K2.5 asks for the CUDA device by name, whatever the platform.
        torch.cuda.current_device = lambda: "cpu"
    config = None
    with noting(result, "config error"):
        config = speculating_config(job["engine"], job["drafter"])
        result["plan"] = config.additional_config["kimi_eagle3"]["plan"]
    with noting(result, "mla config error"):
        speculating_config(job["engine"], job["mla_drafter"])
    activation = sys.modules.get("vllm_kimi_eagle3.activation")
    if activation is not None and config is not None:
        activation.prepare_worker(config)
    tell_layers(tuple(job["boundaries"]), seen, result)
    llm = LLM(**job["engine"])
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    seen.clear()
    outputs = llm.generate([{"prompt_token_ids": job["prompt"]}], params, use_tqdm=False)
    result["output_ids"] = list(outputs[0].outputs[0].token_ids)
    result["seen"] = seen
    if config is not None:
        load_drafter(config, getattr(runner, "_runner", runner), result)
    if activation is not None:
        result["states"] = {s.fix.label: s.state.value for s in activation.ENGINE.statuses()}
        result["patched"] = activation.ENGINE.patcher.patched()
    torch.save(result, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
