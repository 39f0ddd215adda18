# SPDX-License-Identifier: Apache-2.0
"""Where V1's proposer, the class that runs the drafter, lives: it moved to a module of its own in 0.20.0."""

from __future__ import annotations

from vllm_kimi_eagle3.patching.source import SourceMissing, SourceTree

MODULES = ("vllm.v1.spec_decode.llm_base_proposer", "vllm.v1.spec_decode.eagle")
CLASS = "SpecDecodeBaseProposer"


def places(method: str) -> tuple[str, ...]:
    """Every place where a method of the proposer has been."""
    return tuple(f"{module}:{CLASS}.{method}" for module in MODULES)


def find_class(tree: SourceTree) -> str:
    """The place of the class in this tree.

    Raises:
        SourceMissing: it is in none of the places known.
    """
    for target in (f"{module}:{CLASS}" for module in MODULES):
        if tree.has(target):
            return target
    raise SourceMissing(f"{CLASS} is in none of {', '.join(MODULES)}")


def find(tree: SourceTree, method: str) -> str:
    """The place of a method in this tree.

    Raises:
        SourceMissing: it is in none of the places known.
    """
    for target in places(method):
        if tree.has(target):
            return target
    raise SourceMissing(f"{CLASS}.{method} is in none of {', '.join(MODULES)}")
