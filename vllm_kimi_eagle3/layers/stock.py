# SPDX-License-Identifier: Apache-2.0
"""What stock vLLM would capture for the same two configs, release by release.

One table of facts, ``TABLE``; each row holds from its release until the next row. It is tested against the functions
of every release's own source (``tests/layers/test_stock.py``), so a row is never taken on trust. It covers Kimi-K2.x
and DeepSeek-V2/V3 targets on a GPU with Triton and no pipeline parallelism; what a fork or a plugin changes it can't
know. "V1" is ``v1/worker/gpu_model_runner.py``, "V2" is ``v1/worker/gpu/model_runner.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from .parse import TOP_KEY, Target, describe, read_target
from .plan import PlanError
from .resolve import default_boundaries

Config = Mapping[str, Any]
Reader = Callable[[Config], Any]
NEWEST = "0.33.0"
"""The newest release that the table is tested against."""


def _top(config: Config) -> Any:
    """Only the top-level list."""
    return config.get(TOP_KEY)


def _top_dflash_raw(config: Config) -> Any:
    """Else DFlash's list, as it stands."""
    ids, dflash = config.get(TOP_KEY), config.get("dflash_config")
    return dflash.get("target_layer_ids") if not ids and dflash and isinstance(dflash, dict) else ids


def _top_dflash_nested(config: Config) -> Any:
    """Else the nested EAGLE list as it stands, or DFlash's list plus one; ``eagle_config`` hides DFlash's."""
    ids = _top_dflash(config)
    eagle = config.get("eagle_config")
    if not config.get(TOP_KEY) and eagle and isinstance(eagle, dict):
        return cast("dict[str, Any]", eagle).get(TOP_KEY)
    return ids


def _top_dflash(config: Config) -> Any:
    """Else DFlash's list plus one."""
    ids, dflash = config.get(TOP_KEY), config.get("dflash_config")
    if not ids and dflash and isinstance(dflash, dict):
        return _plus_one(cast("dict[str, Any]", dflash).get("target_layer_ids") or [])
    return ids


def _top_dspark(config: Config) -> Any:
    """Else DFlash's list, else DSpark's two, each plus one."""
    ids = _top_dflash(config)
    for key in ("dspark_target_layer_ids", "target_layer_ids"):
        if not ids and config.get(key):
            ids = _plus_one(config[key])
    return ids


def _top_layer_ids(config: Config) -> Any:
    """Else ``layer_ids`` of the nested configs, as it stands."""
    ids = _top_dspark(config)
    for key in ("dflash_config", "eagle_config"):
        nested = config.get(key)
        if not ids and nested and isinstance(nested, dict):
            ids = cast("dict[str, Any]", nested).get("layer_ids")
    return ids


def _top_layer_ids_v41(config: Config) -> Any:
    """As before, but DSpark's list stands as it is for ``deepseek_v41``."""
    if config.get("model_type") == "deepseek_v41" and not _top_dflash(config) and config.get("dspark_target_layer_ids"):
        return list(config["dspark_target_layer_ids"])
    return _top_layer_ids(config)


def _plus_one(ids: Any) -> list[Any]:
    return [layer + 1 for layer in ids]


@dataclass(frozen=True)
class Facts:
    """What holds from one release on."""

    since: tuple[int, int]
    refused: bool
    """Whether eagle3 is refused on these targets, whatever the runners would read."""
    v1: Reader
    v2: Reader
    last_boundary: bool
    """Whether the capture loop can return boundary L."""
    fc_counts: bool
    """Whether the drafter's ``fc`` follows ``num_aux_hidden_states`` or the nested list; else it takes 3 states."""
    v2_reads_use_aux: bool
    v2_default: str
    """When V2 is the default: never, for ``listed`` or ``dense`` ones, always."""
    speculators_types: tuple[str, ...] | None
    """Transformer types that a speculators config may have; None for any."""


