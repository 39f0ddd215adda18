# SPDX-License-Identifier: Apache-2.0
"""Decide, for each server that vLLM configures, whether it is ours; if so apply what it needs or refuse to start.

Four methods of vLLM's get a gate: a wrapper that looks at the configuration and passes everything else through. The
overlay touches something only behind an open gate: for method ``eagle3`` on a target listed in :data:`TARGETS`, and for
those targets on the CPU platform, whose engine does not run them otherwise.

* ``SpeculativeConfig.__post_init__``: what must hold before the drafter's configuration is built;
* ``VllmConfig.__post_init__``: the plan of the layers to capture, and the check that every fix is at hand;
* ``WorkerWrapperBase.init_worker`` and ``.init_device``: the fixes in the process that loads the model. Configurations
  reach it pickled, so the first two gates do not open there.

The plan travels in ``additional_config["kimi_eagle3"]``: vLLM carries that to every process and hashes it into the
compile-cache key. A process that unpickles it has to have the overlay; see :mod:`vllm_kimi_eagle3.record`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from vllm_kimi_eagle3 import __version__, watch
from vllm_kimi_eagle3.fixes import _boundaries, drafter_media, drafter_positions
from vllm_kimi_eagle3.layers import CapturePlan, PlanError, facts_of, read_headers, resolve, stock_boundaries
from vllm_kimi_eagle3.layers.alignment import content_key, load
from vllm_kimi_eagle3.layers.files import local_folder, read_config
from vllm_kimi_eagle3.layers.parse import describe
from vllm_kimi_eagle3.layers.stock import NEWEST
from vllm_kimi_eagle3.patching.engine import Engine, unmet
from vllm_kimi_eagle3.patching.gate import Gate
from vllm_kimi_eagle3.patching.release import installed_release
from vllm_kimi_eagle3.patching.spec import Context, Phase, State, Status
from vllm_kimi_eagle3.record import Record
from vllm_kimi_eagle3.registry import FIXES

logger = logging.getLogger("vllm.kimi_eagle3")

TARGETS = frozenset({"DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"})
"""Architectures that the overlay serves. Kimi-K2 checkpoints call themselves DeepseekV3ForCausalLM."""

RECORD = "kimi_eagle3"
"""The overlay's key in ``additional_config``."""

_USER_KEYS = frozenset({"layer_rule", "layer_ids", drafter_media.KEY})
_RECORD_KEYS = frozenset({"plan", "version", "fixes"})

ENGINE = Engine(FIXES)
"""This process's fixes."""

_lock = threading.Lock()
_announced: set[str] = set()


class OverlayError(ValueError):
    """A server of ours cannot be served right. One sentence: what, where, expected, what to do."""


def mode() -> str:
    """``on``, ``warn``, ``stock`` or ``off``, from ``VLLM_KIMI_EAGLE3``.

    Unset and empty mean ``on``. ``warn`` starts a server even when a fix is missing. ``stock`` leaves EAGLE-3 as vLLM
    ships it and mends only what keeps the CPU engine from running our targets: the baseline to measure against. ``off``
    does nothing at all.

    Raises:
        OverlayError: any other value.
    """
    value = (os.environ.get("VLLM_KIMI_EAGLE3") or "on").strip().lower()
    if value not in ("on", "warn", "stock", "off"):
        raise OverlayError(f"VLLM_KIMI_EAGLE3 is {value!r}; it must be on, warn, stock or off")
    return value


def install_gates() -> None:
    """Install every gate, each once its module is imported. Idempotent and thread-safe."""
    for gate in _GATES:
        gate.install()
    if (os.environ.get(watch.SWITCH) or "").strip().lower() not in ("", "0", "off"):
        _WATCH_GATE.install()


def remove() -> list[str]:
    """Take back every fix and every gate. Returns what had to stay because somebody patched over it."""
    gates = (*reversed(_GATES), _WATCH_GATE)
    left = watch.ENGINE.revert() + ENGINE.revert() + [sentence for gate in gates for sentence in gate.remove()]
    with _lock:
        _announced.clear()
    return left


