# SPDX-License-Identifier: Apache-2.0
"""From runs, files and an earlier calibration to the evidence that the verdict is made of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vllm_kimi_eagle3.bench.measure import Run
from vllm_kimi_eagle3.bench.statistics import Share
from vllm_kimi_eagle3.bench.verdict import Boundaries, Evidence
from vllm_kimi_eagle3.doctor.checkpoint import check_pair, plan_of, read_pair
from vllm_kimi_eagle3.layers import PlanError, facts_of, stock_boundaries
from vllm_kimi_eagle3.layers.files import read_object
from vllm_kimi_eagle3.layers.stock import NEWEST
from vllm_kimi_eagle3.patching.release import installed_release

VOCABULARY_CHECKS = ("d2t", "d2t-range", "d2t-unique", "draft-vocabulary")
VOCABULARY_DOUBTS = ("d2t-order", "t2d")
FIT_CHECKS = ("trained-for", "fc-width")
MAX_CALIBRATION = 1 << 20
MAX_VERIFICATION = 16 << 20
ORDINARY_TEMPERATURE = 0.7
"""Up to here, sampled text is accepted nearly as well as greedy text."""


def main_run(runs: Sequence[Run], name: str) -> Run | None:
    """A server's run that speaks for it: greedy before sampled, one request at a time before many."""
    own = [run for run in runs if run.name == name]
    return min(own, key=lambda run: (run.setting.concurrency, run.setting.temperature), default=None)


def speedup_of(runs: Sequence[Run], name: str) -> float | None:
    """A server's speed against the baseline's under the same setting; None without one."""
    run = main_run(runs, name)
    if run is None:
        return None
    base = next((other for other in runs if other.name == "baseline" and other.setting == run.setting), None)
    return run.tok_s / base.tok_s if base is not None and base.tok_s else None


def evidence_of(
    runs: Sequence[Run],
    name: str,
    *,
    target: Path | None = None,
    drafter: Path | None = None,
    calibration: Path | None = None,
    verification: Path | None = None,
) -> Evidence:
    """All that is known about the server called ``name``.

    Args:
        runs: everything that was measured.
        name: the run to judge.
        target: the target's folder, for what its files say.
        drafter: the drafter's folder.
        calibration: a file that ``calibrate --json`` wrote.
        verification: a file that ``verify --json`` wrote.

    Raises:
        PlanError: a folder or a file can't be read.
    """
    facts: dict[str, Any] = {}
    if target is not None and drafter is not None and target.is_dir() and drafter.is_dir():
        facts = _files(target, drafter)
    if verification is not None:
        facts.update(read_verification(verification))
    if calibration is not None:
        measured = read_calibration(calibration)
        boundaries = measured.pop("reference_boundaries")
        if boundaries is not None and facts.get("captured") not in (None, boundaries):
            measured["reference"] = ()  # simulated with other layers than this server's
        facts.update(measured)
    sampled = [run for run in runs if run.name == name and 0 < run.setting.temperature <= ORDINARY_TEMPERATURE]
    if sampled and sampled[0].counters.by_position:
        facts["sampled_first"] = Share(sampled[0].counters.by_position[0], sampled[0].counters.drafts)
    run, control = main_run(runs, name), main_run(runs, "control")
    first = control.counters.by_position[:1] if control is not None else ()
    if control is not None and first:
        facts["control_first"] = Share(first[0], control.counters.drafts)
    if run is not None:
        facts.update(
            drafts=run.counters.drafts,
            accepted=run.counters.by_position,
            greedy=run.setting.temperature == 0,
            speedup=speedup_of(runs, name),
        )
    return Evidence(**facts)


def _files(target: Path, drafter: Path) -> dict[str, Any]:
    pair = read_pair(target, drafter, layer_rule=os.environ.get("VLLM_KIMI_EAGLE3_LAYER_RULE") or None)
    bad = [f for f in check_pair(pair) if f.level in ("warning", "error")]
    facts: dict[str, Any] = {
        "vocabulary_faults": tuple(f.message for f in bad if f.id in VOCABULARY_CHECKS and f.level == "error"),
        "vocabulary_doubts": tuple(
            f.message for f in bad if f.id in VOCABULARY_DOUBTS or (f.id in VOCABULARY_CHECKS and f.level == "warning")
        ),
        "fit_faults": tuple(f.message for f in bad if f.id in FIT_CHECKS),
    }
    release = installed_release() or NEWEST
    try:
        plan = plan_of(pair)
        if (os.environ.get("VLLM_KIMI_EAGLE3") or "on").strip().lower() in ("off", "stock"):
            facts_of(release)
            stock = stock_boundaries(release, pair.target, pair.drafter)
            captured = stock.runner(stock.default).boundaries
        else:
            captured = plan.boundaries
        facts.update(captured=captured, planned=plan.boundaries, certain=plan.decided_by != "ambiguous")
    except PlanError:
        pass  # doctor's finding "layers" says it; nothing is known about what such a server captures
    return facts


def read_calibration(path: Path) -> dict[str, Any]:
    """``trials``, ``relabelled``, ``reference`` and ``reference_boundaries`` of a calibration's JSON.

    Raises:
        PlanError: it is not one.
    """
    data = read_object(path, MAX_CALIBRATION)
    try:
        trials: dict[Boundaries, Share] = {}
        for trial in data["trials"]:
            trials[tuple(int(b) for b in trial["boundaries"])] = _share(trial)
        relabelled = data.get("relabelled")
        reference = cast("list[Mapping[str, Any]]", data.get("per_position") or [])
        simulated, decided = data.get("per_position_boundaries"), data.get("boundaries")
        return {
            "reference_boundaries": None if simulated is None else tuple(int(b) for b in simulated),
            "trials": trials,
            "decided": None if decided is None else tuple(int(b) for b in decided),
            "relabelled": None if relabelled is None else _share(relabelled),
            "reference": tuple(_share(position) for position in reference),
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise PlanError(f"{path} is not what `vllm-kimi-eagle3 calibrate --json` prints") from None


def read_verification(path: Path) -> dict[str, Any]:
    """What ``verify`` saw, from its JSON.

    The engine's own prefill can't see what is wrong in prefill, too, so equality with it proves no states right.

    Raises:
        PlanError: it is not one.
    """
    data = read_object(path, MAX_VERIFICATION)
    try:
        inputs_ok, captured, rows_are = data["inputs_ok"], data["captured"], data["rows_are"]
        if not isinstance(inputs_ok, bool) or data["reference"] not in ("hf", "self"):
            raise ValueError("no verification")
        facts: dict[str, Any] = {
            "features_match": None if inputs_ok and data["reference"] == "self" else inputs_ok,
            "rows_are": None if rows_are is None else tuple(int(b) for b in rows_are),
            "planned": tuple(int(b) for b in data["boundaries"]),
            "certain": data["decided_by"] != "ambiguous",
            "wrong_drafts": tuple(_share({"hits": wrong, "total": of}) for wrong, of in data["drafts"]),
            "wrong_rounded": tuple(_share({"hits": wrong, "total": of}) for wrong, of in data["rounded_drafts"]),
        }
        if captured is not None:
            facts["captured"] = tuple(sorted(int(b) for b in captured))
        return facts
    except (KeyError, TypeError, ValueError):
        raise PlanError(f"{path} is not what `vllm-kimi-eagle3 verify --json` prints") from None


def _share(data: Mapping[str, Any]) -> Share:
    hits, total = int(data["hits"]), int(data["total"])
    if not 0 <= hits <= total:
        raise ValueError("hits out of range")
    return Share(hits, total)
