# SPDX-License-Identifier: Apache-2.0
"""Every fix against the real source of every release. No torch, no vLLM; what can't be fetched fails."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests import releases
from tests.drift.expected import EXPECTED, RELEASES, expected
from tools.compatibility import sources, verdicts
from vllm_kimi_eagle3 import watch
from vllm_kimi_eagle3.fixes import draft_attention_backend, eagle3_interface
from vllm_kimi_eagle3.patching.engine import probe
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need
from vllm_kimi_eagle3.registry import ELSEWHERE, FIXES, UNDONE


@functools.lru_cache(maxsize=2)
def release_tree(release: str) -> SourceTree:
    return sources(release)


def test_table_and_registry_name_the_same_fixes() -> None:
    assert list(EXPECTED) == [fix.label for fix in FIXES]


def test_every_defect_is_met_or_listed_with_a_reason() -> None:
    known = {fix.id for fix in FIXES} | ELSEWHERE.keys() | UNDONE.keys()
    assert known == {f"D{i}" for i in range(1, 28)} | {f"C{i}" for i in range(1, 8)}
    assert not (ELSEWHERE.keys() | UNDONE.keys()) & {fix.id for fix in FIXES}


@pytest.mark.parametrize("release", RELEASES)
def test_every_gate_has_its_method(release: str) -> None:
    """What activation.py wraps is there, and the workers' two hold the configuration where their gates look."""
    tree = SourceTree(releases.tree(release))
    assert tree.has("vllm.config.speculative:SpeculativeConfig.__post_init__")
    assert tree.has("vllm.config.vllm:VllmConfig.__post_init__")
    worker = "vllm.v1.worker.worker_base:WorkerWrapperBase"
    assert tree.parameters(f"{worker}.init_worker") == ("self", "all_kwargs")
    assert "all_kwargs[self.rpc_rank]" in tree.text(f"{worker}.init_worker")
    assert "self.vllm_config" in tree.text(f"{worker}.init_device")


@pytest.mark.parametrize("release", RELEASES)
def test_the_watch_knows_every_release(release: str) -> None:
    verdict = probe(watch.WATCH, release_tree(release))
    assert verdict.need is Need.APPLY, verdict.reason


@pytest.mark.parametrize("release", RELEASES)
def test_verdicts(release: str) -> None:
    wrong = [
        f"{label}: {verdict.need.value}, the table says {expected(label, release).value} ({verdict.reason})"
        for label, verdict in verdicts(release).items()
        if verdict.need is not expected(label, release)
    ]
    assert not wrong, f"vLLM {release}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("release", RELEASES)
def test_anchors(release: str) -> None:
    """What a fix that applies names and imports is defined in that release."""
    source = release_tree(release)
    for fix in FIXES:
        if expected(fix.label, release) is Need.APPLY:
            assert any(source.has(target) for target in fix.targets), f"{fix.label}: none of {fix.targets}"
            for module, name in imports(fix):
                assert defines(source, module, name), f"{fix.label} imports {name} from {module}; {release} has none"


def imports(fix: Fix) -> list[tuple[str, str]]:
    """The (module, name) pairs that a fix's module, and what it alone imports, take from vLLM."""
    assert fix.probe.__code__.co_filename
    file = Path(fix.probe.__code__.co_filename)
    files = [file]
    if fix.label == "D3 aux-capture":
        files.append(file.with_name("_capturing_forward.py"))
    return [
        (node.module, alias.name)
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm.")
        for alias in node.names
    ]


def defines(source: SourceTree, module: str, name: str) -> bool:
    """Whether a module defines a name at its top level or passes it on."""
    return any(
        (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name)
        or (isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names))
        or (isinstance(node, ast.Assign) and any(ast.unparse(t) == name for t in node.targets))
        for node in source.module(module).body
    )


@pytest.mark.parametrize("release", [r for r in RELEASES if expected("D2 eagle3-interface", r) is Need.APPLY])
def test_members_are_those_of_the_releases_protocol(release: str) -> None:
    source = release_tree(release)
    base = source.node("vllm.model_executor.models.interfaces:SupportsEagleBase")
    protocol = source.node(eagle3_interface.PROTOCOL)
    assert isinstance(base, ast.ClassDef) and isinstance(protocol, ast.ClassDef)
    members = {
        name
        for node in (*base.body, *protocol.body)
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef)
            else [node.target.id]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            else []
        )
    }
    getter = next(name for name in eagle3_interface.GETTERS if name in members)
    assert members == {*eagle3_interface.FLAGS, eagle3_interface.SETTER, getter}


@pytest.mark.parametrize("release", [r for r in RELEASES if expected("D3 aux-capture", r) is Need.APPLY])
def test_capturing_forward_has_the_originals_annotations(release: str) -> None:
    """``support_torch_compile`` reads from them which dimensions vary."""
    source = release_tree(release)
    original = source.function("vllm.model_executor.models.deepseek_v2:DeepseekV2Model.forward")
    path = Path(eagle3_interface.__file__).with_name("_capturing_forward.py")
    ours = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef))
    theirs = {a.arg: a.annotation and ast.unparse(a.annotation) for a in original.args.args}
    for argument in ours.args.args[1:]:
        assert argument.annotation is not None
        found = ast.unparse(argument.annotation)
        # 0.15 does not allow None for the ids; that makes no dimension static.
        assert found.removesuffix(" | None") == (theirs[argument.arg] or "").removesuffix(" | None"), argument.arg


@pytest.mark.parametrize(
    ("release", "runners"),
    [
        ("0.15.0", ["vllm.v1.spec_decode.eagle"]),
        ("0.17.1", ["vllm.v1.spec_decode.eagle", draft_attention_backend.V2_MODULE]),
        ("0.20.2", ["vllm.v1.spec_decode.llm_base_proposer", draft_attention_backend.V2_MODULE]),
        ("0.21.0", [draft_attention_backend.V2_MODULE]),
        ("0.30.0", [draft_attention_backend.V2_MODULE]),
        ("0.33.0", [draft_attention_backend.V2_MODULE]),
    ],
)
def test_runners_that_force_the_targets_backend(release: str, runners: list[str]) -> None:
    source = release_tree(release)
    assert draft_attention_backend.faulty(source) == runners
    assert all(defines(source, module, "get_model") for module in runners)
