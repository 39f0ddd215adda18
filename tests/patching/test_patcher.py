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
        aliases = ("never_imported:function", "importing_module:function", "never_imported:other")
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
    with pytest.raises(PatchConflict, match=r"^function is already patched by code; two fixes want one target$"):
        patcher.for_fix("second").replace_code(module.function, code)
    assert patcher.revert() == []
    assert "kimi" not in module.captured[0]()
    assert snapshot(module) == before


def test_the_original_is_what_stood_there(module: types.ModuleType) -> None:
    patcher = Patcher()
    own, static, method = (vars(module.Child)["own"], vars(module.Base)["static"], module.Base.method)
    apply(patcher, "owned")
    apply(patcher, "inherited")
    installer = patcher.for_fix("any")
    assert (installer.fix, installer.patcher) == ("any", patcher)
    assert installer.original("patched_module:Child.own") is own
    assert installer.original("patched_module:Base.static") is static
    # An inherited attribute has no original of its own: what stands there now is ours.
    assert patcher.original("patched_module:Child.method") is vars(module.Child)["method"]
    assert patcher.original("patched_module:Base.method") is method
    assert patcher.original("patched_module:function") is module.function
    with pytest.raises(AttributeError):
        patcher.original("patched_module:Child.absent")


def test_everything_of_ours_is_listed_by_name(module: types.ModuleType) -> None:
    patcher = Patcher()
    for which in FIXES:
        apply(patcher, which)
    code = module.captured[0].__code__
    patcher.for_fix("code").replace_code(module.captured[0], code.replace(co_name="ours"))
    assert patcher.patched() == [
        "patched_module:Child.own",
        "patched_module:Child.method",
        "patched_module:Base.static",
        "patched_module:function",
        "importing_module:function",
        "patched_module:vars",
        "patched_module:function",
    ]
    assert patcher.shadowed("owned") == patcher.shadowed("code") == []
    module.captured[0].__code__ = code
    del module.Child.own
    assert patcher.shadowed("code") == ["patched_module:function"]
    assert patcher.shadowed("owned") == ["patched_module:Child.own"]
    assert patcher.shadowed("alias") == []
    assert patcher.revert("code") == ["function was changed again after us; left as it is"]
    assert patcher.revert("owned") == ["patched_module:Child.own was replaced by somebody else; left as it is"]
    assert patcher.revert("owned") != [], "what is not ours stays on the list"
    assert module.captured[0].__code__ is code
    assert len(patcher.revert()) == 2


def test_one_fix_is_undone_and_the_others_stay(module: types.ModuleType) -> None:
    patcher = Patcher()
    code = module.captured[0].__code__
    for which in ("owned", "static"):
        apply(patcher, which)
    patcher.for_fix("code").replace_code(module.captured[0], code.replace(co_name="ours"))
    assert patcher.revert("static") == []
    assert module.Child().own() == "ours owned" and module.Base.static(1) == 1
    assert module.captured[0].__code__.co_name == "ours"
    assert patcher.revert("code") == [] and module.captured[0].__code__ is code
    assert patcher.patched() == ["patched_module:Child.own"]


def test_the_first_fix_is_undone_below_later_ones(module: types.ModuleType) -> None:
    def other() -> str:
        return "other"

    function, codes = module.function, (module.captured[0].__code__, other.__code__)
    patcher = Patcher()
    apply(patcher, "alias")
    patcher.for_fix("code").replace_code(module.captured[0], codes[0].replace(co_name="ours"))
    apply(patcher, "owned")
    patcher.for_fix("later code").replace_code(other, codes[1].replace(co_name="ours"))
    assert patcher.revert("alias") == []
    assert module.function is function and sys.modules["importing_module"].function is function
    assert patcher.revert("code") == [] and module.captured[0].__code__ is codes[0]
    assert patcher.patched() == ["patched_module:Child.own", f"{__name__}:{other.__qualname__}"]
    assert patcher.revert() == [] and other.__code__ is codes[1]


