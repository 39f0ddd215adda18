# SPDX-License-Identifier: Apache-2.0
"""How vLLM loads the overlay, each case in a process of its own, through the installed entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vllm_kimi_eagle3.tiny_kimi.materialize import materialize

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
    + "from vllm_kimi_eagle3.activation import _WATCH_GATE\n"
    + "assert not _WATCH_GATE._enabled, 'nobody asked for the watch'\n"
)


def run(code: str, *arguments: str, **env: str) -> str:
    """Run code in a fresh interpreter; returns its output, or fails with it."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
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


BROKEN = "import sys\nsys.modules['vllm_kimi_eagle3.activation'] = None\n"
CONFIGURE = """
import json
from vllm.engine.arg_utils import EngineArgs
target, drafter = sys.argv[1:]
spec = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
def configure(**more):
    return EngineArgs(model=target, dtype="float32", max_model_len=256, **more).create_engine_config()
"""


def test_a_broken_overlay_refuses_our_servers_and_only_ours(tmp_path: Path) -> None:
    pair = materialize(tmp_path / "pair")
    folders = (str(pair["deepseek_v3"]), str(pair["eagle3_gqa_boundary"]))
    out = run(
        BROKEN
        + CONFIGURE
        + "configure()\nprint('plain: started')\n"
        + "try:\n    configure(speculative_config=spec)\nexcept ValueError as error:\n    print('refused:', error)\n"
        + "from vllm_kimi_eagle3.plugin import register; register()\n"
        + "from vllm.config.speculative import SpeculativeConfig\n"
        + "guard = vars(SpeculativeConfig)['__post_init__']\n"
        + "assert guard._kimi_eagle3_refuses and not hasattr(guard.__wrapped__, '_kimi_eagle3_refuses')\n",
        *folders,
    )
    assert "plain: started" in out
    assert "vllm-kimi-eagle3 could not install itself (ModuleNotFoundError" in out.partition("refused:")[2]
    # The negative control: with a sound overlay the same server is configured.
    assert "refused" not in run("import sys\n" + CONFIGURE + "configure(speculative_config=spec)\n", *folders)
