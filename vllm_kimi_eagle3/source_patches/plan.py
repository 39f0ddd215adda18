# SPDX-License-Identifier: Apache-2.0
"""What a tree needs of a series, and the texts that its files get.

A patch that changes what an earlier one wrote can only be recognised once it is taken back itself, so a tree is read
from the last patch to the first; what is not there is then tried in order. Whether upstream or a fork mended a defect
in words of its own is not seen here: the patch conflicts, and the fixes' probes say more.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

from . import series
from .diff import Conflict, FileChange
from .series import Patch, Series, SeriesError
from .tree import Tree, TreeError


class State(enum.Enum):
    """Where a patch stands in a tree; of a whole series also ``PARTIAL``."""

    NEEDED = "needed"
    HAS = "has"
    CONFLICTS = "conflicts"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Standing:
    """A patch, its state in a tree and, where it conflicts, why."""

    patch: Patch
    state: State
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """A series against a tree."""

    series: Series
    standings: tuple[Standing, ...]
    texts: dict[str, str]
    """The changed files' texts once everything is applied; empty where something conflicts or nothing is to do."""

    @property
    def state(self) -> State:
        """Of the whole: a conflict counts most."""
        states = {standing.state for standing in self.standings}
        if State.CONFLICTS in states:
            return State.CONFLICTS
        return states.pop() if len(states) == 1 else State.PARTIAL if states else State.HAS


def examine(tree: Tree, patches: Series) -> Plan:
    """Read a tree and decide; nothing is written."""
    original: dict[str, str] = {}
    problems: dict[str, str] = {}
    for path in {change.path for patch in patches.patches for change in patch.changes}:
        try:
            original[path] = tree.read(path)
        except TreeError as error:
            problems[path] = str(error)
    texts = dict(original)
    has = [patch for patch in reversed(patches.patches) if not _try(patch, texts, FileChange.reversed)]
    standings: list[Standing] = []
    for patch in patches.patches:
        problem = next((problems[change.path] for change in patch.changes if change.path in problems), None)
        problem = problem or _try(patch, texts)
        state = State.CONFLICTS if problem else State.HAS if patch in has else State.NEEDED
        standings.append(Standing(patch, state, problem or ""))
    changed = {path: text for path, text in texts.items() if text != original[path]}
    plan = Plan(patches, tuple(standings), changed)
    return Plan(patches, plan.standings, {}) if plan.state is State.CONFLICTS else plan


def _try(patch: Patch, texts: dict[str, str], turn: Callable[[FileChange], FileChange] = lambda c: c) -> str | None:
    """Apply a whole patch to ``texts``, or nothing of it and say why not."""
    new: dict[str, str] = {}
    try:
        for change in patch.changes:
            if change.path not in texts:
                return f"{change.path} is missing"
            new[change.path] = turn(change).apply(texts[change.path])
    except Conflict as conflict:
        return str(conflict)
    texts.update(new)
    return None


def release_of(tree: Tree) -> str | None:
    """The release that a tree says it is; None for a checkout, which does not say."""
    try:
        text = tree.read("vllm/_version.py")
    except TreeError:
        return None
    match = re.search(r"""^__version__ = (?:version = )?['"]([^'"]{1,80})['"]""", text, re.MULTILINE)
    return match[1] if match else None


def choose(tree: Tree, release: str | None) -> Series:
    """The series for a tree: of the release named, of the one that it says it is, or the newest that fits whole.

    Builds between releases and forks have numbers of their own, and a checkout has none.

    Raises:
        SeriesError: none is for it.
    """
    if release is not None:
        return series.for_release(release)
    said = release_of(tree)
    with contextlib.suppress(SeriesError):
        if said is not None:
            return series.for_release(said)
    for first, last in reversed(series.ranges()):
        candidate = series.load(first, last)
        if examine(tree, candidate).state is not State.CONFLICTS:
            return candidate
    name = "does not say which vLLM it is" if said is None else f"says that it is vLLM {said[:40]}"
    raise SeriesError(
        f"the folder {name}, and no series is for that or fits it whole; name a release with --vllm X.Y.Z"
    )
