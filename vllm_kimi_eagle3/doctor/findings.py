# SPDX-License-Identifier: Apache-2.0
"""One finding: what was found, why it matters, what to do. And how a list of them reads."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "info", "warning", "error"]
"""``error``: the server will not start, or will be wrong or slow. ``warning``: it may. The rest is for the record."""

_MARK: dict[Level, str] = {"ok": "ok      ", "info": "info    ", "warning": "WARNING ", "error": "ERROR   "}


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        id: the check's name, stable for scripts.
        level: see ``Level``.
        message: what was found, one sentence.
        why: what it does to a server; empty for a good finding.
        do: the next step; empty when there is none.
    """

    id: str
    level: Level
    message: str
    why: str = ""
    do: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, the keys named as the attributes."""
        return {"id": self.id, "level": self.level, "message": self.message, "why": self.why, "do": self.do}


def ok(check: str, message: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(check, "ok", message)


def exit_status(findings: Iterable[Finding]) -> int:
    """1 when an error is among them, else 0: a warning alone does not fail a script."""
    return int(any(finding.level == "error" for finding in findings))


def block(findings: Sequence[Finding]) -> str:
    """The findings for a terminal or a bug report, the worst last, where the eye rests."""
    order: tuple[Level, ...] = ("ok", "info", "warning", "error")
    lines: list[str] = []
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        lines.append(f"{_MARK[finding.level]}{finding.id}: {finding.message}")
        for label, text in (("why", finding.why), ("do ", finding.do)):
            if text:
                lines.append(
                    textwrap.fill(
                        text,
                        width=118,
                        initial_indent=f"        {label}  ",
                        subsequent_indent=" " * 13,
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                )
    return "\n".join(lines)
