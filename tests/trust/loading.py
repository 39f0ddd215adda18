# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: how a server's processes load the overlay, one scenario a process, on the real vLLM.

    python loading.py JOB.json RESULT.json

The job holds ``config`` (a pickled configuration of a server of ours), ``plugins`` (a folder with other people's
plugins) and ``scenarios``. Scenarios that are forked come from a process that has imported all that vLLM imports, but
nothing of vLLM: seconds each are saved, and vLLM itself is imported anew in every one. Spawned ones get a fresh
interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

GATED = ("vllm.config.vllm", "vllm.config.speculative", "vllm.v1.worker.worker_base")
SECONDS = 600


def load(scenario: dict[str, Any], answer: dict[str, Any]) -> None:
    """vLLM's own loader, as often as the scenario says."""
    from vllm.plugins import load_general_plugins

    def again() -> None:
        from vllm_kimi_eagle3.plugin import register

        register()

    try:
        load_general_plugins()
    except RuntimeError as error:
        answer["loader"] = str(error)
    if scenario["registered"] == "twice":
        again()
    elif scenario["registered"] == "threads":
        threads = [threading.Thread(target=again) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def other_plugin(scenario: dict[str, Any], job: dict[str, Any]) -> None:
    """Install the other plugin, so that it is found before ours or after it."""
    kind, _, order = scenario["other"].partition(" ")
    if kind != "none":
        folder = str(Path(job["plugins"]) / kind)
        sys.path.insert(0, folder) if order == "first" else sys.path.append(folder)


def prepare(scenario: dict[str, Any], job: dict[str, Any], answer: dict[str, Any]) -> None:
    """Import vLLM and load its plugins, in the scenario's order."""
    other_plugin(scenario, job)
    if scenario["imported"] == "during":
        done: list[str] = []

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            # The code of a module is executed: it lies in sys.modules, and none of its names is there.
            if event == "exec" and not done:
                file = getattr(arguments[0], "co_filename", "")
                if file.endswith(("vllm/config/speculative.py", "vllm/config/vllm.py")):
                    done.append(file)
                    load(scenario, answer)

        sys.addaudithook(hook)
    if scenario["imported"] == "after":
        load(scenario, answer)
    for name in GATED:
        importlib.import_module(name)
    if scenario["imported"] == "before":
        load(scenario, answer)
    for late in getattr(sys, "other_plugin_waits", []):
        late()


def chain(function: Any) -> Iterator[Any]:
    """A function and all that it wraps."""
    while function is not None:
        yield function
        closure = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        inner = [value for value in closure if callable(value)]
        function = getattr(function, "__wrapped__", None) or (inner[0] if inner else None)


def state() -> dict[str, Any]:
    """How often each gate is ours, what is wrong with it, and whether the other plugin is in the way."""
    activation = sys.modules.get("vllm_kimi_eagle3.activation")
    if activation is None:
        return {"gates": None}
    found: dict[str, Any] = {"gates": {}, "theirs": 0}
    for gate in activation._GATES:
        owner = getattr(importlib.import_module(gate.module), gate._class_name)
        links = list(chain(vars(owner)[gate._attribute]))
        ours = [link for link in links if getattr(link, "_self_wrapper", None) == gate._pass]
        found["gates"][gate._attribute + " of " + gate._class_name] = [len(ours), gate.problem]
        named = [link.__module__ for link in links if type(link) is FunctionType]
        found["theirs"] += sum(str(name).startswith("other_plugin") for name in named)
    return found


def serve(scenario: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """What a process does with the server's configuration, and what came of it."""
    answer: dict[str, Any] = {"error": None}
    try:
        config = pickle.loads(Path(job["config"]).read_bytes())
        if scenario["process"] == "worker":
            from vllm.v1.worker.worker_base import WorkerWrapperBase

            arguments = {"local_rank": 0, "rank": 0, "distributed_init_method": "", "is_driver_worker": True}
            WorkerWrapperBase(rpc_rank=0).init_worker([{"vllm_config": config, **arguments}])
        else:
            from vllm_kimi_eagle3.activation import prepare_worker

            prepare_worker(config)
    except ValueError as error:
        answer["error"] = str(error)
    answer.update(state())
    from vllm_kimi_eagle3 import activation

    answer["states"] = {s.fix.id: s.state.value for s in activation.ENGINE.statuses()}
    answer["patched"] = sorted(activation.ENGINE.patcher.patched())
    answer["late"] = shadow(activation, config)
    return answer


def shadow(activation: Any, config: Any) -> dict[str, Any]:
    """Somebody replaces what a fix has replaced: it is reported, and never undone."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def theirs(self: Any, *arguments: Any) -> None:
        """Theirs."""

    RotaryEmbedding.forward_cpu = theirs
    answer: dict[str, Any] = {"error": None}
    try:
        activation.prepare_worker(config)
    except ValueError as error:
        answer["error"] = str(error)
    answer["states"] = [s.fix.id for s in activation.ENGINE.statuses() if s.state.value == "SHADOWED"]
    answer["left"] = activation.remove()
    answer["theirs"] = RotaryEmbedding.forward_cpu is theirs
    answer["gates"] = [gate._wrapper is not None for gate in activation._GATES]
    return answer


def play(scenario: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """One scenario in this process and, where it is another's, in a process that is made from it."""
    answer: dict[str, Any] = {}
    if scenario["process"] == "registry" and scenario["start"] == "fork":
        answer["registry"] = forked(lambda: registry_process(scenario, job))
    prepare(scenario, job, answer)
    if scenario["process"] == "registry" and scenario["start"] == "spawn":
        from vllm.model_executor.models.registry import _run_in_subprocess

        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        try:
            answer["registry"] = _run_in_subprocess(registry_state)
        except RuntimeError as error:
            answer["registry"] = {"loader": str(error)}
    if scenario["process"] in ("engine core", "worker") and scenario["start"] == "fork":
        return {**answer, **forked(lambda: serve(scenario, job))}
    return {**answer, **serve(scenario, job)}


def registry_process(scenario: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's registry runs in its subprocess, in a fork that has imported nothing of vLLM."""
    other_plugin(scenario, job)
    from vllm.model_executor.models.registry import _run

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        sys.stdin = SimpleNamespace(buffer=BytesIO(pickle.dumps((registry_state, str(out)))))  # type: ignore[assignment]
        try:
            _run()
        except RuntimeError as error:
            return {"loader": str(error)}
        return pickle.loads(out.read_bytes())


def registry_state() -> dict[str, Any]:
    """In the registry's subprocess: the gates wait for their modules, and nothing is patched."""
    from vllm_kimi_eagle3 import activation

    for name in GATED:
        importlib.import_module(name)
    return {**state(), "patched": activation.ENGINE.patcher.patched()}


def forked(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            text = json.dumps(call())
        except BaseException:
            text = json.dumps({"raised": traceback.format_exc()[-3000:]})
        with contextlib.suppress(OSError), os.fdopen(write, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"raised": "it died"}


def main(job_file: str, result_file: str) -> None:
    """Play all scenarios."""
    job = json.loads(Path(job_file).read_text())
    if "only" in job:
        Path(result_file).write_text(json.dumps(play(job["only"], job)))
        return

    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from zygote import import_what_vllm_imports

    sys.path.pop()
    import_what_vllm_imports((*GATED, "vllm.engine.arg_utils"))
    results: list[dict[str, Any]] = []
    for scenario in job["scenarios"]:
        if scenario["start"] == "spawn":
            file, out = f"{result_file}.job", f"{result_file}.one"
            Path(file).write_text(json.dumps({**job, "only": scenario}))
            Path(out).write_text(json.dumps({"raised": "it died"}))
            try:
                done = subprocess.run(
                    [sys.executable, __file__, file, out], capture_output=True, text=True, timeout=SECONDS
                )
                answer = json.loads(Path(out).read_text())
                if done.returncode:
                    answer["raised"] = done.stderr[-2000:]
            except subprocess.TimeoutExpired:
                answer = {"raised": f"it did not end within {SECONDS} seconds"}
        else:
            answer = forked(lambda scenario=scenario: play(scenario, job))
        results.append(answer)
        Path(result_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