def test_none_is_a_value_and_its_absence_is_somebody_s_doing(module: types.ModuleType) -> None:
    patcher = Patcher()
    patcher.for_fix("none").replace("patched_module:function", None)
    assert patcher.shadowed("none") == []
    del module.function
    assert patcher.shadowed("none") == ["patched_module:function"]
    assert patcher.revert() == ["patched_module:function was replaced by somebody else; left as it is"]
    module.nothing = None  # type: ignore[attr-defined]
    patcher.for_fix("value").replace("patched_module:nothing", 1, aliases=("importing_module:nothing",))
    assert not hasattr(sys.modules["importing_module"], "nothing"), "an alias that is not there holds no reference"


def test_what_must_stay_keeps_nothing_else_from_being_undone(module: types.ModuleType) -> None:
    def other() -> str:
        return "other"

    functions = (module.function, other)
    codes = [function.__code__ for function in functions]
    patcher = Patcher()
    for function in functions:
        patcher.for_fix("x").replace_code(function, function.__code__.replace(co_name="ours"))
    apply(patcher, "owned")
    apply(patcher, "static")
    other.__code__ = theirs = other.__code__.replace(co_name="theirs")
    module.Base.static = None  # type: ignore[attr-defined]
    assert len(patcher.revert()) == 2
    assert module.function.__code__ is codes[0] and other.__code__ is theirs
    assert module.Child().own() == "own" and module.Base.static is None


def test_a_class_that_keeps_its_attributes_elsewhere(module: types.ModuleType) -> None:
    kept: dict[str, object] = {}

    class Meta(type):
        def __setattr__(cls, name: str, value: object) -> None:
            kept[name] = value

        def __delattr__(cls, name: str) -> None:
            del kept[name]

    module.Odd = Meta("Odd", (), {})  # type: ignore[attr-defined]
    patcher = Patcher()
    patcher.for_fix("odd").replace("patched_module:Odd.attribute", 1, create=True)
    assert kept == {"attribute": 1} and patcher.shadowed("odd") == []
    assert patcher.revert() == [] and kept == {}


def test_code_that_does_not_fit_leaves_no_trace(module: types.ModuleType) -> None:
    patcher = Patcher()
    before = snapshot(module)
    free = 1
    with pytest.raises(ValueError, match="free vars"):
        patcher.for_fix("code").replace_code(module.function, (lambda: free).__code__)
    assert patcher.patched() == [] and patcher.revert() == [] and snapshot(module) == before


def test_an_alias_of_another_object_is_left_alone(module: types.ModuleType) -> None:
    other = sys.modules["importing_module"]
    other.function = theirs = lambda: "theirs"  # type: ignore[attr-defined]
    patcher = Patcher()
    installer = patcher.for_fix("alias")
    aliases = ("importing_module:function", "importing_module:absent", "patched_module:captured")
    installer.replace("patched_module:function", None, aliases=aliases)
    assert patcher.patched() == ["patched_module:function"] and other.function is theirs
    assert patcher.revert() == []


def test_what_refuses_to_be_set_leaves_no_trace(module: types.ModuleType) -> None:
    patcher = Patcher()
    with pytest.raises(TypeError):
        patcher.for_fix("x").replace("builtins:int.bit_length", None)
    assert patcher.patched() == [] and patcher.revert() == []
    with pytest.raises(
        PatchConflict, match=r"^patched_module:Child\.own\.deep\.er does not exist in this vLLM: no deep"
    ):
        patcher.for_fix("x").replace("patched_module:Child.own.deep.er", None)
    with pytest.raises(PatchConflict, match=r"^patched_module:Child\.absent does not exist in this vLLM$"):
        patcher.for_fix("x").replace("patched_module:Child.absent", None)
    with pytest.raises(ModuleNotFoundError):
        patcher.for_fix("x").replace("no_such_module_anywhere:x", None)