# ---------------------------------------------------------------------------------------------------------------------
# Is this server ours?


def target_architecture(model_config: Any) -> str | None:
    """The name in :data:`TARGETS` that a target's configuration carries, or None."""
    architectures = getattr(getattr(model_config, "hf_config", None), "architectures", None) or []
    return next((name for name in architectures if name in TARGETS), None)


def _context(model_config: Any, eagle3: bool) -> Context | None:
    """The context of a server on this target; None for targets that are not ours."""
    architecture = target_architecture(model_config)
    if architecture is None:
        return None
    from vllm.platforms import current_platform

    eagle3 = eagle3 and mode() != "stock"
    return Context(target_architecture=architecture, platform=str(current_platform.device_type), eagle3=eagle3)


def _speculative_context(speculative_config: Any) -> Context | None:
    """The context of a speculative configuration whose method is ours, or may become so."""
    model = str(speculative_config.model or "").lower()
    # vLLM's own guess for a drafter without a method: the word in its path.
    guessed = speculative_config.method is None and "eagle3" in model and "eagle-" not in model
    if speculative_config.method != "eagle3" and not guessed:
        return None
    target = speculative_config.target_model_config
    context = _context(target, eagle3=True)
    if context is None:
        _say_if_related(target)
    return context


def _say_if_related(model_config: Any) -> None:
    """A relative of our targets is left alone like everybody else, but its user may believe otherwise."""
    architectures = getattr(getattr(model_config, "hf_config", None), "architectures", None) or []
    related = [name for name in architectures if name.startswith(("Deepseek", "Kimi"))]
    if related:
        logger.warning(
            "vllm-kimi-eagle3 does not serve the target %s, only %s: EAGLE-3 runs as stock vLLM has it",
            related[0],
            " and ".join(sorted(TARGETS)),
        )


def _server_context(vllm_config: Any) -> Context | None:
    """The context of a whole server's configuration."""
    speculative_config = vllm_config.speculative_config
    # A drafter is loaded under a copy of the configuration whose model is the drafter: look at the target's.
    model_config = vllm_config.model_config if speculative_config is None else speculative_config.target_model_config
    context = _context(model_config, eagle3=speculative_config is not None and speculative_config.method == "eagle3")
    return context and replace(context, vllm_config=vllm_config)


# ---------------------------------------------------------------------------------------------------------------------
# The gates