_ANY = None
_TWO = ("qwen3", "llama")
# fmt: off
TABLE: tuple[Facts, ...] = (
    #     since    refused  V1 reads            V2 reads            L      fc     use_aux V2 default
    Facts((0, 15), True,    _top,               _top,               False, False, False, "never",  _ANY),
    Facts((0, 18), False,   _top,               _top,               False, False, False, "never",  _ANY),
    Facts((0, 20), False,   _top_dflash_raw,    _top,               False, False, False, "never",  _ANY),
    Facts((0, 22), False,   _top_dflash_nested, _top,               False, True,  False, "never",  _ANY),
    Facts((0, 24), False,   _top_dflash_nested, _top_dflash,        False, True,  False, "listed", _TWO),
    Facts((0, 25), False,   _top_dflash_nested, _top_dspark,        True,  True,  False, "dense",  _TWO),
    Facts((0, 27), False,   _top_dflash_nested, _top_layer_ids,     True,  True,  False, "dense",  _TWO),
    Facts((0, 29), False,   _top_dflash_nested, _top_layer_ids,     True,  True,  False, "always", _TWO),
    Facts((0, 30), False,   _top_dflash_nested, _top_layer_ids_v41, True,  True,  False, "always", _TWO),
    Facts((0, 33), False,   _top_dflash_nested, _top_layer_ids_v41, True,  True,  True,  "always", _TWO),
)
# fmt: on
REFUSED = "refuses eagle3 on this target (its list of target types has neither kimi nor deepseek)"


@dataclass(frozen=True)
class RunnerReading:
    """What one runner takes.

    Attributes:
        boundaries: what the capture loop returns, ascending; None when it doesn't get that far.
        problem: why it doesn't, or what goes wrong later; None when all is well.
    """

    boundaries: tuple[int, ...] | None
    problem: str | None = None


@dataclass(frozen=True)
class StockReading:
    """What a stock release takes on either runner, and which one it runs by default."""

    release: str
    v1: RunnerReading
    v2: RunnerReading
    default: str
    warnings: tuple[str, ...] = ()

    def runner(self, name: str) -> RunnerReading:
        """The reading of ``"V1"`` or ``"V2"``."""
        return self.v1 if name == "V1" else self.v2

    def to_json(self) -> dict[str, Any]:
        """``{"V1": [...] | None, "V2": [...] | None, "default": ..., "problems": ..., "release": ...}``."""

        def listed(reading: RunnerReading) -> list[int] | None:
            return None if reading.boundaries is None else list(reading.boundaries)

        return {
            "V1": listed(self.v1),
            "V2": listed(self.v2),
            "default": self.default,
            "problems": {"V1": self.v1.problem, "V2": self.v2.problem},
            "release": self.release,
        }


def parse_release(release: str) -> tuple[int, int]:
    """Major and minor number of a version such as ``0.33.0``, ``0.26.1.dev3+gabc`` or ``v0.20.1``.

    Raises:
        PlanError: it is no version, or older than 0.15.
    """
    match = re.match(r"v?([0-9]{1,4})[.]([0-9]{1,4})(?![0-9])", release)
    if match is None:
        raise PlanError(f"{describe(release)} is no vLLM version; something like {NEWEST} was expected")
    number = (int(match[1]), int(match[2]))
    if number < TABLE[0].since:
        raise PlanError(f"vLLM {describe(release)} is older than 0.15.0, the oldest release that is known here")
    return number


def facts_of(release: str) -> Facts:
    """The row of ``TABLE`` that holds for a release; the last one for releases newer than the table."""
    number = parse_release(release)
    return max((row for row in TABLE if row.since <= number), key=lambda row: row.since)


