# SPDX-License-Identifier: Apache-2.0
"""Probe, apply, report and revert a list of fixes in this process.

One :class:`Engine` holds one process's state. It never raises because of a fix: a probe or an installation that fails
becomes a status, and the guard in :mod:`vllm_kimi_eagle3.activation` decides what that means for the server at hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from vllm_kimi_eagle3.patching.patcher import Patcher
from vllm_kimi_eagle3.patching.source import SourceMissing, SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, State, Status, Verdict

_STATE_OF_NEED = {
    Need.APPLY: State.PENDING,
    Need.RETIRED: State.RETIRED,
    Need.NOT_APPLICABLE: State.NOT_APPLICABLE,
    Need.REFUSED: State.REFUSED,
}


def probe(fix: Fix, tree: SourceTree) -> Verdict:
    """A fix's verdict on a source tree; whatever goes wrong in a probe means that the shape is unknown."""
    try:
        return fix.probe(tree)
    except SourceMissing as missing:
        return Verdict(Need.REFUSED, f"{missing}, and the probe does not know what took its place")
    except Exception as error:
        return Verdict(Need.REFUSED, f"the probe failed: {_worded(error)}")


class Engine:
    """The fixes' states in this process."""

    def __init__(self, fixes: tuple[Fix, ...], tree: Callable[[], SourceTree] = SourceTree.installed) -> None:
        self.fixes = fixes
        self.patcher = Patcher()
        self._tree = tree
        self._verdicts: dict[str, Verdict] = {}
        self._applied: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._lock = threading.RLock()

    def verdict(self, fix: Fix) -> Verdict:
        """The probe's answer for the installed vLLM, asked once a process."""
        with self._lock:
            if fix.label not in self._verdicts:
                try:
                    tree = self._tree()
                except Exception as error:
                    return Verdict(Need.REFUSED, f"vLLM's source can't be read: {_worded(error)}")
                self._verdicts[fix.label] = probe(fix, tree)
            return self._verdicts[fix.label]

    def needed(self, context: Context) -> list[Fix]:
        """The fixes that this server wants and whose defect this vLLM has, or may have."""
        return [f for f in self.fixes if f.wanted(context) and self.verdict(f).need in (Need.APPLY, Need.REFUSED)]

    def apply(self, phase: Phase, context: Context) -> list[Status]:
        """Install and configure what ``phase`` needs for this server, and report on those fixes.

        Installing happens once a process, and a fix that fails at it is taken back whole. Configuring happens for every
        server, and failing at it concerns that server alone: what is installed serves the others.
        """
        with self._lock:
            fixes = [fix for fix in self.needed(context) if fix.phase is phase]
            return [self._apply(fix, context) for fix in fixes]

    def _apply(self, fix: Fix, context: Context) -> Status:
        if self.verdict(fix).need is not Need.APPLY:
            return self.status(fix)
        if fix.label not in self._applied:
            self._install(fix)
        if fix.configure is not None and fix.label in self._applied:
            try:
                fix.configure(context)
            except Exception as error:
                return Status(fix, State.FAILED, f"for this server: {_worded(error)}")
        return self.status(fix)

    def _install(self, fix: Fix) -> None:
        try:
            if fix.install is not None:
                fix.install(self.patcher.for_fix(fix.label))
        except Exception as error:
            self.patcher.revert(fix.label)
            self._failed[fix.label] = _worded(error)
        else:
            self._failed.pop(fix.label, None)
            self._applied[fix.label] = self.verdict(fix).reason

    def status(self, fix: Fix) -> Status:
        """Where one fix stands now."""
        with self._lock:
            if fix.label in self._failed:
                return Status(fix, State.FAILED, self._failed[fix.label])
            if fix.label in self._applied:
                lost = self.patcher.shadowed(fix.label)
                if lost:
                    return Status(fix, State.SHADOWED, f"replaced after us by somebody else: {', '.join(lost)}")
                return Status(fix, State.APPLIED, self._applied[fix.label])
            verdict = self.verdict(fix)
            return Status(fix, _STATE_OF_NEED[verdict.need], verdict.reason)

    def statuses(self) -> list[Status]:
        """Where every fix stands now, in the registry's order."""
        return [self.status(fix) for fix in self.fixes]

    def revert(self) -> list[str]:
        """Undo every replacement. Returns what had to stay, one sentence each."""
        with self._lock:
            left = self.patcher.revert()
            self._applied.clear()
            self._failed.clear()
            return left


def _worded(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def unmet(statuses: Iterable[Status]) -> list[Status]:
    """Those of the fixes a server needs that are not in place."""
    return [s for s in statuses if s.state is not State.APPLIED]
