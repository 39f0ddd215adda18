# SPDX-License-Identifier: Apache-2.0
"""The engine's states, on the real vLLM that is installed: every fix probes, and a failing fix becomes a status."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_kimi_eagle3.patching.engine import Engine, unmet
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceMissing, SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, State, Verdict
from vllm_kimi_eagle3.registry import FIXES

CPU = Context(target_architecture="KimiK25ForConditionalGeneration", platform="cpu", eagle3=True)


def fix_like(base: Fix, **changes: object) -> Fix:
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_the_registry_is_a_list_of_distinct_complete_records() -> None:
    assert len({fix.label for fix in FIXES}) == len(FIXES)
    for fix in FIXES:
        assert fix.why and fix.upstream and fix.retire and fix.targets, fix.label
        assert fix.install or fix.configure or fix.id in ("D8", "D17"), fix.label


def test_no_fix_is_refused_on_the_installed_release() -> None:
    engine = Engine(FIXES)
    for status in engine.statuses():
        assert status.state in (State.PENDING, State.RETIRED, State.NOT_APPLICABLE), (
            f"{status.fix.label}: {status.reason}"
        )


def raise_error(*_: object) -> Verdict:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (raise_error, "ZeroDivisionError: on purpose"),
        (lambda tree: Verdict(Need.REFUSED, "an unknown shape"), "an unknown shape"),
        (lambda tree: tree.text("vllm.config.vllm:NoSuchClass.method"), "NoSuchClass"),
        (lambda tree: tree.text("vllm.no_such_module:f"), "no_such_module"),
    ],
)
def test_a_probe_that_fails_is_a_refusal(probe: object, reason: str) -> None:
    engine = Engine((fix_like(FIXES[0], probe=probe),))
    (status,) = engine.statuses()
    assert status.state is State.REFUSED
    assert reason in status.reason
    assert engine.needed(CPU) == list(engine.fixes)


def test_an_installation_that_fails_halfway_is_taken_back() -> None:
    import vllm.config.speculative as module

    def install(installer: Installer) -> None:
        installer.replace("vllm.config.speculative:SpeculativeConfig.compute_hash", lambda self: "ours")
        raise RuntimeError("halfway")

    before = dict(vars(module.SpeculativeConfig))
    fix = fix_like(FIXES[0], install=install, phase=Phase.WORKER, probe=lambda tree: Verdict(Need.APPLY, "needed"))
    engine = Engine((fix,))
    statuses = engine.apply(Phase.WORKER, CPU)
    assert [s.state for s in statuses] == [State.FAILED]
    assert "halfway" in statuses[0].reason
    assert unmet(statuses) == statuses
    assert dict(vars(module.SpeculativeConfig)) == before


def test_an_environment_without_vllm_is_a_refusal_not_a_crash() -> None:
    def nothing() -> SourceTree:
        raise SourceMissing("no vLLM is installed in this environment")

    for status in Engine(FIXES, nothing).statuses():
        assert status.state is State.REFUSED
        assert "no vLLM is installed" in status.reason


def test_apply_twice_and_revert_restore_every_object() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.triton_utils import dispatcher
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    spaces = (RotaryEmbedding, CPUAttentionBackend, dispatcher)
    before = [dict(vars(space)) for space in spaces]
    engine = Engine(tuple(fix for fix in FIXES if fix.id in ("C1", "C2", "C3")))
    for _ in range(2):
        assert {s.state for s in engine.apply(Phase.WORKER, CPU)} == {State.APPLIED}
    assert [dict(vars(space)) for space in spaces] != before
    assert engine.revert() == []
    assert [dict(vars(space)) for space in spaces] == before
