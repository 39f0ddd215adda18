# SPDX-License-Identifier: Apache-2.0
"""Alignment records: what ``calibrate`` measured for one drafter on one target.

A record lives in ``<cache>/alignment/<key>.json``, never in a model folder, which may be read-only or shared. The key
is made from content: the drafter's ids, shapes and a digest of its weights, and the target's shape. Weights of the
target are not in it (they may be a terabyte), so two fine-tunes of one target share a record; what an id means is a
property of the drafter. The key is the same from a ``config.json`` and from vLLM's config object made of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from .files import inside, read_object
from .headers import CheckpointHeaders
from .parse import MAX_LAYERS, describe, read_drafter, read_ids, read_target
from .plan import RULES, PlanError

FORMAT = 1
MAX_RECORD = 256 << 10
_AGAIN = "delete it and run `vllm-kimi-eagle3 calibrate` again"


@dataclass(frozen=True)
class AlignmentRecord:
    """One measurement.

    Attributes:
        key: content key of the pair, from ``content_key``.
        ids: the checkpoint's list that was measured; None for a checkpoint without one.
        num_layers: L of the target.
        boundaries: the boundaries that won.
        rule: the rule that gives them from ``ids``; None when neither does, or there are no ids.
        hit_rates: share of right first tokens, 0..1, by shift against vLLM's reading: ``"-1"``, ``"0"``, ``"1"``.
        intervals: low and high end of each rate's confidence interval.
        measured_on: free text: release, device, date, tokens.
    """

    key: str
    ids: tuple[int, ...] | None
    num_layers: int
    boundaries: tuple[int, ...]
    rule: str | None
    hit_rates: Mapping[str, float] = field(default_factory=dict[str, float])
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])
    measured_on: str = ""

    def summary(self) -> str:
        """The measurement in a few words."""
        rates = ", ".join(f"{shift}: {rate:.3f}" for shift, rate in sorted(self.hit_rates.items()))
        return f"alignment record {self.key[:12]}" + (f", hit rates by shift {rates}" if rates else "")

    def to_json(self) -> dict[str, Any]:
        """Plain data for the file."""
        return {
            "format": FORMAT,
            "key": self.key,
            "ids": None if self.ids is None else list(self.ids),
            "num_layers": self.num_layers,
            "boundaries": list(self.boundaries),
            "rule": self.rule,
            "hit_rates": dict(self.hit_rates),
            "intervals": {shift: list(ends) for shift, ends in self.intervals.items()},
            "measured_on": self.measured_on,
        }


def cache_folder() -> Path:
    """Where this package keeps what it measures: ``$VLLM_KIMI_EAGLE3_CACHE`` or ``~/.cache/vllm-kimi-eagle3``.

    Raises:
        PlanError: neither is set: a container's user without a name has no home.
    """
    named = os.environ.get("VLLM_KIMI_EAGLE3_CACHE")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "vllm-kimi-eagle3"
    except RuntimeError:
        raise PlanError("this user has no home folder; set VLLM_KIMI_EAGLE3_CACHE to a folder of yours") from None


def content_key(target: Mapping[str, Any], drafter: Mapping[str, Any], headers: CheckpointHeaders | None) -> str | None:
    """The key of a pair: 64 hexadecimal digits, or None when the drafter's weights can't be told apart.

    Raises:
        PlanError: as ``resolve``, for configs that can't be read.
    """
    if headers is None or headers.digest is None:
        return None
    facts, draft = read_target(target), read_drafter(drafter)
    content = {
        "format": FORMAT,
        # Not the model type: vLLM renames it while loading, and the key must be the same inside and outside.
        "target": [facts.num_layers, facts.hidden_size, facts.vocab_size],
        # The list that was decided on, not its key: the same checkpoint may be read through either layout.
        "ids": list(draft.lists[0].ids) if draft.lists else None,
        "weights": headers.digest,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load(key: str | None, cache: Path | None = None) -> AlignmentRecord | None:
    """The record of a pair, or None when nothing was measured.

    A home that this user has not, or may not enter, holds no records of theirs: containers run servers like that.

    Raises:
        PlanError: there is a record, and it is damaged; or the folder of records can't be entered.
    """
    if key is None:
        return None
    if cache is None and not os.environ.get("VLLM_KIMI_EAGLE3_CACHE"):
        try:
            if not cache_folder().is_dir():
                return None
        except (OSError, PlanError):
            return None
    path = record_path(key, cache)
    try:
        path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PlanError(
            f"the alignment record {path} can't be read: {error.strerror}; let this user read its folder, or set"
            " VLLM_KIMI_EAGLE3_CACHE to one of theirs"
        ) from None
    try:
        return parse(read_object(inside(path.parent, path), MAX_RECORD), key, str(path))
    except PlanError as error:
        # What a reader of files and lists says does not know that this file can be made again.
        raise error if _AGAIN in str(error) else PlanError(f"alignment record: {error}; {_AGAIN}") from None


def save(record: AlignmentRecord, cache: Path | None = None) -> Path:
    """Write a record, whole or not at all, and return its path. ``OSError`` passes through."""
    path = record_path(record.key, cache)
    text = json.dumps(record.to_json(), indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: many processes and threads may measure at once, and a link that lies there is not followed.
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{record.key[:12]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path


def record_path(key: str, cache: Path | None = None) -> Path:
    """Where the record with that key is kept."""
    if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
        raise PlanError(f"{describe(key)} is no alignment key, 64 hexadecimal digits were expected")
    return (cache or cache_folder()) / "alignment" / f"{key}.json"


def parse(data: Mapping[str, Any], key: str, where: str) -> AlignmentRecord:
    """A record from its file's data, checked in itself.

    Raises:
        PlanError: a field is missing or wrong, or the fields contradict one another.
    """

    def bad(what: str) -> PlanError:
        return PlanError(f"the alignment record {where} {what}; {_AGAIN}")

    if data.get("format") != FORMAT or data.get("key") != key:
        raise bad(f"has format {describe(data.get('format'))} and key {describe(data.get('key'))}, not its own")
    layers, rule = data.get("num_layers"), data.get("rule")
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        raise bad(f"has num_layers {describe(layers)}")
    ids = None if data.get("ids") is None else read_ids(data["ids"], f"ids of the alignment record {where}")
    boundaries = read_ids(data.get("boundaries"), f"boundaries of the alignment record {where}")
    if not boundaries or boundaries[0] < 0 or boundaries[-1] > layers or list(boundaries) != sorted(set(boundaries)):
        raise bad(f"has boundaries {describe(boundaries)} for {layers} layers")
    if rule is not None and rule not in RULES:
        raise bad(f"has rule {describe(rule)}")
    if ids is not None and rule is not None:
        expected = tuple(layer + 1 for layer in ids) if rule == "output" else ids
        if expected != boundaries:
            raise bad(f"says {rule} rule, but its boundaries {describe(boundaries)} are not {describe(expected)}")
    rates: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    stored_rates, stored_ends = data.get("hit_rates", {}), data.get("intervals", {})
    if not isinstance(stored_rates, dict) or not isinstance(stored_ends, dict):
        raise bad("has hit_rates or intervals that are no objects")
    for shift, rate in cast("dict[str, Any]", stored_rates).items():
        if shift not in ("-1", "0", "1") or not _is_rate(rate):
            raise bad(f"has hit rate {describe(rate)} at shift {describe(shift)}")
        rates[shift] = float(rate)
    for shift, ends in cast("dict[str, Any]", stored_ends).items():
        if not isinstance(ends, list):
            raise bad(f"has interval {describe(ends)} at shift {describe(shift)}")
        pair = cast("list[Any]", ends)
        if len(pair) != 2 or not all(_is_rate(end) for end in pair) or pair[0] > pair[1]:
            raise bad(f"has interval {describe(pair)} at shift {describe(shift)}")
        intervals[shift] = (float(pair[0]), float(pair[1]))
    return AlignmentRecord(key, ids, layers, boundaries, rule, rates, intervals, str(data.get("measured_on", ""))[:500])


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
