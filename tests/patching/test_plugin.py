# SPDX-License-Identifier: Apache-2.0
"""How vLLM loads the overlay, each case in a process of its own, through the installed entry point."""

from __future__ import annotations

import os
import subprocess
import sys

LOAD = "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
GATES = """
import wrapt
from vllm.config.speculative import SpeculativeConfig
from vllm.config.vllm import VllmConfig
from vllm.v1.worker.worker_base import WorkerWrapperBase
gates = [vars(SpeculativeConfig)["__post_init__"], vars(VllmConfig)["__post_init__"],
         vars(WorkerWrapperBase)["init_worker"], vars(WorkerWrapperBase)["init_device"]]
"""
PLAIN = GATES + "assert not any(isinstance(g, wrapt.FunctionWrapper) for g in gates)\n"
GATED = (
    GATES
    + "assert all(isinstance(g, wrapt.FunctionWrapper) for g in gates)\n"
    + "assert not any(isinstance(g.__wrapped__, wrapt.FunctionWrapper) for g in gates), 'wrapped twice'\n"
    + "from vllm_kimi_eagle3.activation import ENGINE\n"
    + "assert ENGINE.patcher.patched() == []\n"
)


def run(code: str, **env: str) -> str:
    """Run code in a fresh interpreter; returns its output, or fails with it."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VLLM_KIMI_EAGLE3": "on", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_importing_the_package_and_its_entry_point_imports_neither_torch_nor_vllm() -> None:
    run(
        "import sys, vllm_kimi_eagle3, vllm_kimi_eagle3.plugin\n"
        "assert not {'torch', 'vllm', 'wrapt'} & set(sys.modules), sorted(sys.modules)\n"
    )


def test_vllm_itself_loads_the_gates_and_nothing_else() -> None:
    run(LOAD + GATED)
    run(PLAIN)  # the negative control: without vLLM's loader there are no gates


def test_targets_imported_before_the_plugin_end_the_same() -> None:
    run("import vllm.v1.worker.worker_base\n" + LOAD + GATED)


def test_registering_again_and_from_threads_wraps_once() -> None:
    run(
        LOAD
        + "import threading\nfrom vllm_kimi_eagle3.plugin import register\n"
        + "threads = [threading.Thread(target=register) for _ in range(8)]\n"
        + "[t.start() for t in threads]; [t.join() for t in threads]; register()\n"
        + GATED
    )


def test_the_kill_switch_leaves_no_gate() -> None:
    run(LOAD + PLAIN, VLLM_KIMI_EAGLE3="off")


def test_vllms_own_filter_leaves_no_gate() -> None:
    run(LOAD + PLAIN, VLLM_PLUGINS="somebody_else")


def test_removing_the_gates_restores_every_method() -> None:
    run(
        GATES
        + "before = list(gates)\n"
        + LOAD
        + "from vllm_kimi_eagle3 import activation\nassert activation.remove() == []\n"
        + GATES
        + "assert all(a is b for a, b in zip(before, gates))\n"
    )


def test_a_broken_overlay_refuses_our_servers_and_only_ours() -> None:
    out = run(
        "import sys\nsys.modules['vllm_kimi_eagle3.activation'] = None\n"
        + LOAD
        + """
import types
from vllm.config.speculative import SpeculativeConfig
from vllm_kimi_eagle3 import plugin
plugin.register()  # a second time: still one guard
gate = vars(SpeculativeConfig)["__post_init__"]
assert gate._kimi_eagle3_refuses and not hasattr(gate.__wrapped__, "_kimi_eagle3_refuses")
config = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)
assert config.method == "ngram"
config.method = "eagle3"
config.target_model_config = types.SimpleNamespace(hf_config=types.SimpleNamespace(architectures=["LlamaForCausalLM"]))
original, calls = gate.__wrapped__, []
from unittest import mock
cell = gate.__closure__[gate.__code__.co_freevars.index("original")]
with mock.patch.object(cell, "cell_contents", lambda self: calls.append(self)):
    gate(config)
    config.target_model_config.hf_config.architectures = ["KimiK25ForConditionalGeneration"]
    try:
        gate(config)
    except ValueError as error:
        print("refused:", error)
assert len(calls) == 2
"""
    )
    assert "refused: vllm-kimi-eagle3 could not install itself" in out
