# SPDX-License-Identifier: Apache-2.0
"""Decide which boundaries a drafter was trained on, and say who decided.

Two rules are in use for the ids in a checkpoint, and checkpoints don't say which. *Boundary rule* (vLLM,
speculators): id k is boundary k. *Output rule* (SpecForge, ModelOpt, TorchSpec, Hugging Face hooks): id i is the
output of layer i, so boundary i + 1. The deciders, in order: an explicit choice, a measured alignment record, a format
that fixes the rule, a known producer, the exact default triple of one rule, a list that only one rule can read. What
is left is ambiguous: the plan takes vLLM's reading, names both, and points to the command that measures it. No shift
is ever guessed in silence.

What this module can't know: whether the drafter was trained as its producer's rule says. Only a measurement can.
Sources: vllm#16937 (vLLM's default), SpecForge ``model_providers.py``, TorchSpec ``convert_to_hf.py``, sglang#25454,
sglang#32334.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .parse import (
    NESTED_KEY,
    ORIGINAL_KEY,
    TOP_KEY,
    Drafter,
    Target,
    as_written,
    describe,
    read_drafter,
    read_ids,
    read_target,
)
from .plan import RULES, CapturePlan, PlanError

if TYPE_CHECKING:
    from .alignment import AlignmentRecord
    from .headers import CheckpointHeaders

Ids = tuple[int, ...]

MEASURE = "`vllm-kimi-eagle3 calibrate --target DIR --drafter DIR` measures it"


class _Choice(NamedTuple):
    ids: Ids | None
    key: str | None
    rule: str
    decided_by: str
    evidence: str
    boundaries: Ids


def default_boundaries(num_layers: int) -> Ids:
    """vLLM's default (2, L // 2, L - 3), by the boundary rule (vllm#16937)."""
    return (2, num_layers // 2, num_layers - 3)


def default_outputs(num_layers: int) -> Ids:
    """SpecForge's and ModelOpt's default [1, L // 2 - 1, L - 4]: the same states, by the output rule."""
    return tuple(boundary - 1 for boundary in default_boundaries(num_layers))


def old_specforge_outputs(num_layers: int) -> Ids:
    """SpecForge's default before 2025-10-20, [1, L // 2, L - 4] by the output rule (SpecForge#240 changed it)."""
    return (1, num_layers // 2, num_layers - 4)


def resolve(
    target: Mapping[str, Any],
    drafter: Mapping[str, Any],
    *,
    layer_rule: str | None = None,
    layer_ids: Sequence[int] | None = None,
    headers: CheckpointHeaders | None = None,
    alignment: AlignmentRecord | None = None,
    last_boundary_capturable: bool = True,
    fixed_fc_states: int | None = None,
    pipeline_parallel_size: int = 1,
) -> CapturePlan:
    """Make the capture plan for one drafter on one target.

    Args:
        target: the target's ``config.json``, DeepSeek-V3 (flat) or Kimi-K2.5 (``text_config``).
        drafter: the drafter's ``config.json``. One that already carries ``config_updates`` gives the same plan again.
        layer_rule: the user's choice, ``"output"`` or ``"boundary"``; beats everything else.
        layer_ids: the user's ids, read by ``layer_rule`` (boundary rule if that is not given).
        headers: shapes from the drafter's safetensors files; settles the width of ``fc``.
        alignment: a measured record for this drafter and target.
        last_boundary_capturable: False where the capture loop can't return boundary L (vLLM 0.24 and older).
        fixed_fc_states: the number of states ``fc`` is built for whatever the config says (3 on vLLM 0.21 and older).
        pipeline_parallel_size: stages of the target; the states of all but the last are lost.

    Returns:
        The plan. The same arguments always give the same plan.

    Raises:
        PlanError: no plan can be right, with one sentence on why and what to do. Nothing else is raised for any
            JSON in ``target`` and ``drafter``.
    """
    facts, draft = read_target(target), read_drafter(drafter)
    if layer_rule is not None and layer_rule not in RULES:
        raise PlanError(f"layer_rule is {describe(layer_rule)}, but 'output' or 'boundary' was expected")
    explicit = None if layer_ids is None else read_ids(layer_ids, "layer_ids")
    if explicit == ():
        raise PlanError("layer_ids is an empty list; leave it out to take the checkpoint's own list")
    warnings = list(draft.warnings)

    if not draft.use_aux_hidden_state:
        return _without_aux(facts, draft, explicit, layer_rule, headers, warnings)

    choice = _choose(facts, draft, explicit, layer_rule, alignment, warnings)
    if choice.decided_by == "explicit" and alignment is not None and alignment.boundaries != choice.boundaries:
        warnings.append(
            f"the explicit choice gives boundaries {describe(choice.boundaries)}, but the alignment record measured "
            f"{alignment.boundaries}"
        )
    _check_boundaries(choice, facts, last_boundary_capturable)
    if pipeline_parallel_size != 1:
        raise PlanError(
            f"pipeline_parallel_size is {describe(pipeline_parallel_size)}, but the auxiliary hidden states of every "
            "stage but the last are lost on this target; use tensor parallelism and one stage"
        )
    _check_width(choice, facts, draft, headers, fixed_fc_states, warnings)
    _check_vocabulary(facts, draft, headers, warnings)
    return CapturePlan(
        ids=choice.ids,
        ids_key=choice.key,
        rule=choice.rule,
        decided_by=choice.decided_by,
        evidence=choice.evidence,
        boundaries=choice.boundaries,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        fc_width=len(choice.boundaries) * facts.hidden_size,
        use_aux_hidden_state=True,
        warnings=tuple(warnings),
    )


def config_updates(plan: CapturePlan, drafter: Mapping[str, Any]) -> dict[str, Any]:
    """The keys to write into the drafter's config so that every vLLM reader takes the plan.

    Both runners read the top-level list first, vLLM hashes it, and from 0.22 on ``fc`` is sized by
    ``num_aux_hidden_states`` times ``target_hidden_size``. What is replaced is kept under ``kimi_eagle3_original``,
    so resolving the updated config gives the same plan instead of shifting twice.

    Args:
        plan: the result of ``resolve`` for this drafter.
        drafter: the same config as was resolved.

    Returns:
        Top-level keys and values; empty for a drafter without auxiliary hidden states.
    """
    if not plan.use_aux_hidden_state:
        return {}
    updates: dict[str, Any] = {TOP_KEY: list(plan.boundaries), "num_aux_hidden_states": len(plan.boundaries)}
    # A null would be multiplied: vLLM asks whether the attribute exists, not what it is.
    written = as_written(drafter)
    null = "target_hidden_size" in written and written["target_hidden_size"] is None
    if null or read_drafter(drafter).hidden_size != plan.hidden_size:
        updates["target_hidden_size"] = plan.hidden_size
    return {**updates, ORIGINAL_KEY: {key: written[key] for key in updates if key in written}}


def _choose(
    target: Target,
    drafter: Drafter,
    explicit: Ids | None,
    layer_rule: str | None,
    alignment: AlignmentRecord | None,
    warnings: list[str],
) -> _Choice:
    if explicit is not None:
        rule = layer_rule or "boundary"
        return _Choice(explicit, "explicit", rule, "explicit", "the user's layer_ids", _shift(explicit, rule))

    found = drafter.lists[0] if drafter.lists else None
    ids, key = (found.ids, found.key) if found else (None, None)
    if layer_rule is not None:
        boundaries = _shift(ids, layer_rule) if ids is not None else default_boundaries(target.num_layers)
        return _Choice(ids, key, layer_rule, "explicit", "the user's layer_rule", boundaries)

    if len(drafter.lists) > 1:
        _compare_lists(drafter, warnings)
    if alignment is not None:
        if alignment.num_layers == target.num_layers and alignment.ids == ids:
            rule = alignment.rule or "measured"
            return _Choice(ids, key, rule, "alignment record", alignment.summary(), alignment.boundaries)
        warnings.append(
            f"the alignment record was measured for ids {describe(alignment.ids)} on {alignment.num_layers} layers, "
            f"not for {describe(ids)} on {target.num_layers}, so it is not used; calibrate again"
        )
    if ids is None or key is None:
        evidence = "no list in the checkpoint; both rules' defaults name the same states"
        return _Choice(None, None, "boundary", "default", evidence, default_boundaries(target.num_layers))
    return _read_list(target, drafter, ids, key, warnings)


def _read_list(target: Target, drafter: Drafter, ids: Ids, key: str, warnings: list[str]) -> _Choice:
    layers = target.num_layers
    outputs, boundaries = default_outputs(layers), default_boundaries(layers)

    def choice(rule: str, decided_by: str, evidence: str) -> _Choice:
        return _Choice(ids, key, rule, decided_by, evidence, _shift(ids, rule))

    if key == TOP_KEY:
        if ids == outputs:
            warnings.append(
                f"{key} {list(ids)} is read by the boundary rule, as that key's format says, but it is the output "
                f"rule's default for {layers} layers: a converter may have copied it unshifted; {MEASURE}"
            )
        return choice("boundary", "format", "speculators format" if drafter.speculators else "vLLM's top-level key")
    if ids == boundaries and drafter.model_type == "kimi_k2" and "Eagle3DeepseekV2ForCausalLM" in drafter.architectures:
        evidence = "TorchSpec's vLLM export for kimi_k2 adds 1 to its ids (sglang#25454)"
        return choice("boundary", "known producer", evidence)
    if ids == old_specforge_outputs(layers) and _ascending(ids):
        warnings.append(
            f"{key} {list(ids)} is read as SpecForge's default from before 2025-10-20, by the output rule; {MEASURE}"
        )
        return choice("output", "known producer", "SpecForge's default from before 2025-10-20")
    if ids == outputs and _ascending(ids):
        return choice("output", "default triple", f"[1, L//2-1, L-4] for L = {layers}")
    if ids == boundaries and _ascending(ids):
        return choice("boundary", "default triple", f"[2, L//2, L-3] for L = {layers}")
    if max(ids) == layers:
        evidence = f"id {layers} has no output reading, there is no layer {layers}"
        return choice("boundary", "range", evidence)
    if _ascending(ids) and ids[0] == 0:
        raise PlanError(
            f"{key} {list(ids)} names id 0: the embeddings by the boundary rule, which no stock vLLM can capture, or "
            "the output of layer 0; pass layer_rule output or boundary"
        )
    if _ascending(ids) and ids[0] > 0 and ids[-1] < layers:
        warnings.append(
            f"{key} {list(ids)} is ambiguous: boundaries {ids} by vLLM's rule, or boundaries {_shift(ids, 'output')} "
            f"if the ids are layer outputs (SpecForge, ModelOpt); vLLM's reading is taken; {MEASURE}, and --rule or "
            "layer_rule settles it"
        )
    return choice("boundary", "ambiguous", "nothing in the checkpoint says which rule; vLLM's reading")


def _compare_lists(drafter: Drafter, warnings: list[str]) -> None:
    top, nested = drafter.lists[0], drafter.lists[1]
    if nested.ids not in (top.ids, tuple(boundary - 1 for boundary in top.ids)):
        warnings.append(
            f"{top.key} {describe(top.ids)} and {nested.key} {describe(nested.ids)} name different states by either "
            f"rule; {top.key} is taken, as vLLM does"
        )


def _shift(ids: Ids, rule: str) -> Ids:
    return tuple(layer + 1 for layer in ids) if rule == "output" else ids


def _ascending(ids: Ids) -> bool:
    return all(low < high for low, high in pairwise(ids))


def _source(choice: _Choice) -> str:
    if choice.ids is None:
        return f"the default {choice.boundaries}"
    key = "layer_ids" if choice.key == "explicit" else choice.key
    return f"{key} {describe(choice.ids)} ({choice.rule} rule)"


def _check_boundaries(choice: _Choice, target: Target, last: bool) -> None:
    source, layers, boundaries = _source(choice), target.num_layers, choice.boundaries
    if choice.ids is None and not _ascending(boundaries):
        raise PlanError(
            f"the drafter lists no layer ids and the default {boundaries} is senseless for a target of {layers} "
            "layers; pass layer_ids"
        )
    outside = [boundary for boundary in boundaries if not 0 <= boundary <= layers]
    if outside:
        raise PlanError(
            f"{source} names boundary {describe(outside[0])}, but a target of {layers} layers has boundaries 0 to "
            f"{layers}; is this drafter made for another target?"
        )
    if len(set(boundaries)) != len(boundaries):
        raise PlanError(f"{source} names the same layer twice, but the target returns each state once; correct the ids")
    if not _ascending(boundaries):
        raise PlanError(
            f"{source} is not in ascending order, but vLLM returns states in ascending order, so the columns of fc "
            "would meet the wrong states; permute fc's columns and sort the list in the checkpoint"
        )
    if layers in boundaries and not last:
        raise PlanError(
            f"{source} names boundary {layers}, the stream after the last layer, which this release's capture loop "
            "can't return; vLLM 0.25.1 and newer can"
        )


def _check_width(
    choice: _Choice,
    target: Target,
    drafter: Drafter,
    headers: CheckpointHeaders | None,
    fixed: int | None,
    warnings: list[str],
) -> None:
    count, width = len(choice.boundaries), target.hidden_size
    if drafter.target_hidden_size not in (None, width):
        raise PlanError(
            f"the drafter's target_hidden_size is {drafter.target_hidden_size}, but the target's hidden_size is "
            f"{width}; this drafter is made for another target"
        )
    if fixed is not None and count != fixed:
        raise PlanError(
            f"{_source(choice)} names {count} states, but this release builds fc for {fixed}; "
            "vLLM 0.22 and newer take other counts"
        )
    measured = headers.fc_in_features if headers is not None else None
    if measured is not None and measured != count * width:
        states = f"{measured // width} states" if measured % width == 0 else f"no whole number of {width}-wide states"
        raise PlanError(
            f"{_source(choice)} names {count} states of {width} features, {count * width} in all, but the "
            f"checkpoint's fc.weight takes {measured}, {states}; the ids don't belong to this checkpoint and target"
        )
    if measured is not None:
        return
    if drafter.num_aux_hidden_states not in (None, count):
        raise PlanError(
            f"{_source(choice)} names {count} states, but the drafter's num_aux_hidden_states is "
            f"{drafter.num_aux_hidden_states}; correct whichever is wrong"
        )
    if drafter.target_hidden_size is None and drafter.hidden_size not in (None, width):
        warnings.append(
            f"the drafter's hidden_size is {drafter.hidden_size}, the target's {width}, and no target_hidden_size "
            "says that this is meant; fc is taken to read the target's width"
        )


def _check_vocabulary(target: Target, drafter: Drafter, headers: CheckpointHeaders | None, warnings: list[str]) -> None:
    small = drafter.draft_vocab_size
    if headers is None or small is None or target.vocab_size is None or small >= target.vocab_size:
        return
    if not headers.has("d2t"):
        warnings.append(
            f"the drafter's draft_vocab_size is {small} of {target.vocab_size}, but the checkpoint has no d2t table, "
            "so its ids would be taken as the target's first ids"
        )


def _without_aux(
    target: Target,
    drafter: Drafter,
    explicit: Ids | None,
    layer_rule: str | None,
    headers: CheckpointHeaders | None,
    warnings: list[str],
) -> CapturePlan:
    if explicit is not None:
        raise PlanError(
            f"layer_ids {describe(explicit)} was given, but the drafter says eagle_config.use_aux_hidden_state false "
            "and has no fc to take those states; leave layer_ids out, or correct the drafter's config"
        )
    if headers is not None and headers.fc_in_features is not None:
        warnings.append(
            "the drafter says eagle_config.use_aux_hidden_state false, but its checkpoint has an fc.weight of "
            f"{headers.fc_in_features} inputs; one of the two is wrong"
        )
    if drafter.lists:
        first = drafter.lists[0]
        warnings.append(f"{first.key} {describe(first.ids)} is not used: use_aux_hidden_state is false")
    if layer_rule is not None:
        warnings.append("layer_rule has nothing to apply to: use_aux_hidden_state is false")
    found = drafter.lists[0] if drafter.lists else None
    return CapturePlan(
        ids=found.ids if found else None,
        ids_key=found.key if found else None,
        rule="none",
        decided_by="format",
        evidence="eagle_config.use_aux_hidden_state is false",
        boundaries=(),
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        fc_width=None,
        use_aux_hidden_state=False,
        warnings=tuple(warnings),
    )


__all__ = ["NESTED_KEY", "TOP_KEY", "config_updates", "default_boundaries", "default_outputs", "resolve"]
