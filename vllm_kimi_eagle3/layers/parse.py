# SPDX-License-Identifier: Apache-2.0
"""From ``config.json`` mappings to the few facts that decide a capture plan.

Knows three drafter layouts: vLLM's (ids at the top level), the nested one of SpecForge, TorchSpec and NVIDIA ModelOpt
(``eagle_config``), and speculators (ids at the top level, the transformer under ``transformer_layer_config``). Knows
two target layouts: DeepSeek-V3 (flat) and Kimi-K2.5 (under ``text_config``). It reads and checks types; what an id
means is not its business. Every value is untrusted: whatever JSON can hold ends in a fact or in a ``PlanError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .plan import PlanError

TOP_KEY = "eagle_aux_hidden_state_layer_ids"
NESTED_KEY = f"eagle_config.{TOP_KEY}"
ORIGINAL_KEY = "kimi_eagle3_original"
"""Where ``config_updates`` keeps what it replaced, so that a resolved config resolves to the same plan again."""

MAX_LAYERS = 10_000
MAX_WIDTH = 1 << 20


@dataclass(frozen=True)
class Target:
    """Facts of the target: L, the width of its residual stream, and what the choice of runner depends on."""

    num_layers: int
    hidden_size: int
    vocab_size: int | None
    architectures: tuple[str, ...]
    model_type: str | None
    moe: bool


@dataclass(frozen=True)
class IdList:
    """A list of layer ids and the key it stood under."""

    key: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Drafter:
    """Facts of the drafter. ``lists`` are in the order in which vLLM would prefer them."""

    lists: tuple[IdList, ...]
    speculators: bool
    use_aux_hidden_state: bool
    num_aux_hidden_states: int | None
    hidden_size: int | None
    target_hidden_size: int | None
    draft_vocab_size: int | None
    architectures: tuple[str, ...]
    model_type: str | None
    warnings: tuple[str, ...]


def describe(value: object) -> str:
    """A value for an error message: short, ASCII, and safe for huge or deeply nested input."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else value[:40] + "...")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[object]", value)
        shown = [describe(item) if not isinstance(item, (list, tuple, Mapping)) else "..." for item in items[:8]]
        return "[" + ", ".join(shown) + (", ..." if len(items) > 8 else "") + "]"
    return "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def read_ids(value: object, where: str) -> tuple[int, ...]:
    """The list under ``where`` as integers.

    Raises:
        PlanError: it is not a list, or an entry is not an integer (``true`` and ``2.0`` are not).
    """
    if not isinstance(value, (list, tuple)):
        raise PlanError(f"{where} is {describe(value)}, but a list of layer ids such as [2, 30, 58] was expected")
    items = cast("Sequence[object]", value)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise PlanError(f"{where} holds {describe(item)}, but every layer id must be an integer")
    return tuple(cast("Sequence[int]", items))


