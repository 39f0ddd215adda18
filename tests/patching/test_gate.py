# SPDX-License-Identifier: Apache-2.0
"""The gates on shapes of vLLM that nobody has seen: whoever does not run our servers is not to notice."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import wrapt

from vllm_kimi_eagle3 import activation, plugin
from vllm_kimi_eagle3.patching.gate import Gate


def test_a_gate_that_could_not_be_wrapped_may_be_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is in ``sys.modules`` while it is still being imported."""
    module = types.ModuleType("half_imported")
    monkeypatch.setitem(sys.modules, "half_imported", module)
    gate = Gate("half_imported", "Config", "check", lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    gate.install()
    assert gate.error is not None and "half_imported.Config.check" in gate.error

    class Config:
        def check(self) -> str:
            return "checked"

    module.Config = Config  # type: ignore[attr-defined]
    gate.install()
    assert gate.error is None and Config().check() == "checked"
    assert gate.remove() == []


def passing(seen: list[Any]) -> Any:
    def look(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append((type(instance).__name__, args, kwargs))
        return wrapped(*args, **kwargs)

    return look


class Guarded:
    """What a gate is put into; made anew for each test."""

    def check(self, *args: Any, **kwargs: Any) -> Any:
        """Its own words."""
        return ("checked", args, kwargs)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("guarded_module")
    module.Config = type("Config", (), dict(vars(Guarded)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "guarded_module", module)
    return module


def test_a_gate_looks_and_passes_through(guarded: types.ModuleType) -> None:
    seen: list[Any] = []
    original = vars(guarded.Config)["check"]
    gate = Gate("guarded_module", "Config", "check", passing(seen))
    assert gate.problem is None and gate.error is None and gate.module == "guarded_module"
    assert gate.remove() == [], "what was never installed has nothing to take back"
    gate.install()
    wrapper = vars(guarded.Config)["check"]
    gate.install()
    assert vars(guarded.Config)["check"] is wrapper, "wrapped twice"
    assert guarded.Config().check(1, a=2) == ("checked", (1,), {"a": 2})
    assert seen == [("Config", (1,), {"a": 2})]
    assert guarded.Config.check.__doc__ == "Its own words." and guarded.Config.check.__name__ == "check"
    assert gate.problem is None
    assert gate.remove() == [] and vars(guarded.Config)["check"] is original
    assert gate.problem is None and gate.remove() == []
    gate.install()
    assert guarded.Config().check() == ("checked", (), {}) and len(seen) == 2


def test_a_gate_waits_for_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "awaited_module.py").write_text("class Config:\n    def check(self): return 'checked'\n")
    seen: list[Any] = []
    hooked: list[str] = []
    register = wrapt.register_post_import_hook
    monkeypatch.setattr(wrapt, "register_post_import_hook", lambda *a: (hooked.append(a[1]), register(*a)))
    gate = Gate("awaited_module", "Config", "check", passing(seen))
    gate.install()
    gate.install()
    assert gate.problem is None and gate.error is None
    assert hooked == ["awaited_module"], "a hook can't be taken back, so there is one a gate"
    module = importlib.import_module("awaited_module")
    assert module.Config().check() == "checked" and len(seen) == 1
    assert gate.remove() == []
    del sys.modules["awaited_module"]
    # The hook can't be taken back; it finds the gate closed.
    assert importlib.import_module("awaited_module").Config().check() == "checked" and len(seen) == 1
    del sys.modules["awaited_module"]


def test_a_gate_that_is_installed_while_its_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[Any] = []
    gates = [Gate("half_module", "Config", name, passing(seen)) for name in ("check", "other")]
    monkeypatch.setattr(sys, "gates_of_a_test", gates, raising=False)
    (tmp_path / "half_module.py").write_text(
        "import sys\nfor gate in sys.gates_of_a_test * 2:\n    gate.install()\n    assert gate.error is None\n"
        "class Config:\n    def check(self): return 'checked'\n    def other(self): return 'other'\n"
    )
    module = importlib.import_module("half_module")
    assert module.Config().check() == "checked" and module.Config().other() == "other"
    assert len(seen) == 2 and [gate.problem for gate in gates] == [None, None]
    assert type(module.__spec__) is ModuleSpec and "waiting" not in str(vars(module.__spec__))
    for gate in gates:
        assert gate.remove() == []
    del sys.modules["half_module"]
    # A module whose import fails is hooked as one that was never imported.
    (tmp_path / "half_module.py").write_text("import sys\nsys.gates_of_a_test[0].install()\nraise KeyError\n")
    importlib.invalidate_caches()
    with pytest.raises(KeyError):
        importlib.import_module("half_module")
    assert gates[0].problem is None and "half_module" not in sys.modules


@pytest.mark.parametrize("missing", ["Other", "check"])
def test_what_can_t_be_wrapped_is_said(guarded: types.ModuleType, missing: str) -> None:
    class_name, attribute = ("Other", "check") if missing == "Other" else ("Config", "other")
    gate = Gate("guarded_module", class_name, attribute, passing([]))
    gate.install()
    kind = "AttributeError" if missing == "Other" else "KeyError"
    assert gate.problem is not None and gate.problem == gate.error
    assert gate.problem.startswith(f"guarded_module.{class_name}.{attribute} cannot be wrapped ({kind}: ")
    assert gate.remove() == []


def over(function: Any, how: str) -> Any:
    """Somebody else's wrapper."""
    if how == "closure":
        return lambda self: function(self)
    if how == "wraps":
        return functools.wraps(function)(lambda self: None)
    if how == "partial":
        return functools.partialmethod(function)
    if how == "global":
        scope: dict[str, Any] = {"kept": function}
        exec("def check(self): return kept(self)", scope)
        return scope["check"]
    if how == "wrapt":
        return wrapt.FunctionWrapper(function, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    if how == "deep":
        for _ in range(20):
            function = over(function, "closure")
        return function
    if how == "recursive":

        def once_more(self: Any, deeper: bool = False) -> Any:
            return once_more(self) if deeper else function(self)

        return over(once_more, "closure")
    if how == "unfilled":

        def check(self: Any) -> Any:
            return later(self)

        if how == "never":
            later = None
        return check
    return lambda self: "theirs"


@pytest.mark.parametrize("how", ["closure", "wraps", "partial", "global", "wrapt", "deep", "recursive"])
@pytest.mark.parametrize("taken", ["as it lies there", "from its class"])
def test_a_wrapper_over_ours_is_no_problem(guarded: types.ModuleType, how: str, taken: str) -> None:
    seen: list[Any] = []
    gate = Gate("guarded_module", "Config", "check", passing(seen))
    gate.install()
    theirs = over(guarded.Config.check if taken == "from its class" else vars(guarded.Config)["check"], how)
    guarded.Config.check = theirs
    assert gate.problem is None
    # It is not undone, and ours stays below it in silence.
    assert gate.remove() == ["Config.check was replaced by somebody else; left as it is"]
    assert vars(guarded.Config)["check"] is theirs
    guarded.Config().check()
    assert seen == []
    gate.install()
    guarded.Config().check()
    assert len(seen) == (0 if how == "wraps" else 1)


@pytest.mark.parametrize(("wrappers", "seen"), [(63, True), (64, False), (100, False)])
def test_sixty_four_functions_are_looked_through(guarded: types.ModuleType, wrappers: int, seen: bool) -> None:
    gate = Gate("guarded_module", "Config", "check", passing([]))
    gate.install()
    theirs = vars(guarded.Config)["check"]
    for _ in range(wrappers):
        theirs = over(theirs, "closure")
    guarded.Config.check = theirs
    assert (gate.problem is None) is seen


@pytest.mark.parametrize("how", ["replaced", "unfilled"])
def test_a_lost_gate_is_a_problem(guarded: types.ModuleType, how: str) -> None:
    gate = Gate("guarded_module", "Config", "check", passing([]))
    gate.install()
    guarded.Config.check = over(vars(guarded.Config)["check"], how)
    assert gate.problem == "guarded_module.Config.check was replaced after us by somebody else"
    del guarded.Config.check
    assert gate.problem is not None


def test_ours_as_somebody_s_bound_method_is_no_problem(guarded: types.ModuleType) -> None:
    gate = Gate("guarded_module", "Config", "check", passing([]))
    gate.install()
    guarded.Config.check = types.MethodType(vars(guarded.Config)["check"], guarded.Config())
    assert gate.problem is None


def test_what_only_looks_like_a_function_is_looked_through(guarded: types.ModuleType) -> None:
    """Compilers make functions with a code object and not much else."""
    gate = Gate("guarded_module", "Config", "check", passing([]))
    gate.install()
    guarded.Config.check = types.SimpleNamespace(__code__=(lambda: print()).__code__)
    assert gate.problem == "guarded_module.Config.check was replaced after us by somebody else"


def test_a_closed_gate_passes_everything_on(guarded: types.ModuleType) -> None:
    seen: list[Any] = []
    gate = Gate("guarded_module", "Config", "check", passing(seen))
    gate.install()
    ours = vars(guarded.Config)["check"]
    guarded.Config.check = lambda *args, **kwargs: ours(*args, **kwargs)
    assert gate.remove() != []
    config = guarded.Config()
    assert config.check(1, a=2) == ("checked", (1,), {"a": 2}) and seen == []


@pytest.mark.parametrize("spec", ["none", "made by hand"])
def test_a_module_that_no_import_made(guarded: types.ModuleType, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    module = types.SimpleNamespace(Config=guarded.Config)
    if spec == "made by hand":
        module.__spec__ = ModuleSpec("guarded_module", None)
        assert not hasattr(module.__spec__, "_initializing")
    monkeypatch.setitem(sys.modules, "guarded_module", module)  # type: ignore[arg-type]
    seen: list[Any] = []
    gate = Gate("guarded_module", "Config", "check", passing(seen))
    gate.install()
    guarded.Config().check()
    assert gate.error is None and len(seen) == 1


@pytest.mark.parametrize("all_kwargs", [None, [], [None], [{}], {}, 7, [{"vllm_config": None}]])
@pytest.mark.parametrize("worker", [types.SimpleNamespace(rpc_rank=0), types.SimpleNamespace()])
def test_a_worker_of_another_shape_passes(monkeypatch: pytest.MonkeyPatch, worker: Any, all_kwargs: Any) -> None:
    monkeypatch.setattr(activation, "prepare_worker", lambda config: pytest.fail(f"prepared {config}"))
    look: Any = activation._init_worker_gate  # pyright: ignore[reportPrivateUsage]
    assert look(lambda *args, **kwargs: (args, kwargs), worker, (all_kwargs,), {}) == ((all_kwargs,), {})
    assert look(lambda **kwargs: kwargs, worker, (), {"all_kwargs": all_kwargs}) == {"all_kwargs": all_kwargs}


def test_a_worker_of_ours_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(activation, "prepare_worker", prepared.append)
    look: Any = activation._init_worker_gate  # pyright: ignore[reportPrivateUsage]
    look(lambda _: None, types.SimpleNamespace(rpc_rank=1), ([{}, {"vllm_config": "ours"}],), {})
    assert prepared == ["ours"]


def test_a_broken_overlay_on_an_unknown_vllm_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error here would end vLLM for everybody's models."""
    monkeypatch.setattr(activation, "install_gates", lambda: 1 / 0)
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    monkeypatch.setitem(sys.modules, "vllm.config.speculative", None)
    said: list[str] = []
    monkeypatch.setattr(activation.logger, "error", lambda message, *args: said.append(message % args))
    plugin.register()
    assert len(said) == 2 and "ZeroDivisionError" in said[0] and "stock vLLM" in said[1]


@pytest.mark.parametrize(("value", "meant"), [("", "on"), (" OFF ", "off"), ("warn", "warn")])
def test_an_empty_switch_is_no_switch(monkeypatch: pytest.MonkeyPatch, value: str, meant: str) -> None:
    monkeypatch.setenv("VLLM_KIMI_EAGLE3", value)
    assert activation.mode() == meant


def test_a_mistyped_switch_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KIMI_EAGLE3", "garbage")
    with pytest.raises(activation.OverlayError, match="it must be on, warn, stock or off"):
        activation.mode()
