# SPDX-License-Identifier: Apache-2.0
"""Runs in its own process: every single fix made to fail in every way, on the real vLLM's configuration code.

    python failing_fixes.py MODELS.json RESULT.json

``MODELS.json`` names folders: ``ours``, ``drafter``, ``plain``, ``plain_drafter``. The result holds, for each case, how
our server started in each mode, what was logged, and whether vLLM's namespaces were afterwards as before; for servers
of others, what they look like while every fix of ours fails; and what undoing in any order left behind.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from vllm_kimi_eagle3 import activation
from vllm_kimi_eagle3.patching.engine import Engine
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, State, Verdict
from vllm_kimi_eagle3.registry import FIXES

VICTIMS = ("vllm.config.speculative:SpeculativeConfig.compute_hash", "vllm.config.vllm:VllmConfig.compute_hash")


def unknown_shape(tree: SourceTree) -> Verdict:
    return Verdict(Need.REFUSED, "its source has a shape of another world")


def raising(*_: Any) -> Any:
    raise ZeroDivisionError("on\npurpose")


def missing(tree: SourceTree) -> Verdict:
    return Verdict(Need.APPLY, tree.text("vllm.no_such_module:nothing"))


def needed(tree: SourceTree) -> Verdict:
    return Verdict(Need.APPLY, "needed")


def half(installer: Installer) -> None:
    installer.replace(VICTIMS[0], lambda self: "half")
    installer.replace(VICTIMS[1], lambda self: "half")
    installer.replace("vllm.config.vllm:VllmConfig.no_such_method", None)


FAILURES: dict[str, dict[str, Any]] = {
    "unknown shape": {"probe": unknown_shape},
    "exception in probe": {"probe": raising},
    "missing module": {"probe": missing},
    "exception in apply": {"probe": needed, "install": raising},
    "half applied": {"probe": needed, "install": half},
    "exception in configure": {"probe": needed, "install": None, "configure": raising},
}


class Log(logging.Handler):
    """What vLLM and the overlay warn of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def start(self) -> None:
        """Listen from now on; vLLM sets up its loggers again and again."""
        self.lines.clear()
        logger = logging.getLogger("vllm.kimi_eagle3")
        if self not in logger.handlers:
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def namespaces() -> dict[int, tuple[Any, ...]]:
    """Every vLLM module and class with what hangs in it: keys in order, objects by identity, MRO, code."""
    found: dict[int, tuple[Any, ...]] = {}
    waiting: list[Any] = [m for name, m in sorted(sys.modules.items()) if name.partition(".")[0] == "vllm"]
    waiting = [m for m in waiting if isinstance(m, ModuleType)]
    while waiting:
        owner = waiting.pop()
        if id(owner) in found:
            continue
        # A submodule that is imported meanwhile becomes an attribute of its package: nobody's patch.
        items = [(key, value) for key, value in list(vars(owner).items()) if not isinstance(value, ModuleType)]
        entries = tuple((key, id(value)) for key, value in items)
        codes = tuple(id(value.__code__) for _, value in items if isinstance(value, FunctionType))
        found[id(owner)] = (owner, entries, codes, getattr(owner, "__mro__", None))
        waiting += [v for _, v in items if isinstance(v, type) and v.__module__.partition(".")[0] == "vllm"]
    return found


def changed(before: dict[int, tuple[Any, ...]]) -> list[str]:
    """Where a namespace is no longer what it was."""
    after = namespaces()
    return [
        f"{owner.__name__}: {sorted(set(entries) ^ set(after[key][1]))[:4]}"
        for key, (owner, entries, codes, mro) in before.items()
        if after[key][1:] != (entries, codes, mro)
    ]


