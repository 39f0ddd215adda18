# SPDX-License-Identifier: Apache-2.0
"""A plan and stock vLLM's reading side by side, in words and columns for people."""

from __future__ import annotations

from .headers import CheckpointHeaders
from .plan import CapturePlan
from .stock import RunnerReading, StockReading


def plan_text(plan: CapturePlan, headers: CheckpointHeaders | None) -> str:
    """The plan: who decided, and a table with one line for each captured state."""
    lines = [
        f"target   {plan.num_layers} layers, hidden size {plan.hidden_size}",
        f"drafter  {_ids(plan)}",
        f"rule     {plan.rule}, decided by {plan.decided_by}: {plan.evidence}",
    ]
    if plan.fc_width is not None:
        lines.append(
            f"fc       {len(plan.boundaries)} x {plan.hidden_size} = {plan.fc_width} inputs, {_checked(headers)}"
        )
    if not plan.boundaries:
        return "\n".join([*lines, "", "no state is captured"])
    lines += ["", "  state    id  boundary  what it is"]
    # What was measured may have another count than the list, and then no id belongs to a state.
    ids = plan.ids if plan.ids and len(plan.ids) == len(plan.boundaries) else (None,) * len(plan.boundaries)
    for number, (written, boundary) in enumerate(zip(ids, plan.boundaries, strict=True), 1):
        lines.append(
            f"  {number:5}  {'-' if written is None else written:>4}  {boundary:8}  {state_name(boundary, plan)}"
        )
    return "\n".join(lines)


def state_name(boundary: int, plan: CapturePlan) -> str:
    """One boundary in words, such as ``output of layer 29``."""
    if boundary == 0:
        return "the embeddings"
    last = " (the last, before the final norm)" if boundary == plan.num_layers else ""
    return f"output of layer {boundary - 1}{last}"


def stock_text(plan: CapturePlan, stock: StockReading, release_note: str) -> str:
    """What both runners of a stock release take, and which of the three readings differ."""
    other = "V1" if stock.default == "V2" else "V2"
    lines = [
        f"vLLM {stock.release}{release_note}",
        f"  this package        {_list(plan.boundaries)}",
        f"  stock {stock.default} (default)  {_reading(stock.runner(stock.default), plan)}",
        f"  stock {other}            {_reading(stock.runner(other), plan)}",
        f"  {disagreement(plan, stock)}",
    ]
    return "\n".join(lines)


def disagreement(plan: CapturePlan, stock: StockReading) -> str:
    """One sentence: which of this package, stock V1 and stock V2 differ."""
    wrong = differing(plan, stock)
    if not wrong:
        return "all three agree"
    if len(wrong) == 1:
        return f"stock {wrong[0]} differs from the other two"
    if stock.v1.boundaries is None and stock.v2.boundaries is None:
        return "neither stock runner captures anything"
    if stock.v1.boundaries == stock.v2.boundaries:
        return "the two stock runners agree, and differ from this package"
    return "all three differ"


def differing(plan: CapturePlan, stock: StockReading) -> list[str]:
    """The stock runners, ``"V1"`` and ``"V2"``, that don't take the plan's boundaries."""
    return [name for name in ("V1", "V2") if stock.runner(name).boundaries != plan.boundaries]


def _ids(plan: CapturePlan) -> str:
    if plan.ids is None:
        return "no layer ids" if plan.use_aux_hidden_state else "takes no auxiliary hidden states"
    return f"ids {list(plan.ids)} ({plan.ids_key})"


def _checked(headers: CheckpointHeaders | None) -> str:
    if headers is None:
        return "unchecked: no safetensors files beside the config"
    if headers.fc_in_features is None:
        return "unchecked: the checkpoint has no plain fc.weight"
    return "as in the checkpoint"


def _list(boundaries: tuple[int, ...]) -> str:
    return str(list(boundaries)) if boundaries else "none"


def _reading(reading: RunnerReading, plan: CapturePlan) -> str:
    if reading.boundaries is None:
        return f"nothing: {reading.problem}"
    parts = [_list(reading.boundaries), _difference(reading.boundaries, plan.boundaries)]
    if reading.problem:
        parts.append(f"({reading.problem})")
    return "  ".join(parts)


def _difference(taken: tuple[int, ...], planned: tuple[int, ...]) -> str:
    if taken == planned:
        return "the same"
    shifts = (
        {there - here for there, here in zip(taken, planned, strict=False)} if len(taken) == len(planned) else set()
    )
    if len(shifts) == 1:
        shift = shifts.pop()
        return (
            f"DIFFERS: every state {abs(shift)} layer{'s' if abs(shift) > 1 else ''} {'late' if shift > 0 else 'early'}"
        )
    return "DIFFERS"
