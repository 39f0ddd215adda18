# SPDX-License-Identifier: Apache-2.0
"""``VLLM_KIMI_EAGLE3_WATCH=1``: a server says so, once, when hardly any draft is accepted. Off by default.

Wrong layers leave the text right and only make it slow, and a server can't tell that from a hard workload; but its
operator can look, once told. What is watched is the share of verify steps whose first draft was accepted, over windows
of a minute, or of 200 verify steps where those take longer. It is counted where vLLM counts it, in the scheduler's
``make_spec_decoding_stats``, which every release from 0.15.0 to 0.33.0 calls for each request that verified drafts, on
both model runners, with ``--disable-log-stats`` too.

This mends nothing, so it is no entry of the registry; it is applied like one, by an engine of its own. With the switch
off nothing is wrapped. With data parallelism each engine core watches its own requests.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kimi_eagle3.bench.statistics import Share
from vllm_kimi_eagle3.bench.verdict import LOW_FIRST, MIN_DRAFTS
from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.patching.engine import Engine, unmet
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, Verdict

logger = logging.getLogger("vllm.kimi_eagle3")

SWITCH = "VLLM_KIMI_EAGLE3_WATCH"
BELOW = f"{SWITCH}_BELOW"
MINUTES = f"{SWITCH}_MINUTES"
LOOK_EVERY = 64
"""Verify steps between two looks at the clock."""

MODULE, CLASS = "vllm.v1.core.sched.scheduler", "Scheduler"
TARGET = f"{MODULE}:{CLASS}.make_spec_decoding_stats"
_PARAMETERS = ("self", "spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens")
_ATTRIBUTE = "_kimi_eagle3_watch"


@dataclass(frozen=True)
class Settings:
    """When to warn.

    Attributes:
        below: share of verify steps whose first draft is accepted, 0..1.
        minutes: length of a window.
    """

    below: float = LOW_FIRST
    minutes: float = 1.0


def settings(environment: Mapping[str, str] | None = None) -> Settings | None:
    """What the variables say; None when the watch is off.

    Raises:
        PlanError: a variable holds something else than it may.
    """
    environment = os.environ if environment is None else environment
    switch = environment.get(SWITCH, "").strip().lower()
    if switch in ("", "0", "off"):
        return None
    if switch not in ("1", "on"):
        raise PlanError(f"{SWITCH} is {switch[:40]!r}; it must be 1 or 0")
    return Settings(
        _number(environment, BELOW, LOW_FIRST, 1.0, "a share of verify steps"),
        _number(environment, MINUTES, 1.0, 1440.0, "a number of minutes"),
    )


def _number(environment: Mapping[str, str], name: str, default: float, most: float, what: str) -> float:
    text = environment.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise PlanError(f"{name} is {text[:40]!r}; {what} above 0 and up to {most:g} was expected")
    return value


class Watch:
    """Counts verify steps, and calls ``warn`` once, with share and minutes, when a whole window of them was bad.

    A window ends when its minutes are over and it has ``MIN_DRAFTS`` verify steps, so that a server with little to do
    is no reason for an alarm; the whole interval of its share has to lie below the threshold.

    Args:
        chosen: when to warn.
        warn: called at most once.
        clock: seconds.
    """

    __slots__ = ("_begun", "_chosen", "_clock", "_drafts", "_first", "_warn", "done")

    def __init__(
        self, chosen: Settings, warn: Callable[[Share, float], None], clock: Callable[[], float] = time.monotonic
    ):
        self._chosen, self._warn, self._clock = chosen, warn, clock
        self._begun, self._drafts, self._first = 0.0, 0, 0
        self.done = False

    def observe(self, accepted: int) -> None:
        """One request's verify step, of which ``accepted`` drafts passed."""
        if not self._drafts:
            self._begun = self._clock()
        self._drafts += 1
        if accepted > 0:
            self._first += 1
        if not self._drafts % LOOK_EVERY:
            self._look()

    def _look(self) -> None:
        now = self._clock()
        if self._drafts < MIN_DRAFTS or now - self._begun < 60 * self._chosen.minutes:
            return
        share = Share(self._first, self._drafts)
        if not self.done and share.high < self._chosen.below:
            self.done = True
            self._warn(share, (now - self._begun) / 60)
        self._drafts = self._first = 0