def read_target(config: object) -> Target:
    """Facts of a target's ``config.json``.

    Raises:
        PlanError: not an object, or the number of layers or the hidden size is missing or senseless.
    """
    if not isinstance(config, Mapping):
        raise PlanError(f"the target's config is {describe(config)}, but a JSON object was expected")
    top = cast("Mapping[str, Any]", config)
    text = top.get("text_config")
    where, body = "the target's config", top
    # Multimodal targets repeat some text fields at the top level; vLLM counts layers of the text config.
    if isinstance(text, Mapping) and "num_hidden_layers" in text:
        where, body = "the target's text_config", cast("Mapping[str, Any]", text)
    num_layers = _integer(body, "num_hidden_layers", where, 1, MAX_LAYERS)
    hidden_size = _integer(body, "hidden_size", where, 1, MAX_WIDTH)
    if num_layers is None or hidden_size is None:
        missing = "num_hidden_layers" if num_layers is None else "hidden_size"
        raise PlanError(f"{where} has no {missing}, so its boundaries can't be counted; pass the target's own config")
    experts = [body.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts")]
    return Target(
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=_lenient_integer(body.get("vocab_size")),
        architectures=_strings(top.get("architectures")),
        model_type=_string(body.get("model_type")),
        moe=any(isinstance(count, int) and count > 0 for count in experts),
    )


def read_drafter(config: object) -> Drafter:
    """Facts of a drafter's ``config.json``, whichever layout it has.

    Raises:
        PlanError: a key that decides the plan holds something that can't be read.
    """
    if not isinstance(config, Mapping):
        raise PlanError(f"the drafter's config is {describe(config)}, but a JSON object was expected")
    top = as_written(cast("Mapping[str, Any]", config))
    speculators = top.get("speculators_config") is not None
    if speculators:
        kind = top.get("speculators_model_type")
        if kind not in ("eagle3", "peagle"):
            raise PlanError(
                f"the drafter's speculators_model_type is {describe(kind)}, but only eagle3 drafters take auxiliary "
                "hidden states this way; choose another drafter or another speculative method"
            )
    body = top
    if speculators and isinstance(top.get("transformer_layer_config"), Mapping):
        body = cast("Mapping[str, Any]", top["transformer_layer_config"])
    # vLLM drops a speculators config's other top-level keys, eagle_config among them.
    holder = body if speculators and top.get("model_type") is None else top
    eagle = holder.get("eagle_config")
    if eagle is not None and not isinstance(eagle, Mapping):
        raise PlanError(f"the drafter's eagle_config is {describe(eagle)}, but a JSON object was expected")
    nested = cast("Mapping[str, Any]", eagle or {})

    warnings: list[str] = []
    lists: list[IdList] = []
    for key, value in ((TOP_KEY, top.get(TOP_KEY)), (NESTED_KEY, nested.get(TOP_KEY))):
        _add_list(lists, warnings, key, value)
    if not lists:
        # Only vLLM's V2 runner looks here, from 0.27.1 on.
        _add_list(lists, warnings, "eagle_config.layer_ids", nested.get("layer_ids"))

    use_aux = nested.get("use_aux_hidden_state", True)
    if not isinstance(use_aux, bool):
        raise PlanError(
            f"eagle_config.use_aux_hidden_state is {describe(use_aux)}, but true or false was expected; "
            "vLLM would take its truth value"
        )
    where = "the drafter's config"
    return Drafter(
        lists=tuple(lists),
        speculators=speculators,
        use_aux_hidden_state=use_aux,
        num_aux_hidden_states=_integer(holder, "num_aux_hidden_states", where, 1, MAX_LAYERS),
        hidden_size=_integer(body, "hidden_size", where, 1, MAX_WIDTH),
        target_hidden_size=_integer(top, "target_hidden_size", where, 1, MAX_WIDTH),
        draft_vocab_size=_lenient_integer(top.get("draft_vocab_size")),
        architectures=_strings(top.get("architectures")),
        model_type=_string(top.get("model_type")),
        warnings=tuple(warnings),
    )


def as_written(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undo ``config_updates``: the keys it wrote stand again as the checkpoint had them."""
    original = config.get(ORIGINAL_KEY)
    if original is None:
        return config
    if not isinstance(original, Mapping):
        raise PlanError(f"the drafter's {ORIGINAL_KEY} is {describe(original)}, but a JSON object was expected")
    kept = cast("Mapping[str, Any]", original)
    restored = dict(config)
    for key in (TOP_KEY, "num_aux_hidden_states", "target_hidden_size"):
        restored.pop(key, None)
        if key in kept:
            restored[key] = kept[key]
    return restored


def _add_list(lists: list[IdList], warnings: list[str], key: str, value: object) -> None:
    if value is None:
        return
    ids = read_ids(value, f"the drafter's {key}")
    if ids:
        lists.append(IdList(key, ids))
    else:
        warnings.append(f"the drafter's {key} is an empty list, which vLLM reads as no list at all")


def _integer(body: Mapping[str, Any], key: str, where: str, low: int, high: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise PlanError(f"{where} has {key} {describe(value)}, but an integer from {low} to {high} was expected")
    return value


def _lenient_integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 30 else None


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        return ()
    return tuple(item for item in cast("Sequence[object]", value) if isinstance(item, str))
