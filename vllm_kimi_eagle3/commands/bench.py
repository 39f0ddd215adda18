# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3 bench``: how fast, how much is accepted, and what is wrong.

Against servers that run already (``--base-url``, ``--baseline-url``, ``--control-url``), or engines that it starts one
after another (``--target --drafter [--control]``): without speculation, with the drafter, with the control drafter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3 import __version__
from vllm_kimi_eagle3.bench import breakeven, report
from vllm_kimi_eagle3.bench.client import Client, ServerError
from vllm_kimi_eagle3.bench.gather import evidence_of, main_run, speedup_of
from vllm_kimi_eagle3.bench.measure import Run, Setting, measure, warm_up
from vllm_kimi_eagle3.bench.metrics import Counters
from vllm_kimi_eagle3.bench.prompts import FIVE, read_prompts
from vllm_kimi_eagle3.bench.serve import serve
from vllm_kimi_eagle3.bench.verdict import Name, Verdict, decide
from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.layers.files import read_object, require_model
from vllm_kimi_eagle3.patching.release import installed_release

SUMMARY = "Speed, acceptance by position and the verdict, against a baseline and a control drafter."
GOOD = (Name.HEALTHY, Name.UNKNOWN)


def add_parser(subparsers: Any) -> None:
    """Declare the command's options."""
    parser = subparsers.add_parser("bench", help=SUMMARY, description=SUMMARY)
    servers = parser.add_argument_group("servers that run already")
    servers.add_argument("--base-url", metavar="URL", help="the server to judge, such as http://127.0.0.1:8000")
    servers.add_argument("--baseline-url", metavar="URL", help="the same target without speculation")
    servers.add_argument("--control-url", metavar="URL", help="the same target with another drafter")
    servers.add_argument("--model", metavar="NAME", help="the model's name there (default: the first one listed)")
    engines = parser.add_argument_group("engines to start, one after another")
    engines.add_argument("--target", metavar="DIR", help="the target; beside --base-url: for what its files say")
    engines.add_argument("--drafter", metavar="DIR", help="the drafter; beside --base-url: for what its files say")
    engines.add_argument("--control", metavar="DIR", help="a second drafter, as a control")
    engines.add_argument("--k", type=int, default=3, metavar="N", help="draft tokens a step (default 3)")
    engines.add_argument("--serve", default="", metavar="ARGS", help="further arguments of vllm serve, in one string")
    engines.add_argument("--no-baseline", action="store_true", help="do not run the target without speculation")
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--prompts", type=Path, metavar="FILE", help=".json or .jsonl of prompts (default: five)")
    asked.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens a prompt (default 512)")
    asked.add_argument("--temperature", type=float, default=0.6, metavar="T", help="of the sampled runs (default 0.6)")
    asked.add_argument("--greedy-only", action="store_true", help="leave the sampled runs out")
    asked.add_argument("--repeats", type=int, default=3, metavar="N", help="passes; medians are shown (default 3)")
    asked.add_argument("--concurrency", default="1", metavar="N,M", help="requests at a time, a sweep (default 1)")
    asked.add_argument("--ignore-eos", action="store_true", help="always write all tokens")
    given = parser.add_argument_group("what is known already")
    given.add_argument("--calibration", type=Path, metavar="FILE", help="what `calibrate --json` printed")
    given.add_argument("--verification", type=Path, metavar="FILE", help="what `verify --json` printed")
    given.add_argument("--baseline", type=Path, metavar="FILE", help="an earlier --json of this command")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report that needs no other file")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the logs of the engines here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print. ``PlanError`` (bad input) passes through; a server that fails is exit status 1."""
    settings, prompts = _settings(options), read_prompts(options.prompts) if options.prompts else FIVE
    _check(options)
    if options.html is not None:
        report.require()
    runs: list[Run] = []
    earlier = _earlier_baseline(options.baseline, settings) if options.baseline else []
    judged = "server" if options.base_url else "drafter"
    # Whatever can't be read of the pair's files is bad input, to be said before minutes are spent.
    known = {
        "target": _folder(options.target),
        "drafter": _folder(options.drafter),
        "calibration": options.calibration,
        "verification": options.verification,
    }
    evidence_of([], judged, **known)
    try:
        for name, client in _clients(options):
            warm_up(client, prompts, max(setting.concurrency for setting in settings))
            for setting in settings:
                runs.append(measure(client, name, prompts, setting, _progress))
    except ServerError as error:
        print(f"vllm-kimi-eagle3 bench: {error}", file=sys.stderr)
        return 1
    finally:
        _progress("")
    runs = [*earlier, *runs]
    evidence = evidence_of(runs, judged, **known)
    verdict = decide(evidence)
    data = to_json(runs, judged, verdict)
    if options.html is not None:
        calibration = read_object(options.calibration, 1 << 20) if options.calibration else None
        try:
            options.html.write_text(report.render(data, calibration), encoding="utf-8")
        except OSError as error:
            raise PlanError(f"{options.html} can't be written: {error.strerror}") from None
    print(json.dumps(data, indent=2) if options.json else text(data))
    return 0 if verdict.name in GOOD else 1


