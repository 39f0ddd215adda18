# SPDX-License-Identifier: Apache-2.0
"""A bench result as one HTML file that needs no other: inline SVG, no script, no remote asset, every value escaped.

Geometry is worked out here, in plain numbers; the template only draws. Needs the optional extra ``report`` (jinja2).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.layers import PlanError

TEMPLATE = Path(__file__).with_name("report.html.j2")
WIDTH, HEIGHT = 720.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 16.0, 14.0, 44.0
SERIES = ("baseline", "drafter", "server", "control")


def require() -> None:
    """Raise PlanError, with the extra to install, when jinja2 is missing."""
    if importlib.util.find_spec("jinja2") is None:
        raise PlanError("--html needs jinja2; run `pip install 'vllm-kimi-eagle3[report]'`")


def render(data: Mapping[str, Any], calibration: Mapping[str, Any] | None = None) -> str:
    """The page.

    Args:
        data: what ``bench --json`` prints.
        calibration: what ``calibrate --json`` prints, for its chart.

    Raises:
        PlanError: jinja2 is missing.
    """
    require()
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    return template.render(
        data=data,
        charts=[chart for chart in _charts(data, calibration) if chart is not None],
        width=WIDTH,
        height=HEIGHT,
    )


def _charts(data: Mapping[str, Any], calibration: Mapping[str, Any] | None) -> list[dict[str, Any] | None]:
    runs: list[Mapping[str, Any]] = data["runs"]
    main = _main_runs(runs)
    return [
        _by_prompt(main),
        _by_position(main),
        _speedup(data, main),
        _sweep(runs),
        _calibration(calibration) if calibration else None,
    ]


def _main_runs(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One run a server: the smallest concurrency, greedy first."""
    best: dict[str, Mapping[str, Any]] = {}
    for run in sorted(runs, key=lambda run: (run["concurrency"], run["temperature"])):
        best.setdefault(run["name"], run)
    return [best[name] for name in SERIES if name in best]


class _Axes:
    """Data to pixels, and the marks beside the axes."""

    def __init__(self, top: float, x_range: tuple[float, float] = (0, 1)) -> None:
        self.top = _round_up(top)
        self.x_range = x_range

    def y(self, value: float) -> float:
        """The height of a value."""
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(value, self.top) / self.top, 1)

    def x(self, value: float) -> float:
        """The place of a value on the horizontal axis."""
        low, high = self.x_range
        share = (value - low) / (high - low) if high > low else 0.5
        return round(LEFT + (WIDTH - LEFT - RIGHT) * share, 1)

    def grid(self, percent: bool = False) -> list[dict[str, Any]]:
        """Five horizontal lines with their labels."""
        values = [self.top * i / 4 for i in range(5)]
        return [{"y": self.y(v), "label": f"{v:.0%}" if percent else f"{v:.3g}"} for v in values]


