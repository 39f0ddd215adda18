# SPDX-License-Identifier: Apache-2.0
"""Replace attributes of live modules and classes, remember what was there, and put it back.

Everything that the overlay changes goes through one :class:`Patcher`. It lets only one fix have a target, so that what
it saves is never another fix's replacement; it tells an attribute that a class owned from one that it inherited, so
that undoing leaves the namespace as it was; and it never undoes what somebody else has put on top of ours.

What it cannot do: find references that others took before (``from module import name``). A fix names those it knows as
aliases.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

_MISSING = object()


class PatchConflict(RuntimeError):
    """A target cannot be patched: it is not there, or somebody else's replacement is in the way."""


@dataclass
class _Slot:
    """One replaced attribute: who owns it, what was there, what we put there, and for which fix."""

    owner: Any
    attribute: str
    original: Any
    """What stood in the owner's own namespace, or ``_MISSING`` where the attribute was inherited or absent."""
    ours: Any
    fix: str


@dataclass
class _CodeSlot:
    """A function whose code object we swapped; for functions that others have captured."""

    function: FunctionType
    original: CodeType
    ours: CodeType
    fix: str


class Patcher:
    """Applies replacements for fixes and undoes them. Thread-safe."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._code_slots: list[_CodeSlot] = []
        self._lock = threading.RLock()

    def for_fix(self, label: str) -> Installer:
        """The view of this patcher that a fix's ``install`` works through."""
        return Installer(self, label)

    def original(self, target: str) -> Any:
        """What ``package.module:Qual.name`` was before the overlay touched it; a descriptor is not bound."""
        owner, attribute = _resolve(target)
        with self._lock:
            for slot in self._slots:
                if slot.owner is owner and slot.attribute == attribute and slot.original is not _MISSING:
                    return slot.original
        return inspect.getattr_static(owner, attribute)

    def revert(self, label: str | None = None) -> list[str]:
        """Undo one fix's replacements, or all. Returns what could not be undone, one sentence each.

        What somebody else has put over ours stays: taking it away would break them, and putting the original back
        would silently disable them.
        """
        left: list[str] = []
        with self._lock:
            for code_slot in reversed(self._code_slots[:]):
                if label not in (None, code_slot.fix):
                    continue
                if code_slot.function.__code__ is not code_slot.ours:
                    left.append(f"{code_slot.function.__qualname__} was changed again after us; left as it is")
                    continue
                _set_code(code_slot.function, code_slot.original)
                self._code_slots.remove(code_slot)
            for slot in reversed(self._slots[:]):
                if label not in (None, slot.fix):
                    continue
                if vars(slot.owner).get(slot.attribute, _MISSING) is not slot.ours:
                    left.append(f"{_describe(slot)} was replaced by somebody else; left as it is")
                    continue
                if slot.original is _MISSING:
                    delattr(slot.owner, slot.attribute)
                else:
                    setattr(slot.owner, slot.attribute, slot.original)
                self._slots.remove(slot)
        return left

    def shadowed(self, label: str) -> list[str]:
        """Which of a fix's replacements are no longer in place, because somebody replaced them after us."""
        with self._lock:
            lost = [
                _describe(slot)
                for slot in self._slots
                if slot.fix == label and vars(slot.owner).get(slot.attribute, _MISSING) is not slot.ours
            ]
            lost += [
                f"{slot.function.__module__}:{slot.function.__qualname__}"
                for slot in self._code_slots
                if slot.fix == label and slot.function.__code__ is not slot.ours
            ]
        return lost

    def patched(self) -> list[str]:
        """Every attribute that holds something of ours, as ``package.module:Qual.name``."""
        with self._lock:
            return [_describe(slot) for slot in self._slots] + [
                f"{slot.function.__module__}:{slot.function.__qualname__}" for slot in self._code_slots
            ]

    def put(self, fix: str, owner: Any, attribute: str, new: Any) -> None:
        """Replace one attribute for a fix; :meth:`Installer.replace` is the way in for fixes."""
        with self._lock:
            self._put(fix, owner, attribute, new)

    def put_code(self, fix: str, function: FunctionType, code: CodeType) -> None:
        """Swap one function's code for a fix; :meth:`Installer.replace_code` is the way in for fixes."""
        with self._lock:
            for slot in self._code_slots:
                if slot.function is function:  # pyright: ignore[reportUnnecessaryComparison]
                    name = function.__qualname__
                    raise PatchConflict(f"{name} is already patched by {slot.fix}; two fixes want one target")
            original = function.__code__
            _set_code(function, code)
            self._code_slots.append(_CodeSlot(function, original, code, fix))

    def _put(self, fix: str, owner: Any, attribute: str, new: Any) -> None:
        for slot in self._slots:
            if slot.owner is owner and slot.attribute == attribute:
                raise PatchConflict(f"{_describe(slot)} is already patched by {slot.fix}; two fixes want one target")
        original = vars(owner).get(attribute, _MISSING)
        setattr(owner, attribute, new)
        # A class may store what it is given in another form; compare later with what it really holds.
        ours = vars(owner).get(attribute, _MISSING)
        self._slots.append(_Slot(owner, attribute, original, ours, fix))


@dataclass(frozen=True)
class Installer:
    """What a fix's ``install`` is given: replacements made through it belong to that fix."""

    patcher: Patcher
    fix: str

    def original(self, target: str) -> Any:
        """See :meth:`Patcher.original`."""
        return self.patcher.original(target)

    def replace(self, target: str, new: Any, *, aliases: tuple[str, ...] = (), create: bool = False) -> None:
        """Put ``new`` at ``package.module:Qual.name`` and at those aliases that hold the same object.

        Args:
            target: the attribute; its module is imported when it is not yet.
            new: a plain function, staticmethod, property or value. Never a wrapt proxy where Dynamo may trace it.
            aliases: further places that may hold a reference to the original, rebound only if they do. An alias
                module that was not imported so far is left alone: it will import the replacement.
            create: allow a target that does not exist.

        Raises:
            PatchConflict: the target is missing and ``create`` is not set, or another fix of ours holds it.
        """
        owner, attribute = _resolve(target)
        current = inspect.getattr_static(owner, attribute, _MISSING)
        if current is _MISSING and not create:
            raise PatchConflict(f"{target} does not exist in this vLLM")
        self.patcher.put(self.fix, owner, attribute, new)
        for alias in aliases:
            if alias.partition(":")[0] not in sys.modules:
                continue
            alias_owner, alias_attribute = _resolve(alias)
            if inspect.getattr_static(alias_owner, alias_attribute, _MISSING) is current:
                self.patcher.put(self.fix, alias_owner, alias_attribute, new)

    def replace_code(self, function: FunctionType, code: CodeType) -> None:
        """Swap a function's code in place, so that everybody who captured the function runs the new code."""
        self.patcher.put_code(self.fix, function, code)


def _resolve(target: str) -> tuple[Any, str]:
    """The object that holds a target, and the attribute's name; imports the module."""
    module, _, qualname = target.partition(":")
    *parents, attribute = qualname.split(".")
    owner: Any = importlib.import_module(module)
    for name in parents:
        if not hasattr(owner, name):
            raise PatchConflict(f"{target} does not exist in this vLLM: no {name} in {module}")
        owner = getattr(owner, name)
    return owner, attribute


def _set_code(function: Any, code: CodeType) -> None:
    function.__code__ = code


def _describe(slot: _Slot) -> str:
    if inspect.isclass(slot.owner):
        return f"{slot.owner.__module__}:{slot.owner.__qualname__}.{slot.attribute}"
    return f"{slot.owner.__name__}:{slot.attribute}"
