# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.30.0's dispatchers of Triton kernels, compiled from its source, with values that tell where they arrive."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

HELPER = "vllm/model_executor/warmup/jit_warmup_triton_helper.py"
WRAPPERS = "vllm/utils/cpu_triton_utils.py"
NAMES: dict[str, Any] = {"torch": SimpleNamespace(float64="float64"), "MAX_SPEC_LEN": 128}
"""What the dispatchers' bodies use of their modules."""
ONLY_FOR_THE_GRID = {"input_batch_size", "max_spec_len"}


class Value:
    """An argument that knows the parameter it was given for."""

    shape = (2, 3)
    dtype = "float32"

    def __init__(self, name: str) -> None:
        self.name = name


def path(target: str) -> tuple[str, str]:
    """The file and the name of ``package.module:name``."""
    module, _, name = target.partition(":")
    return module.replace(".", "/") + ".py", name


def dispatcher(get: Callable[..., Any], target: str, kernel: str) -> Any:
    """A dispatcher as its decorator makes it; ``get(path, name, owner, **names)`` compiles a definition."""
    file, name = path(target)
    owner = "VllmTritonJitKernel"
    plan = get(HELPER, "_launch_binding_plan", _LaunchBindingPlan=_Plan)

    class Dispatcher:
        _warming = False
        _kernel_arg_names = property(get(HELPER, "_kernel_arg_names", owner, inspect=inspect))
        _prepare_launch_kwargs = get(HELPER, "_prepare_launch_kwargs", owner, _launch_binding_plan=plan)
        launch = get(HELPER, "launch", owner)
        __call__ = get(HELPER, "__call__", "_DecoratedTritonJitKernel")

    made: Any = Dispatcher()
    made.kernel = get(file, kernel)
    made._dispatch_fn = get(file, name, **NAMES)
    made._dispatch_arg_names = tuple(inspect.signature(made._dispatch_fn).parameters)
    made._dispatch_defaults = {}
    return made


def wrapper(get: Callable[..., Any], kernel: str, seen: list[dict[str, Any]]) -> Any:
    """The C++ kernel of that name as its module wraps it; what arrives is noted, and nothing computed."""
    function = get(WRAPPERS, f"_{kernel}_impl")

    @functools.wraps(function)
    def note(*args: Any, **kwargs: Any) -> None:
        seen.append(inspect.signature(function).bind(*args, **kwargs).arguments)

    return get(WRAPPERS, "_FuncWrapper")(note)


def launch(made: Any) -> list[str]:
    """Call a dispatcher as its callers do; returns the parameters that it was given a value for."""
    parameters = inspect.signature(made._dispatch_fn).parameters.values()
    positional = [Value(p.name) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    made(*positional, **{p.name: Value(p.name) for p in parameters if p.kind is p.KEYWORD_ONLY})
    return [p.name for p in parameters]


def arrived(arguments: dict[str, Any], given: list[str]) -> None:
    """Every value is at the parameter that is its own, whatever that is called there."""
    renamed = {"stride": "block_table_stride", "input_val": "input"}
    found = {name: value.name for name, value in arguments.items() if isinstance(value, Value)}
    assert all(renamed.get(name, name) == value for name, value in found.items())
    assert set(given) - set(found.values()) <= ONLY_FOR_THE_GRID


class _Plan(SimpleNamespace):
    def __init__(self, input_targets: Any, stride_targets: Any) -> None:
        super().__init__(input_targets=input_targets, stride_targets=stride_targets)