def stock_boundaries(release: str, target: Config, drafter: Config) -> StockReading:
    """What stock vLLM of one release captures.

    Args:
        release: a version of vLLM.
        target: the target's ``config.json``.
        drafter: the drafter's ``config.json``.

    Raises:
        PlanError: the release or the target's config can't be read.
    """
    facts, shape = facts_of(release), read_target(target)
    warnings: tuple[str, ...] = ()
    if parse_release(release) > parse_release(NEWEST):
        warnings = (f"vLLM {release} is newer than {NEWEST}, the newest known here, and is taken to read alike",)
    default = "V2" if _v2_by_default(facts, shape) else "V1"
    refusal = RunnerReading(None, REFUSED) if facts.refused else _refuse_speculators(facts, drafter)
    if refusal is not None:
        return StockReading(release, refusal, refusal, default, warnings)
    config = loaded(drafter)
    v1 = _read(facts, facts.v1, config, shape, reads_use_aux=True)
    v2 = _read(facts, facts.v2, config, shape, reads_use_aux=facts.v2_reads_use_aux)
    return StockReading(release, v1, v2, default, warnings)


def loaded(drafter: Config) -> Config:
    """The keys that vLLM's config object has after loading, of those that are read here.

    A speculators config becomes its ``transformer_layer_config`` with the ids beside it; everything else at its top
    level is dropped (``transformers_utils/configs/speculators/``). Other configs keep their keys.
    """
    if drafter.get("speculators_config") is None or drafter.get("model_type") is not None:
        return drafter
    layer = drafter.get("transformer_layer_config")
    config = dict(cast("Config", layer)) if isinstance(layer, Mapping) else {}
    if drafter.get(TOP_KEY):
        config[TOP_KEY] = drafter[TOP_KEY]
    return config


def _refuse_speculators(facts: Facts, drafter: Config) -> RunnerReading | None:
    if loaded(drafter) is drafter or facts.speculators_types is None:
        return None
    kind = loaded(drafter).get("model_type", "llama")
    if kind in facts.speculators_types:
        return None
    return RunnerReading(None, f"refuses a speculators drafter of model_type {describe(kind)}")


def _v2_by_default(facts: Facts, target: Target) -> bool:
    if facts.v2_default in ("listed", "dense") and "DeepseekV2ForCausalLM" in target.architectures:
        return True
    return facts.v2_default == "always" or (facts.v2_default == "dense" and not target.moe)


def _read(facts: Facts, reader: Reader, config: Config, target: Target, *, reads_use_aux: bool) -> RunnerReading:
    eagle = config.get("eagle_config")
    if reads_use_aux and eagle is not None:
        if not isinstance(eagle, Mapping):
            return RunnerReading(None, f"crashes: eagle_config is {describe(eagle)}")
        if not cast("Config", eagle).get("use_aux_hidden_state", True):
            return RunnerReading(())
    try:
        found = reader(config)
    except (TypeError, AttributeError):
        return RunnerReading(None, "crashes on the drafter's layer ids")
    ids: tuple[Any, ...] = default_boundaries(target.num_layers)
    if found and isinstance(found, (list, tuple)):
        ids = tuple(cast("list[Any]", found))
    if 0 in ids:
        return RunnerReading(None, f"crashes at the first forward: id 0 in {describe(ids)} has no residual yet")
    captured = tuple(layer for layer in range(1, target.num_layers + facts.last_boundary) if layer in ids)
    return RunnerReading(captured, _later(facts, config, ids, captured))


def _later(facts: Facts, config: Config, ids: tuple[Any, ...], captured: tuple[int, ...]) -> str | None:
    eagle = config.get("eagle_config")
    nested = cast("Config", eagle) if isinstance(eagle, Mapping) else {}
    if not nested.get("use_aux_hidden_state", True):
        return "captures states although use_aux_hidden_state is false"
    counted: Any = nested.get(TOP_KEY)
    width = config.get("num_aux_hidden_states") if facts.fc_counts else 3
    if width is None:
        width = len(counted) if counted and isinstance(counted, (list, tuple)) else 3
    if len(captured) != width:
        return f"captures {len(captured)} states but builds fc for {describe(width)}: fails at the first request"
    if captured != ids:
        return f"returns ascending states for ids {describe(ids)}: fc's columns meet the wrong ones"
    return None
