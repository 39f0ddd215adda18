# SPDX-License-Identifier: Apache-2.0
"""vLLM's counters of speculation, from the text of ``/metrics``.

Names as in ``vllm/v1/spec_decode/metrics.py``; the Prometheus client adds ``_total``. A server with several engines
(data parallelism) has each counter once an engine: they are added up. Acceptance by position is cumulative: position
i counts the steps in which i and all before it were accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"^(vllm:[A-Za-z0-9_]+?)(?:_total)?(?:\{(.*)\})? +(\S+)(?: +\d+)?$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_SPEC = "vllm:spec_decode_"


@dataclass(frozen=True)
class Counters:
    """Counters since the server's start, or between two looks.

    Attributes:
        drafts: verify steps.
        drafted: draft tokens tested.
        accepted: draft tokens accepted.
        by_position: accepted by position, cumulative.
        generated: tokens that all requests together got.
        running: requests being served at this moment.
        speculates: whether the server has these counters at all.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()
    generated: int = 0
    running: int = 0
    speculates: bool = False

    def since(self, before: Counters) -> Counters:
        """The difference; negative numbers mean that the server was started anew in between."""
        earlier = (*before.by_position, *(0,) * len(self.by_position))
        return Counters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.by_position, earlier, strict=False)),
            self.generated - before.generated,
            self.running,
            self.speculates,
        )

    def plus(self, other: Counters) -> Counters:
        """Two differences added up."""
        length = max(len(self.by_position), len(other.by_position))
        padded = [(*c.by_position, *(0,) * (length - len(c.by_position))) for c in (self, other)]
        return Counters(
            self.drafts + other.drafts,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            tuple(a + b for a, b in zip(*padded, strict=True)),
            self.generated + other.generated,
            other.running,
            self.speculates or other.speculates,
        )

    @property
    def sound(self) -> bool:
        """Whether the counters can be of one server in one run."""
        numbers = (self.drafts, self.drafted, self.accepted, self.generated, *self.by_position)
        return all(number >= 0 for number in numbers)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens, 0..1; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a verify step, the target's own included; None when nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def per_position(self) -> list[float] | None:
        """Cumulative acceptance by position."""
        return [count / self.drafts for count in self.by_position] if self.drafts else None

    @property
    def conditional(self) -> list[float] | None:
        """Acceptance of each position after the one before it was accepted."""
        if not self.drafts:
            return None
        before = (self.drafts, *self.by_position)
        return [count / total if total else 0.0 for count, total in zip(self.by_position, before, strict=False)]


def parse(text: str, model: str | None = None) -> Counters:
    """The counters in a Prometheus text.

    Args:
        text: the body of ``/metrics``.
        model: count only lines whose ``model_name`` is this; None counts all.
    """
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels = match[1], dict(_LABEL.findall(match[2] or ""))
        try:
            value = float(match[3])
        except ValueError:
            continue
        if model is not None and labels.get("model_name", model) != model:
            continue
        if name == f"{_SPEC}num_accepted_tokens_per_pos" and labels.get("position", "").isdigit():
            positions[int(labels["position"])] = positions.get(int(labels["position"]), 0.0) + value
        totals[name] = totals.get(name, 0.0) + value

    def count(name: str) -> int:
        return int(totals.get(name, 0.0))

    return Counters(
        drafts=count(f"{_SPEC}num_drafts"),
        drafted=count(f"{_SPEC}num_draft_tokens"),
        accepted=count(f"{_SPEC}num_accepted_tokens"),
        by_position=tuple(int(positions.get(p, 0.0)) for p in range(max(positions, default=-1) + 1)),
        generated=count("vllm:generation_tokens"),
        running=count("vllm:num_requests_running"),
        speculates=f"{_SPEC}num_drafts" in totals,
    )
