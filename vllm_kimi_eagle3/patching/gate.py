# SPDX-License-Identifier: Apache-2.0
"""A gate: a method of vLLM's that looks at each configuration before it does its work, and passes through.

The wrapper is wrapt's, so the method keeps its signature and name. Gates are for set-up code only; nothing that Dynamo
traces may be wrapped like this.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import wrapt

_WRAPPER_TYPES = (wrapt.FunctionWrapper, wrapt.BoundFunctionWrapper)
_WRAPPERS = 64
"""How many functions are looked through, ours among them."""


class Gate:
    """One method of vLLM's that looks at each configuration before it does its work."""

    def __init__(self, module: str, class_name: str, attribute: str, look: Callable[..., Any]) -> None:
        self.module = module
        self._class_name = class_name
        self._attribute = attribute
        self._look = look
        self._original: Any = None
        self._wrapper: Any = None
        self._hooked = False
        self._enabled = False
        self._lock = threading.RLock()
        self.error: str | None = None
        """Why the method cannot be wrapped."""

    def install(self) -> None:
        """Wrap the method now, or as soon as its module is imported. Idempotent and thread-safe."""
        with self._lock:
            self._enabled = True
            module = sys.modules.get(self.module)
            if module is None and not self._hooked:
                # A hook cannot be taken back; after remove() it finds the gate disabled.
                self._hooked = True
                wrapt.register_post_import_hook(self._wrap, self.module)
            elif module is not None and not _when_imported(module, self.install):
                self._wrap(module)

    def _wrap(self, module: Any) -> None:
        # Must not raise: an error in an import hook fails the import, for everybody.
        with self._lock:
            if self._wrapper is not None or not self._enabled:
                return
            try:
                owner = getattr(module, self._class_name)
                original = vars(owner)[self._attribute]
                wrapper = wrapt.FunctionWrapper(original, self._pass)
                setattr(owner, self._attribute, wrapper)
                self._original, self._wrapper = original, wrapper
                self.error = None  # a first try may have met the module half imported
            except Exception as error:
                what = f"{self.module}.{self._class_name}.{self._attribute}"
                self.error = f"{what} cannot be wrapped ({type(error).__name__}: {error})"

    def _pass(self, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        # Where somebody has wrapped the wrapper, it stays after remove(), and must do nothing.
        if not self._enabled:
            return wrapped(*args, **kwargs)
        return self._look(wrapped, instance, args, kwargs)

    @property
    def problem(self) -> str | None:
        """Why configurations do not come by here, in one sentence; None when they do, or its module is not imported.

        A wrapper that somebody has put over ours is no problem, as far as it can be seen to hold ours.
        """
        with self._lock:
            if self._wrapper is None or self.error is not None:
                return self.error
            found = vars(getattr(sys.modules[self.module], self._class_name)).get(self._attribute)
            if _holds(found, self._wrapper):
                return None
            return f"{self.module}.{self._class_name}.{self._attribute} was replaced after us by somebody else"

    def remove(self) -> list[str]:
        """Put the original back, unless somebody has wrapped the wrapper: then say so, in a list of one."""
        with self._lock:
            self._enabled = False
            return [] if self._wrapper is None else self._unwrap()

    def _unwrap(self) -> list[str]:
        owner = getattr(sys.modules[self.module], self._class_name)
        if vars(owner).get(self._attribute) is not self._wrapper:
            return [f"{self._class_name}.{self._attribute} was replaced by somebody else; left as it is"]
        setattr(owner, self._attribute, self._original)
        self._wrapper = None
        return []


class _Importing(ModuleSpec):
    """The specification of a module that is being imported, until the import system says that it is done."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            spec: Any = self
            spec.__class__ = ModuleSpec
            for call in spec.__dict__.pop("_kimi_eagle3_waiting"):
                call()


def _when_imported(module: Any, call: Callable[[], None]) -> bool:
    """Call later, if the module is still being imported; False if it is not, or nobody can tell.

    A plugin may be loaded by an import that is under way. No hook of wrapt's comes then: the module is already in
    ``sys.modules``, half made. What always comes is the import system's note in the module's specification.
    """
    spec: Any = getattr(module, "__spec__", None)
    if type(spec) not in (ModuleSpec, _Importing) or not getattr(spec, "_initializing", False):
        return False
    spec.__class__ = _Importing
    spec.__dict__.setdefault("_kimi_eagle3_waiting", []).append(call)
    return bool(spec._initializing)  # another thread may have finished it by now


def _holds(function: Any, wrapper: Any) -> bool:
    """Whether ``function`` is ``wrapper``, or visibly leads to it."""
    waiting, seen = [function], [function]
    while waiting and len(seen) <= _WRAPPERS:
        found = waiting.pop()
        if found is wrapper:
            return True
        for inner in _inner(found):
            if not any(inner is known for known in seen):
                waiting.append(inner)
                seen.append(inner)
    return False


def _inner(function: Any) -> Iterator[Any]:
    """What a function may wrap: by its attribute, as a partial, or as a name of its closure or its module."""
    # Taken from its class, a wrapper of wrapt's comes bound: _self_parent is the one that lies in the class.
    attributes = ("__wrapped__", "func", "__func__", "_self_parent")
    yield from (value for name in attributes if (value := getattr(function, name, None)) is not None)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            if callable(cell.cell_contents):
                yield cell.cell_contents
    names = getattr(function, "__globals__", {})
    yield from (names[name] for name in code.co_names if isinstance(names.get(name), _WRAPPER_TYPES))