# ---------------------------------------------------------------------------------------------------------------------


def probe(tree: SourceTree) -> Verdict:
    """The counting method has the parameters known, and the scheduler keeps its configuration."""
    if not tree.has(TARGET):
        return Verdict(Need.NOT_APPLICABLE, f"{TARGET} is not part of this vLLM")
    if tree.parameters(TARGET)[: len(_PARAMETERS)] != _PARAMETERS:
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}")
    if "self.make_spec_decoding_stats(" not in tree.text(f"{MODULE}:{CLASS}.update_from_output"):
        return Verdict(Need.REFUSED, f"{CLASS}.update_from_output does not call it")
    if "self.vllm_config" not in tree.text(f"{MODULE}:{CLASS}.__init__"):
        return Verdict(Need.REFUSED, f"{CLASS} does not keep its vllm_config")
    return Verdict(Need.APPLY, "accepted drafts are counted there")


def install(installer: Installer) -> None:
    """Count beside vLLM, for schedulers that are watched."""
    original: Any = installer.original(TARGET)

    def make_spec_decoding_stats(
        self: Any, spec_decoding_stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        watch = getattr(self, _ATTRIBUTE, None)
        if watch is not None and num_draft_tokens:
            watch.observe(num_accepted_tokens)
        return original(self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    installer.replace(TARGET, make_spec_decoding_stats)


WATCH = Fix(
    id="W1",
    name="watch",
    targets=(TARGET,),
    phase=Phase.WORKER,
    why="nobody is told when hardly any draft is accepted",
    upstream="none: vLLM logs the rate every ten seconds and draws no conclusion",
    retire="vLLM warns by itself",
    probe=probe,
    wanted=lambda context: True,
    install=install,
)
ENGINE = Engine((WATCH,))


def begin(scheduler: Any, context: Context) -> None:
    """Watch this scheduler. Says so in the log, or why it can't; never raises."""
    try:
        chosen = settings()
        if chosen is None:
            return
        problems = unmet(ENGINE.apply(Phase.WORKER, context)) or unmet([ENGINE.status(WATCH)])
        if problems:
            logger.warning("vllm-kimi-eagle3: %s has no effect: %s", SWITCH, problems[0].reason)
            return
        command = command_of(context.vllm_config)

        def warn(share: Share, minutes: float) -> None:
            logger.warning(
                "vllm-kimi-eagle3: hardly any draft is accepted. In the last %.1f min the first draft passed in %s of"
                " the verify steps, less than %.0f%% (%s). The text is right all the same, but speculation may cost"
                " more than it brings. To find out why, run: %s",
                minutes,
                share,
                100 * chosen.below,
                BELOW,
                command,
            )

        setattr(scheduler, _ATTRIBUTE, Watch(chosen, warn))
        logger.info(
            "vllm-kimi-eagle3: watching acceptance; one warning if the first draft passes in less than %.0f%% over %g"
            " min",
            100 * chosen.below,
            chosen.minutes,
        )
    except Exception as error:
        logger.warning("vllm-kimi-eagle3: %s has no effect: %s: %s", SWITCH, type(error).__name__, error)


def command_of(vllm_config: Any) -> str:
    """What to run on the machine that serves; its port is the API server's business and not known here."""
    speculative = vllm_config.speculative_config
    models = [str(speculative.target_model_config.model), str(speculative.draft_model_config.model)]
    target, drafter = map(shlex.quote, models)
    return (
        f"vllm-kimi-eagle3 bench --base-url http://127.0.0.1:PORT --target {target} --drafter {drafter}"
        " (PORT: this server's, 8000 unless you chose another)"
    )