def main(models_file: str, result_file: str) -> None:
    """Run all cases and write what was seen."""
    models = json.loads(Path(models_file).read_text())
    log = Log()
    common = {"dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.1}

    def ours() -> Any:
        speculative = {"method": "eagle3", "model": models["drafter"], "num_speculative_tokens": 3}
        return EngineArgs(model=models["ours"], speculative_config=speculative, **common).create_engine_config()

    def same_again() -> Any:
        """Lead one configuration past the gates as vLLM does, without building it anew: 20 times as fast."""
        gates: Any = activation
        base.additional_config = {}
        gates._speculative_config_gate(lambda: None, base.speculative_config, (), {})
        gates._vllm_config_gate(lambda: None, base, (), {})
        return base

    def start(configured: Callable[[], Any]) -> dict[str, Any]:
        log.start()
        error = None
        try:
            activation.prepare_worker(configured())
        except ValueError as problem:
            error = str(problem)
        return {"error": error, "warnings": [line for line in log.lines if "vllm-kimi-eagle3" in line]}

    def with_fixes(fixes: tuple[Fix, ...]) -> None:
        activation.ENGINE = Engine(fixes)
        activation.ENGINE._verdicts.update({fix.label: real.verdict(fix) for fix in FIXES if fix in fixes})

    real = activation.ENGINE
    base = ours()
    activation.prepare_worker(base)  # what vLLM itself imports and sets for good, it does now
    assert real.revert() == []
    result: dict[str, Any] = {"cases": [], "changed": {}, "others": {}}

    with_fixes(FIXES)
    result["sound"] = [start(ours), start(same_again)]
    activation.ENGINE.revert()

    for number, fix in enumerate(FIXES):
        before = namespaces()
        whole = fix.id in ("D18", "D6", "C2")  # one of each phase
        for failure, change in FAILURES.items():
            failing = dataclasses.replace(fix, wanted=lambda context: True, **change)
            case: dict[str, Any] = {"fix": fix.label, "failure": failure}
            for mode in ("on", "warn"):
                os.environ["VLLM_KIMI_EAGLE3"] = mode
                with_fixes((*FIXES[:number], failing, *FIXES[number + 1 :]))
                case[mode] = [start(ours if whole else same_again) for _ in range(2)]
                assert activation.ENGINE.revert() == []
            result["cases"].append(case)
        result["changed"][fix.label] = changed(before)
    os.environ["VLLM_KIMI_EAGLE3"] = "on"

    others = {
        "plain": {"model": models["plain"]},
        "plain with eagle3": {
            "model": models["plain"],
            "speculative_config": {"method": "eagle3", "model": models["plain_drafter"], "num_speculative_tokens": 3},
        },
    }
    for name, arguments in others.items():
        seen: list[dict[str, Any]] = []
        for gates in (True, False):
            activation.install_gates() if gates else activation.remove()
            with_fixes(tuple(dataclasses.replace(fix, probe=raising, install=raising) for fix in FIXES))
            log.start()
            config = EngineArgs(**arguments, **common).create_engine_config()
            activation.prepare_worker(config)
            seen.append(
                {
                    "key": config.compute_hash(),
                    "additional": config.additional_config,
                    "patched": activation.ENGINE.patcher.patched(),
                    "said": [line for line in log.lines if "kimi" in line],
                }
            )
        result["others"][name] = seen
    activation.install_gates()
    result["reversible"] = reversible()
    result["configure"] = one_server_of_two(ours)
    result["odd additional_config"] = odd_additional_config(models, common, log)
    Path(result_file).write_text(json.dumps(result))


def reversible() -> dict[str, Any]:
    """Install all fixes that this vLLM needs and some more, in random orders; undo them in other random orders."""
    installable = [f for f in FIXES if f.install is not None and Engine(FIXES).verdict(f).need is Need.APPLY]
    generator = random.Random(7)
    orders: list[dict[str, Any]] = []
    assert activation.remove() == []
    before = namespaces()
    surface = described(before)
    for _ in range(12):
        engine = Engine(tuple(installable))
        activation.install_gates()
        for fix in generator.sample(installable, len(installable)):
            engine._install(fix)
        states = {s.fix.id: s.state for s in engine.statuses()}
        touched = len(changed(before))
        for fix in generator.sample(installable, len(installable)):
            assert engine.patcher.revert(fix.label) == []
        assert activation.remove() == []
        orders.append(
            {
                "applied": sorted(key for key, state in states.items() if state is State.APPLIED),
                "touched": touched,
                "changed": changed(before),
                "described": described(before) == surface,
            }
        )
    activation.install_gates()
    return {"fixes": sorted(f.id for f in installable), "orders": orders}


def described(spaces: dict[int, tuple[Any, ...]]) -> list[str]:
    """What the functions that we touch look like from outside: signature, name, and their pickle."""
    targets = {target for fix in FIXES for target in fix.targets}
    lines: list[str] = []
    for owner, *_ in spaces.values():
        module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
        prefix = f"{module}:" if isinstance(owner, ModuleType) else f"{module}:{owner.__qualname__}."
        for key, value in list(vars(owner).items()):
            if prefix + key in targets:
                function = getattr(value, "__func__", value)
                lines.append(f"{prefix}{key} {inspect.signature(function)} {pickle.dumps(function).hex()}")
    return sorted(set(lines))


def one_server_of_two(ours: Callable[[], Any]) -> dict[str, Any]:
    """A fix that is installed and configures; it fails for the second server, and the first one needs it still."""
    asked: list[int] = []

    def install(installer: Installer) -> None:
        installer.replace(VICTIMS[0], lambda self: "ours")

    def configure(context: Any) -> None:
        asked.append(1)
        if len(asked) == 2:
            raise KeyError("only here")

    (fix,) = (f for f in FIXES if f.id == "D6")
    both = dataclasses.replace(fix, install=install, configure=configure, probe=needed)
    activation.ENGINE = Engine(tuple(both if f is fix else f for f in FIXES))
    answers: list[str | None] = []
    for _ in range(3):
        try:
            ours()
            answers.append(None)
        except ValueError as error:
            answers.append(str(error))
    installed = [p for p in activation.ENGINE.patcher.patched() if "SpeculativeConfig.compute_hash" in p]
    activation.ENGINE.revert()
    activation.ENGINE = Engine(FIXES)
    return {"answers": answers, "installed": installed}


class Hashed:
    """What vLLM takes for ``additional_config`` besides a dictionary."""

    def compute_hash(self) -> str:
        """vLLM's protocol."""
        return "hash"


def odd_additional_config(models: dict[str, str], common: dict[str, Any], log: Log) -> dict[str, Any]:
    """Our target with something in ``additional_config`` that is no choice of ours, with and without EAGLE-3."""
    from vllm.config import VllmConfig

    speculative = {"method": "eagle3", "model": models["drafter"], "num_speculative_tokens": 3}
    stale = {"version": "0.1.0", "plan": {"boundaries": [2, 5, 7]}, "fixes": []}
    odd: dict[str, Any] = {
        "a word": {"kimi_eagle3": "output"},
        "an unknown key": {"kimi_eagle3": {"layers": [1]}},
        "a key that is no word": {"kimi_eagle3": {7: 1, "x": 2}},
        "a plan from elsewhere": {"kimi_eagle3": stale},
        "an object": Hashed(),
    }
    answers: dict[str, Any] = {}
    for name, additional in odd.items():
        for eagle3 in (True, False):
            log.start()
            arguments = {"speculative_config": speculative} if eagle3 else {}
            answer: dict[str, Any] = {"error": None}
            try:
                if isinstance(additional, Hashed):  # arguments can't hold one, the configuration can
                    whole = EngineArgs(model=models["ours"], **arguments, **common).create_engine_config()
                    fields = {"model_config": whole.model_config, "speculative_config": whole.speculative_config}
                    config = VllmConfig(**fields, additional_config=additional)
                else:
                    config = EngineArgs(
                        model=models["ours"], additional_config=additional, **arguments, **common
                    ).create_engine_config()
                activation.prepare_worker(config)
            except ValueError as error:
                answer["error"] = str(error)
            answer["warnings"] = [line for line in log.lines if "additional_config" in line]
            answer["applied"] = activation.ENGINE.patcher.patched() != []
            assert activation.ENGINE.revert() == []
            answers[f"{name}, {'eagle3' if eagle3 else 'plain'}"] = answer
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:])
