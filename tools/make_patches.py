# SPDX-License-Identifier: Apache-2.0
"""Write ``patches/``: the remedies as patches to vLLM's source, for every release.

``python -m tools.make_patches`` writes the folder anew; ``--check`` only says whether it is up to date. A remedy is a
:class:`tools.source_edits.Recipe`: exact text inside one definition, and what takes its place. On every release, the
fixes' own probes say which recipes are needed. Consecutive releases share a series where every one of its patches
applies to both with exact context and leaves the very text that the recipes make.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.drift.expected import RELEASES
from tests.releases import tree
from tools.source_edits import RECIPES, Recipe
from vllm_kimi_eagle3.patching.engine import probe
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Need
from vllm_kimi_eagle3.registry import FIXES
from vllm_kimi_eagle3.source_patches.diff import Conflict, lines_of, parse

ROOT = Path(__file__).parents[1] / "patches"
AUTHOR = "vllm-kimi-eagle3 maintainers <maintainers@vllm-kimi-eagle3.invalid>"
UPDATED = "2026-11-30"
DATE = "Mon, 30 Nov 2026 00:00:00 +0000"
_BY_LABEL = {fix.label: fix for fix in FIXES}


@dataclass
class Step:
    """One recipe on one release: the files' texts before and after."""

    recipe: Recipe
    before: dict[str, str]
    after: dict[str, str]


def steps(release: str) -> list[Step]:
    """Every recipe that a release needs, each on top of those before it.

    Raises:
        ValueError: a recipe does not know the release's text.
    """
    root = tree(release)
    pristine = SourceTree(root)
    texts: dict[str, str] = {}
    done: list[Step] = []
    for recipe in RECIPES:
        if not recipe.needed(pristine, probe(_BY_LABEL[recipe.label], pristine).need is Need.APPLY):
            continue
        before: dict[str, str] = {}
        after: dict[str, str] = {}
        for place in recipe.places:
            target = place.target(pristine)
            if target is None:
                continue
            path = str(pristine.path(target.partition(":")[0]).relative_to(root))
            text = after.get(path) or texts.get(path) or (root / path).read_text("utf-8")
            before.setdefault(path, text)
            try:
                after[path] = place.edit(text, target)
            except LookupError as error:
                raise ValueError(f"vLLM {release}, {recipe.label}: {error}") from None
        texts.update(after)
        done.append(Step(recipe, before, after))
    return done


def diff(step: Step) -> str:
    """The unified diff of a step, as git writes it."""
    parts: list[str] = []
    for path in sorted(step.before):
        old, new = (lines_of(text[path]) for text in (step.before, step.after))
        lines = difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
        parts.append(f"diff --git a/{path} b/{path}\n{''.join(lines)}")
    return "".join(parts)


def header(recipe: Recipe) -> str:
    """A mail's header with the DEP-3 fields in its body, so that ``git am`` keeps them."""
    fix = _BY_LABEL[recipe.label]
    description = f"{fix.id} {fix.name}: {fix.why}. {recipe.description}"
    fields = [
        ("Description", description),
        ("Origin", "vendor, vllm-kimi-eagle3"),
        ("Forwarded", "no"),
        ("Applied-Upstream", recipe.applied_upstream),
        ("Last-Update", UPDATED),
        ("Upstream", fix.upstream),
        ("Drop-When", recipe.drop_when or fix.retire),
    ]
    body = "\n".join(
        textwrap.fill(f"{key}: {value}", 78, subsequent_indent=" ", break_on_hyphens=False, break_long_words=False)
        for key, value in fields
    )
    return f"From: {AUTHOR}\nDate: {DATE}\nSubject: [PATCH] {fix.id}: {recipe.title}\n\n{body}\n---\n"


def carries(first: list[Step], other: list[Step]) -> bool:
    """Whether the patches made for one release do on another exactly what its own recipes do."""
    if [step.recipe for step in first] != [step.recipe for step in other]:
        return False
    for mine, theirs in zip(first, other, strict=True):
        changes = parse(diff(mine))
        if {change.path for change in changes} != set(theirs.before):
            return False
        for change in changes:
            try:
                text = change.apply(theirs.before[change.path])
            except Conflict:
                return False
            if text != theirs.after[change.path]:
                return False
    return True


def write(root: Path) -> list[str]:
    """Write every series below ``root``; returns the ranges' names."""
    groups: list[tuple[list[str], list[Step]]] = []
    for release in RELEASES:
        made = steps(release)
        if groups and carries(groups[-1][1], made):
            groups[-1][0].append(release)
        else:
            groups.append(([release], made))
    names: list[str] = []
    for releases, made in groups:
        name = releases[0] if len(releases) == 1 else f"{releases[0]}-{releases[-1]}"
        folder = root / name
        folder.mkdir(parents=True)
        files = [f"{number:04d}-{step.recipe.file}.patch" for number, step in enumerate(made, 1)]
        listed = "\n".join([f"# vLLM {' '.join(releases)}", *files])
        (folder / "series").write_text(listed + "\n", encoding="utf-8")
        for file, step in zip(files, made, strict=True):
            (folder / file).write_text(header(step.recipe) + diff(step), encoding="utf-8")
        names.append(name)
    return names


def differing(root: Path) -> list[str]:
    """The files below ``patches/`` that are not as the recipes make them."""
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch))
        made = {p.relative_to(scratch): p.read_text("utf-8") for p in Path(scratch).glob("*/*")}
    there = {p.relative_to(root): p.read_text("utf-8") for p in root.glob("*/*")}
    return sorted(str(path) for path in made.keys() | there.keys() if made.get(path) != there.get(path))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.make_patches", description="Write or check patches/.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a patch is out of date")
    if parser.parse_args().check:
        stale = differing(ROOT)
        print("\n".join(stale) if stale else "patches/ is up to date")
        return 1 if stale else 0
    with tempfile.TemporaryDirectory(dir=ROOT.parent, prefix=".patches-") as scratch:
        names = write(Path(scratch))
        for old in ROOT.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
        for name in names:
            (Path(scratch) / name).rename(ROOT / name)
    print("\n".join(names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