def to_json(runs: Sequence[Run], judged: str, verdict: Verdict) -> dict[str, Any]:
    """The result as plain data.

    ``break_even`` is the acceptance length at which the drafter's run costs nothing; ``break_even_acceptance`` the same
    as a share of all drafts, and as the share of each draft after an accepted one, None where no acceptance pays;
    ``best_k`` the fastest numbers of draft tokens by these rates, from and to, because what a draft token adds to a
    step can't be told from one k.
    """
    speedup, main = speedup_of(runs, judged), main_run(runs, judged)
    break_even = None
    if main is not None and speedup and main.counters.acceptance_length is not None:
        break_even = main.counters.acceptance_length / speedup
    return {
        "version": __version__,
        "vllm": installed_release(),
        "judged": judged,
        "runs": [run.to_json() for run in runs],
        "speedup": speedup,
        "speedups": _speedups(runs),
        "break_even": break_even,
        **_break_even(break_even, main.counters if main is not None else None),
        "same_text": _same_text(runs, judged),
        "verdict": verdict.name.value,
        "reasons": list(verdict.reasons),
        "next": verdict.next,
        "shift": None if verdict.shift is None else list(verdict.shift),
        "boundaries": None if verdict.boundaries is None else list(verdict.boundaries),
        "warnings": [f"{run.name}, {run.setting.label}: {warning}" for run in runs for warning in run.warnings],
    }


def text(data: Mapping[str, Any]) -> str:
    """The result for a terminal."""
    lines = [f"vllm-kimi-eagle3 {data['version']} bench", ""]
    head = (
        "run",
        "setting",
        "tok/s",
        "ms/token",
        "speed-up",
        "accepted",
        "length",
        "by position (after the one before)",
    )
    rows: list[tuple[str, ...]] = [head]
    for run, speedup in zip(data["runs"], data["speedups"], strict=True):
        rows.append(
            (
                run["name"],
                run["setting"],
                f"{run['tok_s']:.1f}",
                f"{run['ms_per_token']:.1f}" if run["ms_per_token"] else "-",
                f"{speedup:.2f}x" if speedup is not None else "-",
                _percent(run["acceptance_rate"]),
                f"{run['acceptance_length']:.2f}" if run["acceptance_length"] is not None else "-",
                _positions(run),
            )
        )
    lines += _columns(rows, left={0, 1, 7})
    main = [run for run in data["runs"] if run["concurrency"] == 1] or data["runs"]
    names = [row["name"] for row in main[0]["prompts"]] if main else []
    if 0 < len(names) <= 20:
        lines += ["", "tok/s by prompt"]
        table = [("run", "setting", *names)]
        for run in main:
            table.append((run["name"], run["setting"], *(f"{row['tok_s']:.1f}" for row in run["prompts"])))
        lines += _columns(table, left={0, 1})
    lines.append("")
    if data["break_even"] is not None:
        lines.append(f"break-even: acceptance length {data['break_even']:.2f}{_pays(data)}")
    if data["same_text"] is not None:
        same, total = data["same_text"]
        lines.append(f"greedy text equal to the baseline's: {same} of {total}")
    lines += [f"warning: {warning}" for warning in data["warnings"]]
    lines += ["", f"verdict: {data['verdict']}"]
    lines += [f"  - {reason}" for reason in data["reasons"]]
    return "\n".join([*lines, f"next: {data['next']}"])


# ---------------------------------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> None:
    if options.base_url is None and (options.target is None or options.drafter is None):
        raise PlanError("nothing to measure: give --base-url, or --target and --drafter")
    if options.base_url is None and (options.baseline_url or options.control_url):
        raise PlanError("--baseline-url and --control-url stand beside --base-url; give that, too")
    if options.base_url is not None and (options.target is None) != (options.drafter is None):
        raise PlanError("--target and --drafter belong together; give both, or neither")
    if options.base_url is not None and options.control is not None:
        raise PlanError("--control starts an engine; beside --base-url give --control-url")
    for name in ("target", "drafter", "control"):
        if getattr(options, name) is not None:
            require_model(f"--{name}", getattr(options, name))
    for name in ("tokens", "repeats", "k"):
        if not 1 <= getattr(options, name) <= 1_000_000:
            raise PlanError(f"--{name} is {getattr(options, name)}, but 1 to 1000000 was expected")
    try:
        shlex.split(options.serve)
    except ValueError as error:
        raise PlanError(f"--serve can't be split into arguments: {error}") from None
    # Minutes of measuring come next: find out now whether the result can be written.
    if options.html is not None and (options.html.is_dir() or not options.html.absolute().parent.is_dir()):
        raise PlanError(f"--html {options.html}: no file can be written there")
    if options.log_dir is not None:
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanError(f"--log-dir {options.log_dir}: {error.strerror}") from None
    for url in (options.base_url, options.baseline_url, options.control_url):
        if url is not None:
            Client(url)