def _round_up(value: float) -> float:
    """The next number of 1, 2, 3, 4, 6 or 8 times a power of ten, so that quarters of it read well."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0) if step * power >= value * (1 - 1e-9))


def _by_prompt(runs: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    names = [row["name"] for row in runs[0]["prompts"]] if runs else []
    if not 0 < len(names) <= 24:
        return None
    table = {run["name"]: [row["tok_s"] for row in run["prompts"]] for run in runs}
    return _bars("Tokens per second by prompt", f"{runs[0]['setting']}, higher is better", names, table, False)


def _by_position(runs: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    speaking = [run for run in runs if run["per_position"]]
    if not speaking:
        return None
    count = max(len(run["per_position"]) for run in speaking)
    table: dict[str, list[float]] = {run["name"]: list(run["per_position"]) for run in speaking}
    if len(speaking) == 1:
        table["after the one before"] = list(speaking[0]["conditional"])
    names = [f"position {i + 1}" for i in range(count)]
    return _bars("Acceptance by position", "share of verify steps, cumulative", names, table, True)


def _bars(
    title: str, note: str, names: Sequence[str], table: Mapping[str, Sequence[float]], percent: bool
) -> dict[str, Any]:
    highest = max((value for values in table.values() for value in values), default=1.0)
    axes = _Axes(1.0 if percent else highest * 1.05)
    group = (WIDTH - LEFT - RIGHT) / len(names)
    bar = min(46.0, group * 0.8 / len(table))
    bars: list[dict[str, Any]] = []
    for s, (series, values) in enumerate(table.items()):
        for i, value in enumerate(values[: len(names)]):
            x = LEFT + group * i + (group - bar * len(table)) / 2 + bar * s
            label = f"{value:.2f}" if percent else f"{value:.3g}"
            bars.append(
                {
                    "x": round(x, 1),
                    "y": axes.y(value),
                    "w": round(bar - 2, 1),
                    "h": round(axes.y(0) - axes.y(value), 1),
                    "class": f"s{_number(series, s)}",
                    "label": label if bar >= 26 else "",
                    "title": f"{series}, {names[i]}: {label}",
                }
            )
    return {
        "title": title,
        "note": note,
        "grid": axes.grid(percent),
        "bars": bars,
        "x_labels": [{"x": round(LEFT + group * (i + 0.5), 1), "label": name[:18]} for i, name in enumerate(names)],
        "legend": [{"class": f"s{_number(name, s)}", "label": name} for s, name in enumerate(table)],
    }


def _speedup(data: Mapping[str, Any], runs: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Speed-up against acceptance length at the measured cost of a step: a straight line through break-even."""
    own = next((run for run in runs if run["name"] == data["judged"]), None)
    if own is None or not data["break_even"] or not own["per_position"]:
        return None
    longest = float(len(own["per_position"]) + 1)
    cost, length = data["break_even"], own["acceptance_length"]
    axes = _Axes(max(longest / cost, 1.0) * 1.02, (1.0, longest))
    points = [{"x": axes.x(length), "y": axes.y(length / cost), "class": "s1", "label": f"{length / cost:.2f}x"}]
    marks = [{"x": axes.x(cost), "label": f"break-even {cost:.2f}"}] if 1.0 <= cost <= longest else []
    return {
        "title": "Speed-up against acceptance length",
        "note": f"at this server's cost of {cost:.2f} ordinary steps a verify step"
        + ("" if marks else "; no acceptance length reaches break-even" if cost > longest else ""),
        "grid": axes.grid(),
        "lines": [
            {"points": f"{axes.x(1)},{axes.y(1 / cost)} {axes.x(longest)},{axes.y(longest / cost)}", "class": "l1"}
        ],
        "level": axes.y(1.0),
        "marks": marks,
        "points": points,
        "x_labels": [{"x": axes.x(v), "label": f"{v:g}"} for v in range(1, int(longest) + 1)],
    }


def _sweep(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Tokens per second by concurrency, when more than one was measured."""
    coldest = min((run["temperature"] for run in runs), default=0)
    chosen = [run for run in runs if run["temperature"] == coldest]
    steps = sorted({run["concurrency"] for run in chosen})
    if len(steps) < 2:
        return None
    table: dict[str, list[float]] = {}
    for name in SERIES:
        speeds = {run["concurrency"]: run["tok_s"] for run in chosen if run["name"] == name}
        if len(speeds) == len(steps):
            table[name] = [speeds[step] for step in steps]
    if not table:
        return None
    note = "all requests together, higher is better"
    return _bars("Tokens per second by concurrency", note, [f"{step} at a time" for step in steps], table, False)


def _calibration(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """First-token hit rate of each trial with its interval; the captured states in words."""
    trials: list[Mapping[str, Any]] = [t for t in data.get("trials") or [] if t.get("total")][:16]
    if not trials:
        return None
    axes = _Axes(1.0, (-0.5, len(trials) - 0.5))
    points: list[dict[str, Any]] = []
    whiskers: list[dict[str, Any]] = []
    for i, trial in enumerate(trials):
        rate, (low, high) = float(trial["rate"]), trial["interval"]
        best = list(trial["boundaries"]) == list(data.get("boundaries") or [])
        points.append({"x": axes.x(i), "y": axes.y(rate), "class": "s1" if best else "s0", "label": f"{rate:.1%}"})
        whiskers.append({"x": axes.x(i), "y1": axes.y(float(high)), "y2": axes.y(float(low))})
    labels = [{"x": axes.x(i), "label": str(trial["name"])[:16]} for i, trial in enumerate(trials)]
    return {
        "title": "Calibration: which layers?",
        "note": "share of right first tokens, with 99 % intervals; orange: the layers that won",
        "grid": axes.grid(True),
        "points": points,
        "whiskers": whiskers,
        "x_labels": labels,
    }


def _number(series: str, index: int) -> int:
    """A series keeps its colour in every chart."""
    return {"baseline": 0, "drafter": 1, "server": 1, "control": 2}.get(series, 3 if index else index)
