# SPDX-License-Identifier: Apache-2.0
"""The strict applier against difflib, and against diffs that are made to deceive it."""

from __future__ import annotations

import contextlib
import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.source_patches.diff import Conflict, DiffError, FileChange, Hunk, parse

LINES = st.lists(
    st.sampled_from(["a\n", "b\n", "  c\n", "\n", "- d\n", "+ e\n", "@@ f\n", "é\x0c\u2028\n"]), max_size=12
)


def diff(old: list[str], new: list[str], path: str = "x.py") -> str:
    return "".join(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"))


@given(LINES, LINES)
def test_what_difflib_writes_applies_and_comes_back(old: list[str], new: list[str]) -> None:
    old, new = ["first\n", *old], ["first\n", *new]
    if old == new:
        return
    (change,) = parse(diff(old, new))
    assert change.apply("".join(old)) == "".join(new)
    assert change.reversed().apply("".join(new)) == "".join(old)


@given(LINES, LINES, LINES, LINES)
def test_it_applies_right_or_not_at_all(old: list[str], new: list[str], ahead: list[str], behind: list[str]) -> None:
    """Moved by other lines, a hunk lands on its own text, or it is a conflict."""
    old, new = ["first\n", *old, "last\n"], ["first\n", *new, "last\n"]
    if old == new:
        return
    (change,) = parse(diff(old, new))
    try:
        result = change.apply("".join([*ahead, *old, *behind]))
    except Conflict:
        return
    assert sorted(result) == sorted("".join([*ahead, *new, *behind]))


def test_several_places_are_a_conflict() -> None:
    change = FileChange("x.py", (Hunk(10, ("a\n",), ("b\n",)),))
    assert change.apply("a\n") == "b\n"
    with pytest.raises(Conflict, match="several"):
        change.apply("a\na\n")
    assert FileChange("x.py", (Hunk(1, ("a\n",), ("b\n",)),)).apply("a\na\n") == "a\nb\n"


def test_near_is_not_enough() -> None:
    (change,) = parse(diff(["1\n", "2\n", "3\n"], ["1\n", "x\n", "3\n"]))
    with pytest.raises(Conflict, match="does not fit"):
        change.apply("1\n2\n4\n")


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", "a/../../x", "x/./y", "x//y", "..", "x\\y", 'x"y', "x y", "x\ty", ".git/config", "C:/x"],
)
def test_paths_that_a_diff_must_not_name(path: str) -> None:
    with pytest.raises(DiffError):
        parse(f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "--- a/x\n",
        "--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n",
        "--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a\n",
        "--- a/x\n+++ b/x\n",
        "--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n a\n",
        "--- a/x\n+++ b/x\n@@ -5 +5 @@\n-a\n+b\n@@ -1 +1 @@\n-c\n+d\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -99999999999999999999 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\nrename from x\n",
        "x" * (1 << 21),
    ],
    ids=range(15),
)
def test_texts_that_are_no_diffs(text: str) -> None:
    with pytest.raises(DiffError):
        parse(text)


@given(st.text(alphabet="-+ ab/@@1,0\n", max_size=200))
def test_any_text_is_a_diff_or_a_diff_error(text: str) -> None:
    with contextlib.suppress(DiffError):
        parse("--- a/x\n+++ b/x\n@@ -1 +1 @@\n" + text)