def _settings(options: argparse.Namespace) -> list[Setting]:
    if not 0 <= options.temperature <= 10:
        raise PlanError(f"--temperature is {options.temperature}, but 0 to 10 was expected")
    try:
        sweep = sorted({int(part) for part in options.concurrency.split(",")})
    except ValueError:
        raise PlanError(
            f"--concurrency is {options.concurrency[:40]!a}, but numbers such as 1,4,16 were expected"
        ) from None
    if sweep[0] < 1 or sweep[-1] > 4096:
        raise PlanError(f"--concurrency is {options.concurrency[:40]!a}, but 1 to 4096 was expected")
    temperatures = [0.0] if options.greedy_only or options.temperature == 0 else [0.0, options.temperature]
    base = Setting(tokens=options.tokens, repeats=options.repeats, ignore_eos=options.ignore_eos)
    return [replace(base, temperature=t, concurrency=c) for c in sweep for t in temperatures]


def _folder(name: str | None) -> Path | None:
    return Path(name) if name is not None and Path(name).exists() else None


def _clients(options: argparse.Namespace) -> Iterator[tuple[str, Client]]:
    """The servers to measure, one after another; an engine lives until the next one is asked for."""
    if options.base_url is not None:
        for name, url in (
            ("baseline", options.baseline_url),
            ("server", options.base_url),
            ("control", options.control_url),
        ):
            if url is not None:
                yield name, Client(url, options.model)
        return
    engines: list[tuple[str, str | None]] = [] if options.no_baseline or options.baseline else [("baseline", None)]
    engines.append(("drafter", options.drafter))
    if options.control is not None:
        engines.append(("control", options.control))
    with contextlib.ExitStack() as stack:
        logs = options.log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, drafter in engines:
            arguments = shlex.split(options.serve)
            if drafter is not None:
                config = {"method": "eagle3", "model": drafter, "num_speculative_tokens": options.k}
                arguments += ["--speculative-config", json.dumps(config)]
            with serve(options.target, arguments, logs / f"{name}.log", environment={}, progress=_progress) as url:
                yield name, Client(url, options.model)


def _earlier_baseline(path: Path, settings: Sequence[Setting]) -> list[Run]:
    """The baseline runs of an earlier result under the same settings."""
    data = read_object(path, 64 << 20, values=10_000_000)
    try:
        found = [
            Run("baseline", setting, [float(speed) for speed in run["tok_s_repeats"]], run["prompts"], Counters(), [])
            for setting in settings
            for run in data["runs"]
            if run["name"] == "baseline" and run["setting"] == setting.label and run["tok_s_repeats"]
        ]
    except (KeyError, TypeError, ValueError):
        raise PlanError(f"{path} is not what `vllm-kimi-eagle3 bench --json` prints") from None
    if not found:
        raise PlanError(f"{path} has no baseline run under {settings[0].label}")
    return found


def _speedups(runs: Sequence[Run]) -> list[float | None]:
    speeds = {run.setting: run.tok_s for run in runs if run.name == "baseline"}
    return [
        run.tok_s / speeds[run.setting] if run.name != "baseline" and speeds.get(run.setting) else None for run in runs
    ]


def _break_even(length: float | None, counters: Counters | None) -> dict[str, Any]:
    """What the break-even length means for acceptance, and which k is fastest; by arithmetic."""
    rates = (counters.per_position if counters is not None else None) or []
    # Counters are a server's word, and negative where it was started anew: rates that grow by position are none.
    falling = [1.0, *rates, 0.0]
    if length is None or length <= 0 or not rates or falling != sorted(falling, reverse=True):
        return {"break_even_acceptance": None, "best_k": None}
    of_drafts, each = (f(length, len(rates)) for f in (breakeven.accepted_for_length, breakeven.share_for_length))
    acceptance = None if of_drafts is None else {"of_drafts": of_drafts, "each": each}
    return {"break_even_acceptance": acceptance, "best_k": list(breakeven.best_ks(rates, length))}


def _pays(data: Mapping[str, Any]) -> str:
    if data["best_k"] is None:
        return ""
    share, (low, high) = data["break_even_acceptance"], data["best_k"]
    means = "which no acceptance reaches"
    if share is not None:
        means = f"{share['of_drafts']:.1%} of the drafts, {share['each']:.2f} of each after an accepted one"
    best = f"{low}" if low == high else f"{low} to {high}"
    return f", {means}; fastest k by these rates: {best}" + (" (0: no speculation)" if low == 0 else "")


def _same_text(runs: Sequence[Run], judged: str) -> list[int] | None:
    """How many greedy answers equal the baseline's, and of how many."""
    own = main_run(runs, judged)
    if own is None or own.setting.temperature != 0:
        return None
    base = next((run for run in runs if run.name == "baseline" and run.setting == own.setting and run.texts), None)
    if base is None:
        return None
    return [sum(a == b for a, b in zip(own.texts, base.texts, strict=True)), len(own.texts)]


def _positions(run: Mapping[str, Any]) -> str:
    if run["per_position"] is None:
        return "-"
    cumulative = " ".join(f"{share:.2f}" for share in run["per_position"])
    return f"{cumulative} ({' '.join(f'{share:.2f}' for share in run['conditional'])})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _columns(rows: Sequence[tuple[str, ...]], left: set[int]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _progress(line: str) -> None:
    """One line that overwrites itself, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
