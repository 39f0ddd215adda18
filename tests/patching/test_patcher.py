# SPDX-License-Identifier: Apache-2.0
"""Replacing and restoring attributes: what is undone must leave no trace, and what others did must stay."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterator

import pytest

from vllm_kimi_eagle3.patching.patcher import PatchConflict, Patcher

SOURCE = """
class Base:
    def method(self):
        return "base"

    @staticmethod
    def static(x):
        return x

class Child(Base):
    def own(self):
        return "own"

def function():
    return ["llama", "qwen", "minicpm"]

captured = [function]
"""


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A fresh importable module, and a second one that took a name from it."""
    made = types.ModuleType("patched_module")
    exec(SOURCE, made.__dict__)
    for item in (made.Base, made.Child, made.function):  # type: ignore[attr-defined]
        item.__module__ = "patched_module"
    other = types.ModuleType("importing_module")
    other.function = made.function  # type: ignore[attr-defined]
    sys.modules |= {"patched_module": made, "importing_module": other}
    yield made
    del sys.modules["patched_module"], sys.modules["importing_module"]


def snapshot(module: types.ModuleType) -> dict[str, dict[str, int]]:
    """Identities of everything in the namespaces that are touched."""
    spaces = {"module": vars(module), "Base": vars(module.Base), "Child": vars(module.Child)}
    spaces["other"] = vars(sys.modules["importing_module"])
    found = {name: {k: id(v) for k, v in space.items()} for name, space in spaces.items()}
    found["code"] = {"function": id(module.function.__code__)}
    return found


def apply(patcher: Patcher, which: str) -> None:
    def ours(*args: object) -> str:
        return f"ours {which}"

    installer = patcher.for_fix(which)
    if which == "owned":
        installer.replace("patched_module:Child.own", ours)
    elif which == "inherited":
        installer.replace("patched_module:Child.method", ours)
    elif which == "static":
        installer.replace("patched_module:Base.static", staticmethod(ours))
    elif which == "alias":
        aliases = ("importing_module:function", "never_imported:function")
        installer.replace("patched_module:function", ours, aliases=aliases)
    elif which == "created":
        installer.replace("patched_module:vars", ours, create=True)


FIXES = ("owned", "inherited", "static", "alias", "created")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_apply_and_revert_leaves_no_trace(module: types.ModuleType, order: tuple[int, ...]) -> None:
    before = snapshot(module)
    patcher = Patcher()
    for which in FIXES:
        apply(patcher, which)
    assert module.Child().own() == "ours owned"
    assert module.Child().method() == "ours inherited"
    assert module.Base().method() == "base"
    assert module.Base.static(1) == "ours static"
    assert sys.modules["importing_module"].function() == "ours alias"
    assert module.vars() == "ours created"
    assert snapshot(module) != before
    for index in order:
        assert patcher.revert(FIXES[index]) == []
    assert patcher.revert() == []
    assert snapshot(module) == before
    assert "method" not in vars(module.Child)
    assert patcher.patched() == []


def test_two_fixes_may_not_want_one_target(module: types.ModuleType) -> None:
    patcher = Patcher()
    apply(patcher, "owned")
    with pytest.raises(PatchConflict, match="already patched by owned"):
        patcher.for_fix("second").replace("patched_module:Child.own", lambda self: "second")
    assert module.Child().own() == "ours owned"


def test_a_missing_target_is_a_conflict(module: types.ModuleType) -> None:
    del module
    with pytest.raises(PatchConflict, match="does not exist"):
        Patcher().for_fix("x").replace("patched_module:Child.absent", None)
    with pytest.raises(PatchConflict, match="no Absent in patched_module"):
        Patcher().for_fix("x").replace("patched_module:Absent.method", None)


def test_what_others_put_over_ours_is_reported_and_stays(module: types.ModuleType) -> None:
    patcher = Patcher()
    apply(patcher, "owned")
    assert patcher.shadowed("owned") == []

    def theirs(self: object) -> str:
        return "theirs"

    module.Child.own = theirs
    assert patcher.shadowed("owned") == ["patched_module:Child.own"]
    assert len(patcher.revert()) == 1
    assert module.Child().own() == "theirs"


def test_code_is_swapped_for_everybody_who_captured_the_function(module: types.ModuleType) -> None:
    before = snapshot(module)
    patcher = Patcher()
    code = module.function.__code__
    consts = tuple((*c, "kimi") if isinstance(c, tuple) else c for c in code.co_consts)
    patcher.for_fix("code").replace_code(module.function, code.replace(co_consts=consts))
    assert "kimi" in module.captured[0]()
    with pytest.raises(PatchConflict, match="already patched by code"):
        patcher.for_fix("second").replace_code(module.function, code)
    assert patcher.revert() == []
    assert "kimi" not in module.captured[0]()
    assert snapshot(module) == before
