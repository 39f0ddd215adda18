# SPDX-License-Identifier: Apache-2.0
"""Is the overlay in place in the processes of a server? Starts the probe, and judges its report.

``ask`` runs ``probe.py`` in a clean child; ``judge`` is a pure function of the report and the environment variables.
What it can't see: processes on other hosts, and what an operator's start script sets that this shell has not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from vllm_kimi_eagle3 import __version__, watch
from vllm_kimi_eagle3.doctor.findings import Finding, ok
from vllm_kimi_eagle3.fixes import drafter_media
from vllm_kimi_eagle3.layers import PlanError

PROBE = Path(__file__).with_name("probe.py")
PLUGIN = "kimi_eagle3"
SECONDS = 600
MODES = ("on", "warn", "stock", "off")
RULES = ("output", "boundary")

Report = Mapping[str, Any]


def ask(server: Mapping[str, Any] | None = None, *, python: str | None = None) -> dict[str, Any]:
    """Run the probe in a clean child process and return its report.

    Args:
        server: arguments of vLLM's ``EngineArgs``, to configure a server with; None to look at the environment only.
        python: the interpreter; this one by default.

    Returns:
        The report; ``child_error`` in it says that the child ended early, and the rest is what it knew by then.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "report.json"
        request.write_text(json.dumps({"server": server, "import_overlay": True}))
        report: dict[str, Any] = {}
        try:
            done = subprocess.run(
                [python or sys.executable, str(PROBE), str(request), str(answer)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
            )
            problem = None if done.returncode == 0 else f"ended with code {done.returncode}: {_tail(done.stderr)}"
        except subprocess.TimeoutExpired:
            problem = f"did not answer within {SECONDS} seconds"
        except OSError as error:
            problem = f"could not be started: {error}"
        if answer.exists():
            report = json.loads(answer.read_text())
        if problem is not None:
            report["child_error"] = problem
        return report


def judge(report: Report, environment: Mapping[str, str] | None = None) -> list[Finding]:
    """What the report means, check by check.

    Args:
        report: what ``ask`` returned.
        environment: the variables that the server would have; ``os.environ`` by default.
    """
    environment = os.environ if environment is None else environment
    findings: list[Finding] = []
    for check in (_child, _switch, _filter, _metadata, _vllm, _loaded, _gates, _foreign, _fixes, _server, _worker):
        findings += check(report, environment)
    return findings


# ---------------------------------------------------------------------------------------------------------------------


def _mode(environment: Mapping[str, str]) -> str:
    return (environment.get("VLLM_KIMI_EAGLE3") or "on").strip().lower()


def _filtered(environment: Mapping[str, str]) -> bool:
    names = environment.get("VLLM_PLUGINS")
    return names is not None and PLUGIN not in names.split(",")


def _child(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    problem = report.get("child_error") or report.get("probe_error")
    if problem:
        yield Finding(
            "child-process",
            "error",
            f"the child process that loads vLLM's plugins {problem}",
            "a server's processes start the same way",
            "start `python -c 'import vllm'` by hand and mend what it says",
        )
    else:
        yield ok("child-process", f"Python {report.get('python')}, loaded in {report.get('seconds')} s")


def _switch(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    mode = _mode(environment)
    if mode not in MODES:
        yield Finding(
            "kill-switch",
            "error",
            f"VLLM_KIMI_EAGLE3 is {mode!r}",
            "a server refuses to start with an unknown word there",
            f"set it to one of {', '.join(MODES)}, or leave it unset",
        )
    elif mode == "off":
        yield Finding(
            "kill-switch",
            "warning",
            "VLLM_KIMI_EAGLE3=off: the overlay does nothing",
            "EAGLE-3 runs as stock vLLM has it, wrong layers included",
            "unset VLLM_KIMI_EAGLE3",
        )
    elif mode == "stock":
        yield Finding(
            "kill-switch",
            "warning",
            "VLLM_KIMI_EAGLE3=stock: EAGLE-3 runs as vLLM ships it",
            "that is meant for baselines; the layers that the drafter reads may be the wrong ones",
            "unset VLLM_KIMI_EAGLE3",
        )
    elif mode == "warn":
        yield Finding(
            "kill-switch",
            "warning",
            "VLLM_KIMI_EAGLE3=warn: a server starts even when a fix is missing",
            "it may run with the fault that the fix is for",
            "unset VLLM_KIMI_EAGLE3 once the reason for it is gone",
        )
    else:
        yield ok("kill-switch", "VLLM_KIMI_EAGLE3 is on")
    try:
        chosen = watch.settings(environment)
    except PlanError as error:
        yield Finding(
            "watch", "error", str(error), "a server refuses to start with it", "correct it, or leave it unset"
        )
    else:
        if chosen is not None:
            yield Finding(
                "watch",
                "info",
                f"servers warn once when fewer than {chosen.below:.0%} of the verify steps accept their first draft"
                f" over {chosen.minutes:g} min",
            )
    rule = environment.get("VLLM_KIMI_EAGLE3_LAYER_RULE")
    if rule:
        if rule not in RULES:
            yield Finding(
                "layer-rule-variable",
                "error",
                f"VLLM_KIMI_EAGLE3_LAYER_RULE is {rule[:40]!r}",
                "a server refuses to start with an unknown rule",
                "set it to output or boundary, or leave it unset",
            )
        else:
            yield Finding(
                "layer-rule-variable",
                "info",
                f"VLLM_KIMI_EAGLE3_LAYER_RULE={rule} decides for every drafter that this shell's servers load",
            )

    media = (environment.get(drafter_media.VARIABLE) or "").strip()
    if media and media not in drafter_media.CHOICES:
        yield Finding(
            "drafter-media-variable",
            "error",
            f"{drafter_media.VARIABLE} is {media[:40]!r}",
            "a server of Kimi-K2.5 refuses to start with it",
            f"set it to {', '.join(drafter_media.CHOICES)}, or leave it unset",
        )
    elif media:
        yield Finding(
            "drafter-media-variable",
            "info",
            f"where a prompt has a picture, the drafters of this shell's Kimi-K2.5 servers see"
            f" {drafter_media.CHOICES[media]}",
        )


def _filter(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    if _filtered(environment):
        yield Finding(
            "plugins-filter",
            "error",
            f"VLLM_PLUGINS={environment['VLLM_PLUGINS']} leaves out {PLUGIN}",
            "vLLM loads the plugins named there and no other, without a word in the log",
            f"add {PLUGIN} to it, or unset it",
        )
    else:
        yield ok("plugins-filter", "VLLM_PLUGINS lets the plugin through")


def _metadata(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    found = cast("list[dict[str, Any]]", report.get("distributions") or [])
    if not found:
        yield Finding(
            "metadata",
            "error",
            "this Python has no installed distribution called vllm-kimi-eagle3",
            "vLLM finds plugins by the metadata of installed packages; a folder on PYTHONPATH is not enough",
            f"run `{report.get('executable') or sys.executable} -m pip install vllm-kimi-eagle3`",
        )
        return
    first = found[0]
    others = [entry["location"] for entry in found[1:] if entry["location"] != first["location"]]
    if others:
        yield Finding(
            "metadata",
            "error" if not first["registers"] else "warning",
            f"{len(others) + 1} copies of the package's metadata are on the path: {first['location']} is taken, and"
            f" hides {', '.join(others)}",
            "Python takes the first one: its version and its plugin entry count, stale or not",
            f"delete {others[0] if first['registers'] else first['location']} if it is stale (an .egg-info or"
            " .dist-info folder that pip left behind)",
        )
    elif not first["registers"]:
        yield Finding(
            "metadata",
            "error",
            f"the metadata at {first['location']} does not register the plugin {PLUGIN}",
            "vLLM does not find the overlay, and serves as if it were not installed",
            "it is stale or of another build: reinstall the package",
        )
    else:
        yield ok("metadata", f"one installation, version {first['version']}")
    version = report.get("overlay_version")
    if version and version != first["version"]:
        yield Finding(
            "metadata-version",
            "warning",
            f"the metadata says version {first['version']}, the code that runs {version}",
            "another copy of the code than the installed one is imported",
            "reinstall the package, and look for a second copy on PYTHONPATH",
        )
    yield from _shadowing(report, first)


def _shadowing(report: Report, first: Mapping[str, Any]) -> Iterator[Finding]:
    """Is the code that runs the code that was installed?"""
    file = report.get("overlay_file")
    if not file:
        return
    here = Path(file).resolve()
    if first.get("editable"):
        root = Path(str(first["editable"]).removeprefix("file://"))
        if here.is_relative_to(root.resolve()):
            yield Finding("code-location", "info", f"an editable installation: the code is that of {root}")
            return
        expected = root
    else:
        expected = Path(first["root"])
        if here.is_relative_to(expected.resolve()):
            yield ok("code-location", "the code that runs is the installed one")
            return
    yield Finding(
        "code-location",
        "error",
        f"the code that runs is {here.parent}, not the one installed in {expected}",
        "something on PYTHONPATH or an editable installation hides the installed package, so upgrades have no effect",
        "remove that folder from PYTHONPATH, or uninstall and install the package again",
    )


def _vllm(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    problem = report.get("vllm_import")
    if problem is None:
        if report.get("vllm_file"):
            yield ok("vllm-import", "vLLM is importable")
        return
    absent = problem.startswith("ModuleNotFoundError: No module named 'vllm'")
    yield Finding(
        "vllm-import",
        "warning" if absent else "error",
        "vLLM is not installed in this Python" if absent else f"vLLM is installed and can't be imported: {problem}",
        "only the checks of files could run" if absent else "no server starts in this environment",
        "run doctor with the Python that serves" if absent else "mend the environment first",
    )


def _loaded(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    if report.get("vllm_import") is not None or not report.get("vllm_file"):
        return
    logged = cast("list[dict[str, str]]", report.get("logged") or [])
    ours = [entry["message"] for entry in logged if "kimi" in entry["message"].lower()]
    others = [entry["message"] for entry in logged if entry["message"] not in ours]
    if report.get("loader"):
        yield Finding(
            "plugin-loaded",
            "error",
            f"vLLM's plugin loader ended with {report['loader']}",
            "one plugin's error ends the start of every server",
            "mend or uninstall the plugin that the error names",
        )
    elif report.get("overlay_import"):
        yield Finding(
            "plugin-loaded",
            "error",
            f"the overlay can't be imported: {report['overlay_import']}",
            "vLLM logs that once and serves without the overlay, wrong layers included",
            "reinstall vllm-kimi-eagle3 and what it needs into the Python that serves",
        )
    elif ours and not report.get("gates"):
        yield Finding(
            "plugin-loaded",
            "error",
            f"while loading plugins vLLM logged: {ours[0]}",
            "the overlay could not install itself",
            "reinstall vllm-kimi-eagle3 and what it needs into the Python that serves",
        )
    elif report.get("active"):
        yield ok("plugin-loaded", f"vLLM's own loader brought in version {report.get('overlay_version')}")
    elif _mode(environment) != "off" and not _filtered(environment):
        yield Finding(
            "plugin-loaded",
            "error",
            "vLLM's own loader did not bring the overlay in",
            "servers run without it",
            "see the findings on metadata; then reinstall the package",
        )
    for message in others[:3]:
        if "plugin" in message.lower():
            yield Finding("other-plugins", "info", f"while loading plugins vLLM logged: {message}")
    twice = [p for p in cast("list[dict[str, str]]", report.get("plugins") or []) if p["name"] == PLUGIN]
    if len(twice) > 1:
        yield Finding(
            "plugin-name",
            "error",
            f"{len(twice)} distributions register a plugin called {PLUGIN}:"
            f" {', '.join(p['distribution'] for p in twice)}",
            "vLLM keeps one of a name, whichever comes last",
            "uninstall the other one",
        )


def _outsiders(chain: list[dict[str, str]], vllm_file: str) -> list[str]:
    """The modules in a chain of wrappers that belong neither to vLLM nor to the overlay."""
    root = str(Path(vllm_file).parent)
    known = ("vllm_kimi_eagle3", "wrapt", "functools")
    return [
        link["module"]
        for link in chain
        if link["file"]
        and not link["file"].startswith((root, "<"))
        and not link["module"].startswith(known)
        and "site-packages/pydantic" not in link["file"]
        and "/torch/" not in link["file"]
        and "/contextlib.py" not in link["file"]
    ]


def _gates(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    entries = cast("list[dict[str, Any]]", report.get("gates") or [])
    if not entries:
        return
    problems = [f"{entry['place']} ({entry['error']})" for entry in entries if entry["error"]]
    lost = [
        entry["place"]
        for entry in entries
        if not entry["error"] and not any(link["module"].startswith("vllm_kimi_eagle3") for link in entry["chain"])
    ]
    if len(problems) == len(entries):
        yield Finding(
            "gates",
            "error",
            f"none of the {len(entries)} methods that the overlay waits for is where it looks: {'; '.join(problems)}",
            "the overlay is loaded and never asked, so no server is refused either: all run as stock vLLM, wrong layers"
            " included",
            "update vllm-kimi-eagle3, or take a vLLM that it knows: this one has another shape",
        )
    elif problems:
        yield Finding(
            "gates",
            "error",
            f"a gate is not in place: {'; '.join(problems)}",
            "the overlay does not see the configuration there, and refuses servers that need it",
            "update vllm-kimi-eagle3: this vLLM has another shape than those it knows",
        )
    if lost:
        yield Finding(
            "gates",
            "error",
            f"a gate was replaced by somebody else: {', '.join(lost)}",
            "the overlay is loaded and never asked: servers run as stock vLLM",
            "find the other plugin among those listed, and load one of the two (VLLM_PLUGINS)",
        )
    if not problems and not lost:
        yield ok("gates", f"all {len(entries)} gates are in place")


def _foreign(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    vllm_file = report.get("vllm_file") or ""
    found: dict[str, set[str]] = {}
    for entry in [*(report.get("gates") or []), *(report.get("targets") or [])]:
        for module in _outsiders(entry["chain"], vllm_file):
            found.setdefault(module, set()).add(entry["place"])
    for module, places in found.items():
        yield Finding(
            "two-plugins",
            "warning",
            f"{module} has patched {', '.join(sorted(places))}, which the overlay patches, too",
            "whoever comes last wins, and the order of plugins is arbitrary",
            "load one of the two (VLLM_PLUGINS), and compare by `vllm-kimi-eagle3 bench`",
        )
    if report.get("gates") and not found:
        yield ok("two-plugins", "nobody else patches what the overlay patches")


def _fixes(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    fixes = cast("list[dict[str, str]]", report.get("fixes") or [])
    if not fixes:
        return
    needed = {label for labels in (report.get("needed") or {}).values() for label in labels}
    bad = [f for f in fixes if f["state"] in ("REFUSED", "FAILED", "SHADOWED")]
    relevant = [f for f in bad if not needed or f"{f['id']} {f['name']}" in needed]
    for fix in relevant:
        yield Finding(
            "fixes",
            "error",
            f"{fix['id']} {fix['name']} is {fix['state']}: {fix['reason']}",
            "a server that needs it refuses to start",
            "update vllm-kimi-eagle3; VLLM_KIMI_EAGLE3=warn starts without its guarantee",
        )
    if relevant:
        return
    count = {state: sum(f["state"] == state for f in fixes) for state in sorted({f["state"] for f in fixes})}
    wanted = f"; needed on {report.get('platform')}: {', '.join(sorted(needed))}" if needed else ""
    yield ok("fixes", ", ".join(f"{number} {state}" for state, number in count.items()) + wanted)


def _server(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    if report.get("server_error"):
        yield Finding(
            "server-config",
            "error",
            f"configuring the server as `vllm serve` does ended with {report['server_error']}",
            "this pair does not start in this environment",
            "do as the sentence says",
        )
    elif report.get("server"):
        plan = report["server"].get("plan")
        line = plan["line"] if plan else "no capture plan"
        yield Finding("server-config", "ok" if plan else "warning", f"configured as `vllm serve` does: {line}")


def _worker(report: Report, environment: Mapping[str, str]) -> Iterator[Finding]:
    if report.get("worker_error"):
        yield Finding(
            "worker",
            "error",
            f"a process started as vLLM starts its workers failed: {report['worker_error']}",
            "workers would fail the same way",
            "start one server with the same arguments and read its log",
        )
        return
    answer = report.get("worker")
    if not answer:
        return
    if answer.get("error") or not answer.get("fixes"):
        yield Finding(
            "worker",
            "error",
            f"a worker process does not get the overlay: {answer.get('error') or 'the plugin was not loaded there'}",
            "the model would run unpatched there, or the server stops",
            "install vllm-kimi-eagle3 in every process's Python, with the same VLLM_* variables",
        )
        return
    applied = [f["id"] for f in answer["fixes"] if f["state"] == "APPLIED"]
    missing = [f for f in answer["fixes"] if f["state"] in ("REFUSED", "FAILED", "SHADOWED")]
    if missing:
        yield Finding(
            "worker", "error", f"in a worker {missing[0]['id']} is {missing[0]['state']}: {missing[0]['reason']}"
        )
    else:
        yield ok("worker", f"a spawned worker has applied {', '.join(applied) or 'nothing, and needs nothing'}")


def _tail(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-400:] or "it said nothing"


OWN_VERSION = __version__
"""The version of the code that asks, which may differ from the one that the child loads."""
