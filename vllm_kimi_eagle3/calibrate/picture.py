# SPDX-License-Identifier: Apache-2.0
"""The calibration as a picture: one bar a trial with its interval. Needs the optional extra ``report`` (matplotlib)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.layers import PlanError


def require() -> None:
    """Raise PlanError, with the extra to install, when matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlanError("--picture needs matplotlib; run `pip install 'vllm-kimi-eagle3[report]'`")


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the picture, in the format that the file's suffix names.

    Args:
        data: what ``calibrate --json`` prints.
        path: such as ``calibration.png`` or ``.svg``.

    Raises:
        PlanError: matplotlib is missing, or the file can't be written.
    """
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trials: list[Mapping[str, Any]] = data["trials"]
    won = data["boundaries"]
    figure: Any = Figure(figsize=(1.6 + 1.1 * len(trials), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, trial in enumerate(trials):
        low, high = trial["interval"]
        colour = "#d9730d" if trial["boundaries"] == won else "#8c959f"
        axes.bar(i, trial["rate"], width=0.62, color=colour)
        axes.plot([i, i], [low, high], color="#1b1f24", linewidth=1.4)
        axes.text(i, high + 0.012, f"{trial['rate']:.1%}", ha="center", fontsize=9)
    axes.set_xticks(range(len(trials)))
    axes.set_xticklabels(
        [f"{trial['name']}\n{', '.join(map(str, trial['boundaries']))}" for trial in trials], fontsize=8
    )
    axes.set_ylim(0, min(1.08, max(trial["interval"][1] for trial in trials) + 0.1))
    axes.set_ylabel("right first tokens")
    axes.set_title("Which layers? " + (f"boundaries {tuple(won)}" if won else "not decided"), fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} can't be written: {error}") from None
