# SPDX-License-Identifier: Apache-2.0
"""The capture plan: which residual streams of the target the drafter gets to see.

Boundaries follow vLLM's count: boundary k of an L-layer target is the residual stream that enters layer k, which is
the output of layer k - 1. Boundary 0 is the embeddings and boundary L the stream before the final norm. This module
only holds the result and words it; ``resolve`` decides it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

RULES = ("output", "boundary")
"""The two meanings of a layer id that are in use; see ``resolve``."""


class PlanError(ValueError):
    """No plan can be made. The message is one sentence: what was found, where, what was expected, what to do."""


@dataclass(frozen=True)
class CapturePlan:
    """What the target captures for one drafter.

    Attributes:
        ids: the list as it was written, before any rule; None when there is none and the default applies.
        ids_key: where the list stood: a config key such as ``eagle_config.eagle_aux_hidden_state_layer_ids``,
            ``"explicit"`` for the user's ids, or None for the default.
        rule: ``"boundary"``, ``"output"``, ``"measured"`` (an alignment record that fits neither rule) or ``"none"``
            (the drafter takes no auxiliary states).
        decided_by: ``"explicit"``, ``"alignment record"``, ``"format"``, ``"known producer"``, ``"default triple"``,
            ``"range"`` (only one reading exists), ``"default"`` (no list) or ``"ambiguous"``.
        evidence: what the decider went by, for people.
        boundaries: ascending and distinct, each in 0..num_layers: the order in which the target returns them.
        num_layers: L of the target.
        hidden_size: width of one captured state, which is the target's hidden size.
        fc_width: input features of the drafter's ``fc``: ``len(boundaries) * hidden_size``; None without ``fc``.
        use_aux_hidden_state: False for a drafter that reads the target's last hidden state only.
        warnings: sentences that a user should see.
    """

    ids: tuple[int, ...] | None
    ids_key: str | None
    rule: str
    decided_by: str
    evidence: str
    boundaries: tuple[int, ...]
    num_layers: int
    hidden_size: int
    fc_width: int | None
    use_aux_hidden_state: bool
    warnings: tuple[str, ...] = ()

    def outputs(self) -> str:
        """The boundaries in the words of layer outputs, such as ``outputs of layers 1, 29, 57``."""
        if not self.boundaries:
            return "no captured states"
        layers = [str(boundary - 1) for boundary in self.boundaries if boundary > 0]
        parts = ["the embeddings"] if 0 in self.boundaries else []
        if layers:
            parts.append(f"output{'s' if len(layers) > 1 else ''} of layer{'s' if len(layers) > 1 else ''} ")
            parts[-1] += ", ".join(layers)
        return " and ".join(parts)

    def line(self) -> str:
        """The plan in one line, for a log."""
        if not self.use_aux_hidden_state:
            return f"no auxiliary hidden states ({self.evidence})"
        if self.ids is None:
            ids = "no ids in the checkpoint"
        elif self.ids_key == "explicit":
            ids = f"explicit ids {list(self.ids)}"
        else:
            ids = f"checkpoint ids {list(self.ids)} ({self.ids_key})"
        return (
            f"{ids}, {self.rule} rule (decided by {self.decided_by}), boundaries {self.boundaries} = {self.outputs()}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; the keys are the attributes' names, plus ``line``."""
        data = asdict(self)
        for key in ("ids", "boundaries", "warnings"):
            data[key] = None if data[key] is None else list(data[key])
        return {**data, "line": self.line()}
