# SPDX-License-Identifier: Apache-2.0
"""Reading a source tree without importing it: on a small tree with everything in it that vLLM's sources have."""

from __future__ import annotations

import ast
import io
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from vllm_kimi_eagle3.patching import source
from vllm_kimi_eagle3.patching.source import SourceMissing, SourceTree

PACKAGE = '''"""The package."""
'''
MODULE = '''
import os

def plain(a, b=1, /, c=2, *rest, d, **more):
    """What it does."""
    # why
    return   a+b

async def waits(self):
    "Only this."

def twice(): return 1
def twice(): return 2

if os.name:
    def conditional(x): return "if"
else:
    def conditional(x, y): return "else"

try:
    class Tried: ...
except ImportError:
    class Caught:
        def method(self, x, *, y): pass
else:
    def otherwise(): pass
finally:
    def at_last(): pass

class Outer:
    """Doc."""
    x: int = 1
    class Inner:
        def method(self): return "näh"
    def method(self, *, only): return None
    def plain(self): "text"; return 7

class Empty:
    """Doc."""
'''


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    package = tmp_path / "vllm" / "sub"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(PACKAGE)
    (package / "__init__.py").write_text("def of_package(): pass\n")
    (package / "module.py").write_text(MODULE, encoding="utf-8")
    (package / "both.py").write_text("def of_file(): pass\n")
    (package / "both").mkdir()
    (package / "both" / "__init__.py").write_text("def of_folder(): pass\n")
    (package / "folder").mkdir()
    return SourceTree(tmp_path)


def test_paths(tree: SourceTree) -> None:
    assert tree.path("vllm") == tree.root / "vllm" / "__init__.py"
    assert tree.path("vllm.sub.module") == tree.root / "vllm" / "sub" / "module.py"
    assert tree.path("vllm.sub.both").name == "both.py"
    assert tree.has_module("vllm.sub") and not tree.has_module("vllm.sub.folder") and not tree.has_module("vllm.none")
    with pytest.raises(SourceMissing, match=r"^module vllm\.none is not part of this vLLM$"):
        tree.path("vllm.none")


def test_modules_are_parsed_once(tree: SourceTree) -> None:
    module = tree.module("vllm.sub.module")
    assert isinstance(module, ast.Module) and tree.module("vllm.sub.module") is module
    assert tree.module("vllm.sub.both") is not module
    assert SourceTree(tree.root) == tree and "Module object" not in repr(tree)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("plain", "return a + b"),
        ("twice", "return 2"),
        ("conditional", "return 'else'"),
        ("Outer.method", "return None"),
        ("Outer.Inner.method", "return 'näh'"),
        ("Outer.plain", "return 7"),
        ("Caught.method", "pass"),
        ("otherwise", "pass"),
        ("waits", ""),
        ("Empty", ""),
        ("Tried", ""),
    ],
)
def test_definitions_in_normal_form(tree: SourceTree, name: str, line: str) -> None:
    target = f"vllm.sub.module:{name}"
    assert tree.has(target)
    assert tree.text(target) == line


def test_a_class_in_normal_form(tree: SourceTree) -> None:
    lines = [line for line in tree.text("vllm.sub.module:Outer").splitlines() if line]
    assert lines == [
        "x: int = 1",
        "class Inner:",
        "    def method(self):",
        "        return 'näh'",
        "def method(self, *, only):",
        "    return None",
        "def plain(self):",
        '    """text"""',
        "    return 7",
    ]


def test_sources_are_utf_8_in_any_locale(tree: SourceTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    with pytest.raises(UnicodeDecodeError):
        tree.path("vllm.sub.module").read_text()
    assert tree.text("vllm.sub.module:Outer.Inner.method") == "return 'näh'"


@pytest.mark.parametrize("name", ["none", "Outer.none", "none.method", "plain.none", "at_last", "Outer.Inner", "x"])
def test_what_is_not_there(tree: SourceTree, name: str) -> None:
    target = f"vllm.sub.module:{name}"
    if name == "Outer.Inner":
        with pytest.raises(SourceMissing, match=r"^vllm\.sub\.module:Outer\.Inner is a class here, not a function$"):
            tree.function(target)
        assert tree.has(target)
        return
    assert not tree.has(target)
    with pytest.raises(SourceMissing, match=rf"^{target} is not part of this vLLM$"):
        tree.node(target)
    assert not tree.has(f"vllm.no_module:{name}")


def test_parameters(tree: SourceTree) -> None:
    assert tree.parameters("vllm.sub.module:plain") == ("a", "b", "c", "*rest", "d", "**more")
    assert tree.parameters("vllm.sub.module:Caught.method") == ("self", "x", "y")
    assert tree.parameters("vllm.sub.module:waits") == ("self",)
    assert tree.parameters("vllm.sub.module:twice") == ()
    assert tree.function("vllm.sub.module:waits").name == "waits"


def test_the_installed_tree(monkeypatch: pytest.MonkeyPatch, tree: SourceTree) -> None:
    asked: list[str] = []

    def found(spec: ModuleSpec | None) -> None:
        monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: (asked.append(name), spec)[1])

    none = r"^no vLLM is installed in this environment$"
    found(None)
    with pytest.raises(SourceMissing, match=none):
        SourceTree.installed()
    found(ModuleSpec("vllm", None))
    with pytest.raises(SourceMissing, match=none):
        SourceTree.installed()
    spec = ModuleSpec("vllm", None, is_package=True)
    spec.submodule_search_locations = [str(tree.root / "vllm"), "/elsewhere"]
    found(spec)
    installed = SourceTree.installed()
    assert installed.root == tree.root and installed.has("vllm.sub:of_package")
    assert SourceTree.installed() is installed, "its parsed modules are shared"
    assert set(asked) == {"vllm"} and "vllm.sub" not in sys.modules
