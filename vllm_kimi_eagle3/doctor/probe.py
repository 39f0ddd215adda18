# SPDX-License-Identifier: Apache-2.0
"""Runs in a clean child process, by its path: load vLLM's plugins as a server does, and report what came of it.

    python probe.py REQUEST.json REPORT.json

It imports nothing of ours by itself: whether vLLM's own loader does is the question. The request may hold ``server``
(arguments of vLLM's ``EngineArgs``): then that server is configured as ``vllm serve`` would do it, without a weight
being read, and the configuration is handed, pickled, to a further process that does what a worker does
before it loads the model. Every stage that fails is reported, and the later ones still run where they can.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import json
import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAME = "vllm-kimi-eagle3"
PLUGIN = "kimi_eagle3"
GROUP = "vllm.general_plugins"
WORKER_SECONDS = 300


def worded(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}" if text else type(error).__name__


def distributions() -> list[dict[str, Any]]:
    """Every installed distribution of ours, in the order of ``sys.path``: the first one is the one Python takes."""
    found: list[dict[str, Any]] = []
    for distribution in metadata.distributions(name=NAME):
        try:
            direct = json.loads(distribution.read_text("direct_url.json") or "{}")
        except ValueError:
            direct = {}
        found.append(
            {
                "version": distribution.version,
                "location": str(getattr(distribution, "_path", distribution.locate_file(""))),
                "root": str(distribution.locate_file("")),
                "editable": direct.get("url") if direct.get("dir_info", {}).get("editable") else None,
                "registers": any(point.group == GROUP and point.name == PLUGIN for point in distribution.entry_points),
            }
        )
    return found


def plugins() -> list[dict[str, str]]:
    """What vLLM's loader will find."""
    points = metadata.entry_points(group=GROUP)
    return [
        {"name": point.name, "value": point.value, "distribution": str(point.dist.name if point.dist else "unknown")}
        for point in points
    ]


class Recorder(logging.Handler):
    """Keeps what vLLM logs as an error while it loads plugins, which it then swallows."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[dict[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record and, in one line, the exception behind it."""
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + (f" ({worded(error)})" if error else "")
        self.records.append({"logger": record.name, "level": record.levelname, "message": text[:800]})


def load_plugins(report: dict[str, Any]) -> bool:
    """vLLM's own loader, with what it logs."""
    recorder = Recorder()
    try:
        import vllm
        from vllm.plugins import load_general_plugins
    except BaseException as error:
        report["vllm_import"] = worded(error)
        return False
    report["vllm_file"] = str(vllm.__file__)
    names = ("vllm.plugins", "vllm", "vllm.kimi_eagle3")
    for name in names:
        logging.getLogger(name).addHandler(recorder)
    try:
        load_general_plugins()
    except BaseException as error:
        report["loader"] = worded(error)
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(recorder)
    report["logged"] = list({entry["message"]: entry for entry in recorder.records}.values())
    return True


def origin(function: Any) -> dict[str, Any]:
    """Who wrote what is found at a place: the chain of wrappers, outermost first, by file and module."""
    chain: list[dict[str, str]] = []
    for _ in range(16):
        code = getattr(function, "__code__", None)
        look = getattr(function, "_self_wrapper", None)  # a wrapt wrapper's own function
        if look is not None:
            code = getattr(look, "__code__", None)
        chain.append(
            {
                "module": str(getattr(look or function, "__module__", None)),
                "file": str(code.co_filename) if code is not None else "",
            }
        )
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return {"chain": chain}


def at(target: str) -> Any:
    """The object at ``package.module:Qual.name``, not bound; imports the module."""
    module, _, qualname = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = qualname.split(".")
    for name in parents:
        owner = getattr(owner, name)
    found = vars(owner).get(attribute, getattr(owner, attribute, None))
    return getattr(found, "__func__", getattr(found, "fget", None) or found)


def overlay(report: dict[str, Any]) -> Any:
    """The overlay's own account, if vLLM's loader has brought it in."""
    module = sys.modules.get("vllm_kimi_eagle3")
    report["overlay_file"] = str(module.__file__) if module is not None else None
    report["overlay_version"] = getattr(module, "__version__", None)
    activation = sys.modules.get("vllm_kimi_eagle3.activation")
    report["active"] = activation is not None
    return activation


def gates(activation: Any, report: dict[str, Any]) -> None:
    """Import what the gates sit in, and say for each whether it is in place."""
    report["gates"] = []
    for gate in activation._GATES:
        place = f"{gate.module}:{gate._class_name}.{gate._attribute}"
        entry: dict[str, Any] = {"place": place, "error": None}
        try:
            entry.update(origin(at(place)))
        except BaseException as error:
            entry.update(error=worded(error), chain=[])
        entry["error"] = gate.error or entry["error"]
        report["gates"].append(entry)


