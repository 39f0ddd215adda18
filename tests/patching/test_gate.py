# SPDX-License-Identifier: Apache-2.0
"""The gates on shapes of vLLM that nobody has seen: whoever does not run our servers is not to notice."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

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
