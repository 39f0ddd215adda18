# SPDX-License-Identifier: Apache-2.0
"""A comparison's outcome as JSON-ready data, as a block to paste into a bug report, and as one HTML file.

The HTML holds everything it needs. Its picture shows relative error by layer and position, one panel a situation, on a
logarithmic scale: blue up to the bar, red beyond. Each cell says its number when pointed at.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_kimi_eagle3.verify.compare import Comparison, Situation

REACHABLE = (
    "whole prefill",
    "chunked prefill",
    "prefix-cache hit",
    "decode of one token",
    "verify, all accepted",
    "verify, some accepted",
    "verify, none accepted",
    "step after a rejection",
    "batch",
    "batch of prefill and verify",
    "a request joined",
    "a request left",
    "across a block boundary",
)
"""Situations that a run may come into; a report says which it did not."""

BLIND = {
    "hf": "",
    "self": (
        "`self` compares the engine with its own prefill: it cannot see what is wrong in both, such as a wrong layer, a"
        " missing residual or a wrong norm, and it does not know what the drafts should be"
    ),
}
"""What a reference cannot see."""


@dataclass
class Facts:
    """What the comparison was made on, in words and numbers that JSON knows."""

    version: str
    vllm: str
    torch: str
    runner: str
    device: str
    ranks: int
    dtype: str
    target: str
    drafter: str
    k: int
    rule: str
    decided_by: str
    boundaries: list[int]
    captured: list[int] | None
    reference: str
    requests: int
    tokens: int
    accepted_per_step: float
    overlay: str
    warnings: list[str] = field(default_factory=list[str])


def to_json(facts: Facts, comparison: Comparison) -> dict[str, Any]:
    """Keys as ``verify --json`` prints them."""
    return {
        "ok": comparison.ok,
        "inputs_ok": comparison.inputs_ok,
        "max_relative_error": comparison.max_relative_error,
        "rows": comparison.rows,
        "rows_are": comparison.rows_are,
        "drafts": comparison.drafts,
        "rounded_drafts": comparison.rounded_drafts,
        "situations": [s.to_json() for s in comparison.situations.values()],
        "not_reached": not_reached(comparison),
        "problems": comparison.problems,
        "cannot_see": BLIND[facts.reference],
        **asdict(facts),
    }


def not_reached(comparison: Comparison) -> list[str]:
    """Situations that the run did not come into."""
    return [name for name in REACHABLE if name not in comparison.situations]


def verdict(facts: Facts, comparison: Comparison) -> str:
    """One sentence."""
    if comparison.ok:
        return (
            f"right: {comparison.rows} rows in {len(comparison.situations)} situations equal the reference"
            f" ({facts.reference}), largest relative error {comparison.max_relative_error:.1e}"
        )
    wrong = [s.name for s in comparison.situations.values() if not s.ok]
    what = ", ".join(wrong[:4]) + (" and others" if len(wrong) > 4 else "")
    return "WRONG: " + (f"the drafter's inputs differ in: {what}" if wrong else comparison.problems[0])


def block(facts: Facts, comparison: Comparison) -> str:
    """All that a bug report needs, without a path or a word of the prompts."""
    lines = [
        "----- vllm-kimi-eagle3 verify -----",
        f"vllm-kimi-eagle3 {facts.version} ({facts.overlay}), vLLM {facts.vllm} {facts.runner}, torch {facts.torch},"
        f" {facts.device} x {facts.ranks}, {facts.dtype}",
        f"target {facts.target}, drafter {facts.drafter}, k = {facts.k}",
        f"boundaries {facts.boundaries} by the {facts.rule} rule, decided by {facts.decided_by};"
        f" the model captures {facts.captured}",
        f"{facts.requests} requests, {facts.tokens} tokens, {facts.accepted_per_step:.2f} drafts accepted a step;"
        f" reference {facts.reference}",
        f"{'situation':<30}{'rows':>6}  {'error':>8}  {'bar':>8}  {'drafts':>9}",
    ]
    for s in comparison.situations.values():
        drafts = "" if s.wrong_drafts is None else f"{s.calls - s.wrong_drafts}/{s.calls}"
        error, bar = s.worst
        if s.worst_median is not None:
            drafts += "  median {:.1e} of {:.1e}".format(*s.worst_median)
        if s.flipped:
            drafts += f"  {s.flipped} flipped"
        state = "" if s.ok else "  WRONG" + (" ids or positions" if s.wrong_ids else "")
        lines.append(f"{s.name:<30}{s.rows:>6}  {error:>8.1e}  {bar:>8.1e}  {drafts:>9}{state}")
    if missing := not_reached(comparison):
        lines += textwrap.wrap("not reached: " + ", ".join(missing), 100, subsequent_indent="  ")
    lines += [f"problem: {problem}" for problem in comparison.problems]
    lines += [f"warning: {warning}" for warning in facts.warnings]
    if BLIND[facts.reference]:
        lines.append("note: " + BLIND[facts.reference])
    return "\n".join([*lines, verdict(facts, comparison), "-----------------------------------"])


# ---------------------------------------------------------------------------------------------------------------------
# HTML

_COLUMNS = 160
_CELL_HEIGHT = 14
_LEFT = 54

_TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>vllm-kimi-eagle3 verify: {{ "right" if ok else "wrong" }}</title>
<style>
:root { color-scheme: light dark; --text: #1b1b1f; --page: #fff; --quiet: #5a5a66; --line: #d5d5dd; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8ee; --page: #16161a; --quiet: #a5a5b2; --line: #3a3a44; --bad: #ff8a80; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
h2 small, .quiet { color: var(--quiet); font-weight: normal; }
.bad { color: var(--bad); } pre { overflow-x: auto; border: 1px solid var(--line); padding: .8rem; font-size: 12px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--quiet); font: 9px system-ui, sans-serif; }
</style>
<h1 class="{{ "" if ok else "bad" }}">{{ verdict }}</h1>
<p>Each panel is one way in which hidden states reach the drafter. Across: position in the text. Down: the boundary
captured (boundary k is what enters layer k). Colour: relative error of the row that the drafter was given, on a
logarithmic scale.</p>
<svg viewBox="0 0 {{ width }} 26" role="img" aria-label="colour scale">
{% for x, colour, label in scale %}<rect x="{{ x }}" y="2" width="26" height="10" fill="{{ colour }}"/>
<text x="{{ x }}" y="23">{{ label }}</text>
{% endfor %}</svg>
{% for p in panels %}
<h2{% if not p.ok %} class="bad"{% endif %}>{{ p.name }}: {{ "right" if p.ok else "wrong" }}
<small>{{ p.rows }} rows, largest error {{ p.error }}, bar {{ p.bar }}{{ p.drafts }}</small></h2>
<svg viewBox="0 0 {{ width }} {{ p.height }}" role="img" aria-label="{{ p.name }}: error by boundary and position">
{% for y, label in p.labels %}<text x="0" y="{{ y }}">{{ label }}</text>
{% endfor %}{% for c in p.cells %}<rect x="{{ c.x }}" y="{{ c.y }}" width="{{ c.w }}" height="12" fill="{{ c.colour }}">
<title>{{ c.title }}</title></rect>
{% endfor %}{% for x, label in p.ticks %}<text x="{{ x }}" y="{{ p.height - 2 }}">{{ label }}</text>
{% endfor %}</svg>
{% endfor %}
<h2>To paste into a report</h2>
<pre>{{ block }}</pre>
</html>
"""