def statuses(activation: Any) -> list[dict[str, str]]:
    """Every fix's state in this process."""
    return [
        {"id": s.fix.id, "name": s.fix.name, "state": s.state.value, "reason": s.reason}
        for s in activation.ENGINE.statuses()
    ]


def needed(activation: Any, report: dict[str, Any]) -> None:
    """Which fixes a server of each target would need on this platform, and whose code they would replace."""
    from vllm_kimi_eagle3.patching.spec import Context

    try:
        from vllm.platforms import current_platform

        platform = str(current_platform.device_type)
    except BaseException as error:
        report["platform_error"] = worded(error)
        return
    report["platform"] = platform
    report["needed"] = {}
    wanted: dict[str, Any] = {}
    for architecture in sorted(activation.TARGETS):
        context = Context(target_architecture=architecture, platform=platform, eagle3=True)
        fixes = activation.ENGINE.needed(context)
        report["needed"][architecture] = [fix.label for fix in fixes]
        wanted.update({fix.label: fix for fix in fixes})
    report["targets"] = []
    for fix in wanted.values():
        for target in fix.targets:
            try:
                report["targets"].append({"fix": fix.label, "place": target, **origin(at(target))})
            except BaseException as error:
                # A target may be built at run time, or need what this machine has not; the fix itself will say so.
                report["targets"].append({"fix": fix.label, "place": target, "chain": [], "error": worded(error)})


def configure(arguments: dict[str, Any], report: dict[str, Any]) -> Any:
    """Configure a server as ``vllm serve`` does."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        config = EngineArgs(**arguments).create_engine_config()
    except BaseException as error:
        report["server_error"] = worded(error)
        return None
    record = config.additional_config.get("kimi_eagle3", {}) if isinstance(config.additional_config, dict) else {}
    report["server"] = {"plan": record.get("plan"), "fixes": record.get("fixes")}
    return config


def worker(config: Any, report: dict[str, Any], folder: Path) -> None:
    """Hand the configuration to a process of its own, as the engine core and the workers get it."""
    pickled, answer = folder / "config.pickle", folder / "worker.json"
    try:
        pickled.write_bytes(pickle.dumps(config))
        done = subprocess.run(
            [sys.executable, __file__, "--worker", str(pickled), str(answer)],
            capture_output=True,
            text=True,
            timeout=WORKER_SECONDS,
        )
        if not answer.exists():
            report["worker_error"] = f"it ended with code {done.returncode}: {done.stderr.strip()[-400:]}"
            return
        report["worker"] = json.loads(answer.read_text())
    except BaseException as error:
        report["worker_error"] = worded(error)


def run_worker(pickled: str, answer: str) -> None:
    """The other end: a spawned process loads plugins, unpickles its configuration and prepares for the model."""
    report: dict[str, Any] = {}
    if load_plugins(report):
        activation = overlay(report)
        if activation is not None:
            try:
                config = pickle.loads(Path(pickled).read_bytes())
                activation.prepare_worker(config)
            except BaseException as error:
                report["error"] = worded(error)
            report["fixes"] = statuses(activation)
    Path(answer).write_text(json.dumps(report))


def main(request_file: str, report_file: str) -> None:
    """One report; written after every stage, so that a crash of the interpreter leaves what was known by then."""
    request: dict[str, Any] = json.loads(Path(request_file).read_text())
    started = time.monotonic()
    report: dict[str, Any] = {"python": sys.version.split()[0], "executable": sys.executable, "pid": os.getpid()}
    path = Path(report_file)

    def save() -> None:
        path.write_text(json.dumps(report))

    report["distributions"], report["plugins"] = distributions(), plugins()
    save()
    try:
        loaded = load_plugins(report)
        save()
        activation = overlay(report) if loaded else None
        if loaded and activation is None and request.get("import_overlay"):
            # vLLM did not bring it in: find out whether it could have.
            try:
                importlib.import_module("vllm_kimi_eagle3.plugin")
                importlib.import_module("vllm_kimi_eagle3.activation")
            except BaseException as error:
                report["overlay_import"] = worded(error)
        if activation is not None:
            gates(activation, report)
            report["fixes"] = statuses(activation)
            save()
            needed(activation, report)
            save()
            if request.get("server"):
                config = configure(request["server"], report)
                report["fixes"] = statuses(activation)
                save()
                if config is not None:
                    worker(config, report, path.parent)
    except BaseException as error:
        report["probe_error"] = worded(error)
    report["seconds"] = round(time.monotonic() - started, 1)
    save()


if __name__ == "__main__":
    # Run by path, so this script's folder leads sys.path: a server does not have that.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    if sys.argv[1] == "--worker":
        run_worker(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