def _speculative_config_gate(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    context = _speculative_context(instance)
    if context is not None:
        _check_drafter_folder(instance.model)
        _require(ENGINE.apply(Phase.SPECULATIVE_CONFIG, context))
    return wrapped(*args, **kwargs)


def _vllm_config_gate(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    context = _server_context(instance)
    if context is not None:
        configure_server(context)
    return wrapped(*args, **kwargs)


def _init_worker_gate(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    all_kwargs = kwargs.get("all_kwargs", args[0] if args else None)
    try:
        vllm_config = all_kwargs[instance.rpc_rank].get("vllm_config")
    except (TypeError, LookupError, AttributeError):
        vllm_config = None  # not what we know: vLLM's own business, and init_device looks again
    if vllm_config is not None:
        prepare_worker(vllm_config)
    return wrapped(*args, **kwargs)


def _init_device_gate(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    # A worker process of its own registers plugins inside init_worker, too late for that gate.
    vllm_config = getattr(instance, "vllm_config", None)
    if vllm_config is not None:  # an unknown worker is nobody's reason to fail; tests/drift would see it first
        prepare_worker(vllm_config)
    return wrapped(*args, **kwargs)


_GATES = (
    Gate("vllm.config.speculative", "SpeculativeConfig", "__post_init__", _speculative_config_gate),
    Gate("vllm.config.vllm", "VllmConfig", "__post_init__", _vllm_config_gate),
    Gate("vllm.v1.worker.worker_base", "WorkerWrapperBase", "init_worker", _init_worker_gate),
    Gate("vllm.v1.worker.worker_base", "WorkerWrapperBase", "init_device", _init_device_gate),
)


def _scheduler_gate(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    vllm_config = getattr(instance, "vllm_config", None)
    speculative_config = getattr(vllm_config, "speculative_config", None)
    if speculative_config is not None and speculative_config.method == "eagle3":
        context = _server_context(vllm_config)
        if context is not None:
            watch.begin(instance, context)
    return result


_WATCH_GATE = Gate(watch.MODULE, watch.CLASS, "__init__", _scheduler_gate)
"""Installed only where the user asks for the watch."""


# ---------------------------------------------------------------------------------------------------------------------
# What happens behind them


def configure_server(context: Context) -> None:
    """Resolve the layers, check that every fix is at hand, and write both into the configuration.

    Raises:
        OverlayError: the layers cannot be resolved, or a fix that this server needs is not to be had.
    """
    vllm_config = context.vllm_config
    needed = ENGINE.needed(context)
    if not needed:
        return
    record = _record(context)
    if "version" in record:
        # The configuration is being copied or checked again: the plan stands, and nothing may have changed under it.
        _check_record(context, record)
        return
    record.update(version=__version__, fixes=[fix.label for fix in needed])
    if context.eagle3:
        try:
            watch.settings()  # a mistyped number, too, is to be said now
            context = replace(context, plan=make_plan(vllm_config, record))
            drafter_positions.check(vllm_config)
            if context.target_architecture == "KimiK25ForConditionalGeneration":
                # Written even where it is the default: it decides what a compiled drafter is traced with.
                record[drafter_media.KEY] = drafter_media.chosen(vllm_config)
                drafter_media.check(vllm_config, record[drafter_media.KEY])
            elif record.get(drafter_media.KEY):
                raise PlanError(f"{drafter_media.KEY} is given, but the target takes no pictures; leave it out")
        except PlanError as error:
            raise OverlayError(f"vllm-kimi-eagle3: {error}") from None
        assert context.plan is not None
        record["plan"] = context.plan.to_json()
    _require([s for s in map(ENGINE.status, needed) if s.state in (State.REFUSED, State.FAILED)])
    _require(ENGINE.apply(Phase.VLLM_CONFIG, context))
    # Also where no fix has to write it: a vLLM whose readers are right reads its own rule, and the plan may know more.
    _boundaries.write(context)
    if isinstance(vllm_config.additional_config, Mapping):
        vllm_config.additional_config = {**vllm_config.additional_config, RECORD: record}
    _announce(vllm_config, record, [fix.label for fix in needed])


def prepare_worker(vllm_config: Any) -> None:
    """Apply a server's fixes in the process that loads its model.

    Raises:
        OverlayError: a fix is not to be had, or the drafter's layers were changed after the plan was made.
    """
    context = _server_context(vllm_config)
    if context is None or not ENGINE.needed(context):
        return
    record = _record(context)
    _check_record(context, record)
    statuses = ENGINE.apply(Phase.WORKER, context)
    _require(statuses)
    _announce(vllm_config, record, [s.fix.label for s in statuses])


def receive(record: Record) -> None:
    """A server's record has reached this process: see that its overlay is the one that made the record.

    It installs the gates, too: whether vLLM's loader has found the plugin here no longer matters.

    Raises:
        OverlayError: the overlay is switched off here, or it is another version. With ``warn`` it says so instead.
    """
    here, made_by = mode(), record.get("version")
    problem = None
    if here == "off" or (here == "stock" and "plan" in record):
        problem = (
            "vllm-kimi-eagle3: this server was configured with the overlay, but VLLM_KIMI_EAGLE3 is"
            f" {here!r} in process {os.getpid()}, which is to serve it; set it alike in every process of the server"
        )
    elif made_by != __version__:
        problem = (
            f"vllm-kimi-eagle3: this server was configured by version {made_by}, but process {os.getpid()}, which is to"
            f" serve it, has version {__version__}; install one version in every process of the server"
        )
    if problem is not None and here != "warn":
        raise OverlayError(problem)
    if problem is not None:
        logger.warning(problem)
    install_gates()


def make_plan(vllm_config: Any, record: Mapping[str, Any]) -> CapturePlan:
    """The layers to capture for this server; see :func:`vllm_kimi_eagle3.layers.resolve`.

    Raises:
        PlanError: they cannot be resolved.
    """
    speculative_config = vllm_config.speculative_config
    target = speculative_config.target_model_config.hf_config.to_dict()
    drafter, folder = _drafter_config(vllm_config), _drafter_folder(vllm_config)
    headers = None if folder is None else read_headers(folder)
    facts = facts_of(installed_release() or NEWEST)
    return resolve(
        target,
        drafter,
        layer_rule=record.get("layer_rule") or os.environ.get("VLLM_KIMI_EAGLE3_LAYER_RULE") or None,
        layer_ids=record.get("layer_ids"),
        headers=headers,
        alignment=load(content_key(target, drafter, headers)),
        # Where stock vLLM captures nothing, D3's own loop does, and knows the last boundary.
        last_boundary_capturable=facts.last_boundary or facts.refused,
        fixed_fc_states=None if facts.fc_counts else 3,
        pipeline_parallel_size=vllm_config.parallel_config.pipeline_parallel_size,
    )


def _drafter_folder(vllm_config: Any) -> Path | None:
    """Where the drafter's files are. A repository's weights may come later, when vLLM loads the model."""
    drafter = vllm_config.speculative_config.draft_model_config
    return local_folder(drafter.model, drafter.revision, vllm_config.load_config.download_dir)


def _drafter_config(vllm_config: Any) -> Mapping[str, Any]:
    """The drafter's configuration as its checkpoint has it, or as far as vLLM still knows it."""
    folder = _drafter_folder(vllm_config)
    if folder is not None:
        return read_config(folder)
    hf_config = vllm_config.speculative_config.draft_model_config.hf_config
    # EAGLEConfig keeps the checkpoint's own configuration beside its copy of the values.
    return getattr(hf_config, "model", hf_config).to_dict()


def _record(context: Context) -> Record:
    """A copy of the overlay's entry in a server's configuration.

    Raises:
        OverlayError: it can't be read and EAGLE-3 depends on it. For a server without EAGLE-3, of which only the CPU
            engine is mended, that is a warning: nothing that stands there concerns it.
    """
    additional = context.vllm_config.additional_config
    if not isinstance(additional, Mapping):
        problem = (
            f"additional_config is a {type(additional).__name__}; the capture plan has to travel in it, so it must be a"
            ' dictionary such as {"kimi_eagle3": {"layer_rule": "output"}}'
        )
        return _without_record(context, problem)
    record = cast("Mapping[str, Any]", additional).get(RECORD, {})
    if not isinstance(record, Mapping):
        problem = (
            f'additional_config["{RECORD}"] is {describe(record)}; it must be a dictionary such as'
            ' {"layer_rule": "output"}'
        )
        return _without_record(context, problem)
    entries = cast("Mapping[Any, Any]", record)
    # A plan that somebody wrote by hand, or copied from another server, is nobody's plan.
    known = _USER_KEYS | (_RECORD_KEYS if isinstance(record, Record) else frozenset())
    unknown = sorted(map(str, set(entries) - known))
    if unknown:
        problem = f'additional_config["{RECORD}"] has unknown keys {describe(unknown)}; known are {sorted(_USER_KEYS)}'
        return _without_record(context, problem)
    return Record(entries)


def _without_record(context: Context, problem: str) -> Record:
    if context.eagle3:
        raise OverlayError(f"vllm-kimi-eagle3: {problem}")
    with _lock:
        said = problem in _announced
        _announced.add(problem)
    if not said:
        logger.warning("vllm-kimi-eagle3: %s. This server does not run EAGLE-3, so it starts all the same", problem)
    return Record()


def _check_record(context: Context, record: Mapping[str, Any]) -> None:
    """A server's record must be a whole one, of this version, and nothing may have changed under it."""
    if context.eagle3 and "plan" not in record:
        raise OverlayError(
            "vllm-kimi-eagle3: this configuration was made in a process without the overlay, so no layers were"
            " resolved; install vllm-kimi-eagle3 in every process of the server, or set VLLM_KIMI_EAGLE3=off in"
            " all of them"
        )
    if context.eagle3:
        _check_unchanged(context.vllm_config, record)


def _check_unchanged(vllm_config: Any, record: Mapping[str, Any]) -> None:
    """A change of layers after the plan would be captured, but would not be in the compile-cache key."""
    boundaries: list[int] = list(record.get("plan", {}).get("boundaries", []))
    if not boundaries:
        return
    hf_config = vllm_config.speculative_config.draft_model_config.hf_config
    found = getattr(hf_config, _boundaries.KEY, None)
    if list(found or []) != boundaries:
        raise OverlayError(
            f"vllm-kimi-eagle3: the drafter's layers were changed to {found} after boundaries {boundaries} were"
            f' planned; name the layers in --additional-config {{"{RECORD}": {{"layer_ids": [...]}}}} instead'
        )


def _check_drafter_folder(model: str | None) -> None:
    """Say in one sentence what is wrong with a local drafter folder, before vLLM's loader says it in fifty lines."""
    if model is None or not Path(model).exists():
        return  # a repository's name: vLLM fetches and checks it
    try:
        read_config(Path(model))
    except PlanError as error:
        raise OverlayError(f"vllm-kimi-eagle3: {error}") from None


def _require(statuses: list[Status]) -> None:
    """Refuse to go on without these fixes, or warn, as the user chose."""
    problems = [f"{s.fix.label} is {s.state.value}: {s.reason}" for s in unmet(statuses)]
    problems += [f"a gate is missing: {gate.problem}" for gate in _GATES if gate.problem]
    if not problems:
        return
    message = (
        f"vllm-kimi-eagle3 {__version__} on vLLM {installed_release() or 'of unknown release'} cannot make EAGLE-3"
        f" right for this target, because {'; '.join(problems)}. Update vllm-kimi-eagle3, or start without its"
        " guarantee by VLLM_KIMI_EAGLE3=warn."
    )
    if mode() == "warn":
        logger.warning(message)
        return
    raise OverlayError(message)


def _announce(vllm_config: Any, record: Mapping[str, Any], labels: list[str]) -> None:
    """Say once a process and plan what is captured, and where stock vLLM would have differed."""
    plan_line: str = record.get("plan", {}).get("line", "")
    with _lock:
        if plan_line in _announced:
            return
        _announced.add(plan_line)
    parts = [plan_line, _stock_sentence(vllm_config)] if plan_line else []
    # Of a server without EAGLE-3 nobody has looked at it.
    if plan_line and drafter_media.KEY in record:
        parts.append(
            f"where a prompt has a picture, the drafter sees {drafter_media.CHOICES[record[drafter_media.KEY]]}"
        )
    line = "; ".join([*parts, f"fixes: {', '.join(labels)}"])
    release = installed_release() or "of unknown release"
    logger.info("vllm-kimi-eagle3 %s, vLLM %s, pid %d: %s", __version__, release, os.getpid(), line)
    for warning in record.get("plan", {}).get("warnings", ()):
        logger.warning("vllm-kimi-eagle3: %s", warning)


def _stock_sentence(vllm_config: Any) -> str:
    """Where stock vLLM of this release would have captured something else."""
    speculative_config = vllm_config.speculative_config
    target = speculative_config.target_model_config.hf_config.to_dict()
    reading = stock_boundaries(installed_release() or NEWEST, target, _drafter_config(vllm_config))
    parts = [
        f"{name} {list(runner.boundaries)}" if runner.boundaries is not None else f"{name} nothing ({runner.problem})"
        for name, runner in (("V1", reading.v1), ("V2", reading.v2))
    ]
    return "stock vLLM would capture " + " and ".join(parts)