def html(facts: Facts, comparison: Comparison) -> str:
    """One self-contained page.

    Raises:
        ImportError: jinja2, which vLLM brings, is not installed.
    """
    from jinja2 import Environment

    width = _LEFT + 825  # room for the last position's number
    panels = [_panel(s) for s in comparison.situations.values()]
    ratios = ("0.0001", "0.001", "0.01", "0.1", "0.5", "2", "10", "100")
    scale = [(_LEFT + 95 * i, _colour(float(r), 1.0), f"{'bar ' if i == 0 else ''}× {r}") for i, r in enumerate(ratios)]
    template = Environment(autoescape=True).from_string(_TEMPLATE)
    return template.render(
        ok=comparison.ok,
        verdict=verdict(facts, comparison),
        width=width,
        scale=scale,
        panels=panels,
        block=block(facts, comparison),
    )


def _panel(s: Situation) -> dict[str, Any]:
    positions = sorted(s.cells)
    first, last = positions[0], positions[-1]
    wide = max(1, math.ceil((last - first + 1) / _COLUMNS))
    columns: dict[int, list[int]] = {}
    for position in positions:
        columns.setdefault((position - first) // wide, []).append(position)
    step = 800 / max(20, (last - first) // wide + 1)
    cells: list[dict[str, Any]] = []
    for column, members in columns.items():
        for j, boundary in enumerate(s.boundaries):
            # max() alone would lose a NaN that does not come first.
            values = [s.cells[p][j] for p in members]
            error = next((v for v in values if math.isnan(v)), max(values))
            where = f"{members[0]}" if len(members) == 1 else f"{members[0]} to {members[-1]}"
            cells.append(
                {
                    "x": round(_LEFT + column * step, 2),
                    "y": j * _CELL_HEIGHT,
                    "w": round(max(step - 0.5, 0.5), 2),
                    "colour": _colour(error, s.bars[j]),
                    "title": f"boundary {boundary}, position {where}: {error:.1e}",
                }
            )
    ticks = sorted({first, (first + last) // 2, last})
    drafts = "" if s.wrong_drafts is None else f", drafts right in {s.calls - s.wrong_drafts} of {s.calls} calls"
    return {
        "name": s.name,
        "ok": s.ok,
        "rows": s.rows,
        "error": f"{s.worst[0]:.1e}",
        "bar": f"{s.worst[1]:.1e}",
        "drafts": drafts,
        "height": len(s.boundaries) * _CELL_HEIGHT + 12,
        "labels": [(j * _CELL_HEIGHT + 9, f"boundary {b}") for j, b in enumerate(s.boundaries)],
        "cells": cells,
        "ticks": [(round(_LEFT + (p - first) // wide * step, 2), p) for p in ticks],
    }


def _colour(error: float, bar: float) -> str:
    """Blue, the darker the nearer to the bar; red beyond it, the stronger the farther; yellow for NaN."""
    if math.isnan(error):
        return "#ffd600"
    if error <= bar:
        share = min(1.0, max(0.0, 1 + math.log10(max(error, 1e-12) / bar) / 4))
        return f"hsl(210 70% {82 - 32 * share:.0f}%)"
    share = min(1.0, math.log10(error / bar) / 2)
    return f"hsl(8 80% {66 - 22 * share:.0f}%)"
