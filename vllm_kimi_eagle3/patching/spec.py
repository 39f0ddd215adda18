# SPDX-License-Identifier: Apache-2.0
"""What a fix is: data. The registry lists them, the engine in :mod:`.engine` runs them.

A fix belongs to one defect. Its probe reads the source of the vLLM at hand and says whether the defect is there; its
``install`` replaces objects, through the :class:`~vllm_kimi_eagle3.patching.patcher.Installer` that can undo it; its
``configure`` changes one server's configuration and touches no object of vLLM's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kimi_eagle3.layers import CapturePlan
    from vllm_kimi_eagle3.patching.patcher import Installer
    from vllm_kimi_eagle3.patching.source import SourceTree


class Need(enum.Enum):
    """What a probe found in the source of a vLLM."""

    APPLY = "APPLY"
    """The defect is there, in a shape that the fix knows."""
    RETIRED = "RETIRED"
    """Upstream is right: the fix has nothing to do."""
    NOT_APPLICABLE = "NOT_APPLICABLE"
    """The code that the defect lives in does not exist in this release, or not on this platform."""
    REFUSED = "REFUSED"
    """The code is there in a shape that the fix does not know."""


class State(enum.Enum):
    """Where a fix stands in this process."""

    APPLIED = "APPLIED"
    RETIRED = "RETIRED"
    NOT_APPLICABLE = "NOT_APPLICABLE"
    PENDING = "PENDING"
    """Needed, and not installed so far: no server that needs it was configured in this process."""
    REFUSED = "REFUSED"
    FAILED = "FAILED"
    SHADOWED = "SHADOWED"
    """Installed by us, then replaced by somebody else."""


class Phase(enum.Enum):
    """When a fix has to be in place."""

    SPECULATIVE_CONFIG = "speculative-config"
    """Before the drafter's configuration is built."""
    VLLM_CONFIG = "vllm-config"
    """When the whole server configuration is checked."""
    WORKER = "worker"
    """In every process that loads the model, before it does."""


@dataclass(frozen=True)
class Verdict:
    """A probe's answer and, in one sentence, why."""

    need: Need
    reason: str


@dataclass(frozen=True)
class Context:
    """The server that a fix is applied for: one of our targets, with or without our method.

    ``vllm_config`` is None while the speculative configuration is being built; ``plan`` is None until the layers are
    resolved.
    """

    target_architecture: str
    platform: str
    """``cpu``, ``cuda``, ``rocm``, …: vLLM's own ``current_platform.device_type``."""
    eagle3: bool
    """Whether EAGLE-3 is to be made right here: the method is ``eagle3`` and the user did not ask for stock."""
    vllm_config: Any = None
    plan: CapturePlan | None = None


def with_eagle3(context: Context) -> bool:
    """The default of :attr:`Fix.wanted`: servers that speculate with EAGLE-3."""
    return context.eagle3


def with_eagle3_on_k25(context: Context) -> bool:
    """For faults of Kimi-K2.5, whose language model sits inside a multimodal wrapper."""
    return context.eagle3 and context.target_architecture == "KimiK25ForConditionalGeneration"


def on_cpu(context: Context) -> bool:
    """For faults of the CPU engine, which our targets meet with and without speculation."""
    return context.platform == "cpu"


@dataclass(frozen=True)
class Fix:
    """One defect's remedy, as data; ``docs/COMPATIBILITY.md`` and ``doctor`` are made from these fields."""

    id: str
    """The defect's id, such as ``D6``."""
    name: str
    targets: tuple[str, ...]
    """What it touches, as ``package.module:Qual.name``."""
    phase: Phase
    why: str
    upstream: str
    """The upstream issue, change or release that concerns the defect; "none known" otherwise."""
    retire: str
    """What has to hold upstream for this fix to be deleted."""
    probe: Callable[[SourceTree], Verdict]
    wanted: Callable[[Context], bool] = with_eagle3
    """Whether this server needs the fix at all: its method, platform and target."""
    install: Callable[[Installer], None] | None = None
    configure: Callable[[Context], None] | None = None

    @property
    def label(self) -> str:
        """``D6 nested-layer-ids``."""
        return f"{self.id} {self.name}"


@dataclass(frozen=True)
class Status:
    """A fix's state in this process and, in one sentence, why."""

    fix: Fix
    state: State
    reason: str
