# SPDX-License-Identifier: Apache-2.0
"""The engine's states, one by one, on made-up modules: no vLLM is imported here."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3.patching.engine import Engine, probe, unmet
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceMissing, SourceTree
from vllm_kimi_eagle3.patching.spec import (
    Context,
    Fix,
    Need,
    Phase,
    State,
    Status,
    Verdict,
    on_cpu,
    with_eagle3,
    with_eagle3_on_k25,
)

K25, V3 = "KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM"
CONTEXT = Context(target_architecture=K25, platform="cpu", eagle3=True)
TREE = SourceTree(Path("/nowhere"))


@pytest.fixture
def victim() -> Iterator[types.ModuleType]:
    module = types.ModuleType("engine_victim")
    module.first, module.second = (lambda: "first"), (lambda: "second")  # type: ignore[attr-defined]
    sys.modules["engine_victim"] = module
    yield module
    del sys.modules["engine_victim"]


def fix(name: str = "a", need: Need = Need.APPLY, **more: Any) -> Fix:
    more.setdefault("probe", lambda tree: Verdict(need, f"because {name}"))
    more.setdefault("phase", Phase.WORKER)
    return Fix(id="X1", name=name, targets=("m:n",), why="why", upstream="none", retire="never", **more)


def engine(*fixes: Fix) -> Engine:
    return Engine(fixes, lambda: TREE)


def replace(name: str) -> Any:
    return lambda installer: installer.replace(f"engine_victim:{name}", lambda: "ours")


def states(statuses: list[Status]) -> list[tuple[str, State, str]]:
    return [(s.fix.name, s.state, s.reason) for s in statuses]


@pytest.mark.parametrize(
    ("need", "state"),
    [
        (Need.APPLY, State.PENDING),
        (Need.RETIRED, State.RETIRED),
        (Need.NOT_APPLICABLE, State.NOT_APPLICABLE),
        (Need.REFUSED, State.REFUSED),
    ],
)
def test_before_anything_is_applied_the_probe_speaks(need: Need, state: State) -> None:
    made = engine(fix(need=need))
    assert states(made.statuses()) == [("a", state, "because a")]
    wanted = need in (Need.APPLY, Need.REFUSED)
    assert made.needed(CONTEXT) == (list(made.fixes) if wanted else [])
    if need is not Need.APPLY:
        assert states(made.apply(Phase.WORKER, CONTEXT)) == ([("a", state, "because a")] if wanted else [])
    assert unmet(made.statuses()) == made.statuses()


def test_who_wants_what() -> None:
    other = Context(target_architecture=V3, platform="cuda", eagle3=False)
    assert (with_eagle3(CONTEXT), with_eagle3(other)) == (True, False)
    assert (on_cpu(CONTEXT), on_cpu(other)) == (True, False)
    contexts = [Context(target_architecture=a, platform="cpu", eagle3=e) for a in (K25, V3) for e in (True, False)]
    assert [with_eagle3_on_k25(c) for c in contexts] == [True, False, False, False]
    made = engine(fix("a", wanted=lambda context: context.platform == "cuda"), fix("b"))
    assert [f.name for f in made.needed(CONTEXT)] == ["b"]
    assert made.needed(other) == [made.fixes[0]]
    assert fix("b").label == "X1 b" and fix().wanted is with_eagle3


def test_probes_are_asked_once_with_the_tree_and_their_failures_are_refusals() -> None:
    asked: list[SourceTree] = []

    def count(tree: SourceTree) -> Verdict:
        asked.append(tree)
        return Verdict(Need.RETIRED, "right")

    made = engine(fix(probe=count))
    for _ in range(3):
        assert made.verdict(made.fixes[0]) == Verdict(Need.RETIRED, "right")
    assert asked == [TREE]

    def missing(tree: SourceTree) -> Verdict:
        raise SourceMissing("m:n is not part of this vLLM")

    def failing(tree: SourceTree) -> Verdict:
        raise KeyError("two\nlines " + "x" * 500)

    assert probe(fix(probe=missing), TREE) == Verdict(
        Need.REFUSED, "m:n is not part of this vLLM, and the probe does not know what took its place"
    )
    reason = probe(fix(probe=failing), TREE).reason
    assert reason.startswith("the probe failed: KeyError: 'two\\nlines xxx") and len(reason) == 400 + 28
    assert probe(fix(probe=failing), TREE).need is Need.REFUSED
    assert probe(fix(probe=lambda tree: Verdict(Need.APPLY, str(tree.root))), TREE).reason == "/nowhere"


def test_without_a_tree_everything_is_refused_and_asked_again() -> None:
    trees: list[Any] = [SourceMissing("no vLLM"), ValueError("vllm.__spec__ is None"), TREE]

    def tree() -> SourceTree:
        found = trees.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    made = Engine((fix(),), tree)
    (only,) = made.fixes
    assert made.verdict(only) == Verdict(Need.REFUSED, "vLLM's source can't be read: SourceMissing: no vLLM")
    assert made.verdict(only).reason == "vLLM's source can't be read: ValueError: vllm.__spec__ is None"
    assert made.verdict(only).need is Need.APPLY


def test_applying_a_phase(victim: types.ModuleType) -> None:
    configured: list[Context] = []
    made = engine(
        fix("a", install=replace("first"), configure=configured.append),
        fix("b", install=replace("second"), phase=Phase.VLLM_CONFIG),
        fix("c", configure=configured.append),
        fix("d", need=Need.RETIRED, install=replace("second")),
        fix("e"),
    )
    expected = [("a", State.APPLIED, "because a"), ("c", State.APPLIED, "because c"), ("e", State.APPLIED, "because e")]
    assert states(made.apply(Phase.WORKER, CONTEXT)) == expected
    assert (victim.first(), victim.second()) == ("ours", "second")
    assert states(made.apply(Phase.WORKER, CONTEXT)) == expected
    assert configured == [CONTEXT] * 4, "configuring happens for every server"
    assert made.patcher.patched() == ["engine_victim:first"]
    assert unmet(made.statuses()) == [made.status(made.fixes[1]), made.status(made.fixes[3])]
    assert made.revert() == []
    assert victim.first() == "first" and {s.state for s in made.statuses()} == {State.PENDING, State.RETIRED}


def test_a_failing_installation_is_taken_back_and_tried_again(victim: types.ModuleType) -> None:
    fails = [True]

    def install(installer: Installer) -> None:
        installer.replace("engine_victim:first", lambda: "ours")
        installer.replace("engine_victim:second", lambda: "ours")
        if fails.pop():
            raise RuntimeError("half\nway")
        fails.append(False)

    asked: list[Context] = []
    made = engine(fix("a", install=install, configure=asked.append), fix("b", install=replace("second")))
    assert states(made.apply(Phase.WORKER, CONTEXT))[0] == ("a", State.FAILED, "RuntimeError: half way")
    assert asked == [], "what is not installed is not configured"
    assert states(made.statuses())[1] == ("b", State.APPLIED, "because b")
    assert (victim.first(), victim.second()) == ("first", "ours")
    made.patcher.revert("X1 b")
    fails.append(False)
    assert states(made.apply(Phase.WORKER, CONTEXT))[0] == ("a", State.APPLIED, "because a")
    assert made.patcher.shadowed("X1 a") == []
    assert made.revert() == []
    fails[:] = [True]
    made.apply(Phase.WORKER, CONTEXT)
    assert made.status(made.fixes[0]).state is State.FAILED
    assert made.revert() == [] and made.status(made.fixes[0]).state is State.PENDING


def test_a_failing_installation_takes_back_nothing_of_another_fix(victim: types.ModuleType) -> None:
    def install(installer: Installer) -> None:
        installer.replace("engine_victim:second", lambda: "ours")
        raise RuntimeError("half way")

    made = engine(fix("a", install=replace("first")), fix("b", install=install))
    assert [s.state for s in made.apply(Phase.WORKER, CONTEXT)] == [State.APPLIED, State.FAILED]
    assert (victim.first(), victim.second()) == ("ours", "second")


def test_a_failing_configuration_is_one_server_s(victim: types.ModuleType) -> None:
    other = Context(target_architecture=V3, platform="cpu", eagle3=True)

    def configure(context: Context) -> None:
        if context is other:
            raise ValueError("not this\none")

    made = engine(fix("a", install=replace("first"), configure=configure))
    for context, state, reason in (
        (other, State.FAILED, "for this server: ValueError: not this one"),
        (CONTEXT, State.APPLIED, "because a"),
        (other, State.FAILED, "for this server: ValueError: not this one"),
    ):
        assert states(made.apply(Phase.WORKER, context)) == [("a", state, reason)]
        assert victim.first() == "ours"
        assert made.statuses()[0].state is State.APPLIED


def test_shadowed_is_said_and_stays(victim: types.ModuleType) -> None:
    def theirs() -> str:
        return "theirs"

    def both(installer: Installer) -> None:
        installer.replace("engine_victim:first", lambda: "ours")
        installer.replace("engine_victim:second", lambda: "ours")

    made = engine(fix("a", install=both))
    made.apply(Phase.WORKER, CONTEXT)
    victim.first = victim.second = theirs  # type: ignore[attr-defined]
    (status,) = made.apply(Phase.WORKER, CONTEXT)
    lost = "replaced after us by somebody else: engine_victim:first, engine_victim:second"
    assert (status.fix, status.state, status.reason) == (made.fixes[0], State.SHADOWED, lost)
    assert unmet([status]) == [status]
    assert sorted(made.revert()) == [
        f"engine_victim:{name} was replaced by somebody else; left as it is" for name in ("first", "second")
    ]
    assert victim.first is theirs


def test_many_threads_install_once(victim: types.ModuleType) -> None:
    installed: list[int] = []

    def install(installer: Installer) -> None:
        installed.append(1)
        installer.replace("engine_victim:first", lambda: "ours")

    made = engine(fix("a", install=install))
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        made.apply(Phase.WORKER, CONTEXT)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert installed == [1] and victim.first() == "ours"
