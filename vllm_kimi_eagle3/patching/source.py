# SPDX-License-Identifier: Apache-2.0
"""Read the source of a vLLM tree without importing it.

Probes decide from the *shape* of the source whether a fault is present. They see an installed vLLM and an unpacked
release the same way: as a folder that holds ``vllm/``. Nothing here imports vLLM or torch; compiled modules are
invisible to it, and a module that vLLM builds at run time does not exist for a probe.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class SourceMissing(LookupError):
    """A module, class or function that a probe asked for is not in this tree."""


@dataclass(frozen=True)
class SourceTree:
    """The Python sources below ``root`` (the folder that contains the ``vllm`` package)."""

    root: Path
    _modules: dict[str, ast.Module] = field(default_factory=lambda: {}, compare=False, repr=False)

    @classmethod
    def installed(cls) -> SourceTree:
        """The vLLM that ``import vllm`` would load, found without importing it.

        Raises:
            SourceMissing: no vLLM is installed in this environment.
        """
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise SourceMissing("no vLLM is installed in this environment")
        return _tree_at(Path(next(iter(spec.submodule_search_locations))).parent)

    def path(self, module: str) -> Path:
        """The file of a dotted module name; raises :class:`SourceMissing` when there is none."""
        base = self.root.joinpath(*module.split("."))
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
        raise SourceMissing(f"module {module} is not part of this vLLM")

    def has_module(self, module: str) -> bool:
        """Whether the tree holds this dotted module."""
        try:
            self.path(module)
        except SourceMissing:
            return False
        return True

    def module(self, module: str) -> ast.Module:
        """The parsed module."""
        if module not in self._modules:
            self._modules[module] = ast.parse(self.path(module).read_text(encoding="utf-8"))
        return self._modules[module]

    def node(self, target: str) -> FunctionNode | ast.ClassDef:
        """The definition of ``package.module:Qual.name``.

        A name that is defined several times (conditional definitions) gives the last one, as at import.

        Raises:
            SourceMissing: the module or the name is not there.
        """
        module, _, qualname = target.partition(":")
        scope: list[ast.stmt] = self.module(module).body
        found: FunctionNode | ast.ClassDef | None = None
        for name in qualname.split("."):
            found = None
            for statement in _definitions(scope):
                if statement.name == name:
                    found = statement
            if found is None:
                raise SourceMissing(f"{target} is not part of this vLLM")
            scope = found.body
        assert found is not None
        return found

    def has(self, target: str) -> bool:
        """Whether ``package.module:Qual.name`` is defined in this tree."""
        try:
            self.node(target)
        except SourceMissing:
            return False
        return True

    def function(self, target: str) -> FunctionNode:
        """Like :meth:`node`, for a function or method."""
        found = self.node(target)
        if isinstance(found, ast.ClassDef):
            raise SourceMissing(f"{target} is a class here, not a function")
        return found

    def parameters(self, target: str) -> tuple[str, ...]:
        """Names of a function's parameters, in order, ``self`` included."""
        arguments = self.function(target).args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if arguments.vararg:
            names.append("*" + arguments.vararg.arg)
        names += [a.arg for a in arguments.kwonlyargs]
        if arguments.kwarg:
            names.append("**" + arguments.kwarg.arg)
        return tuple(names)

    def text(self, target: str) -> str:
        """A definition's code in normal form: comments, docstring and layout removed."""
        found = self.node(target)
        body = found.body
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        return "\n".join(ast.unparse(statement) for statement in body)


def _definitions(scope: list[ast.stmt]) -> list[FunctionNode | ast.ClassDef]:
    """Functions and classes defined at this level, also below ``if`` and ``try``."""
    found: list[FunctionNode | ast.ClassDef] = []
    for statement in scope:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(statement)
        elif isinstance(statement, ast.If):
            found += _definitions(statement.body) + _definitions(statement.orelse)
        elif isinstance(statement, ast.Try):
            found += _definitions(statement.body)
            for handler in statement.handlers:
                found += _definitions(handler.body)
            found += _definitions(statement.orelse)
    return found


@functools.lru_cache(maxsize=4)
def _tree_at(root: Path) -> SourceTree:
    """One tree a folder, so that its parsed modules are shared by all probes of a process."""
    return SourceTree(root)
