# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3 calibrate``: measure which layers the drafter was trained on, and remember it.

Runs on the plain torch reference: no engine, float32, unquantised targets that fit into this machine's memory. Nothing
is written into a model folder; the record goes to the package's cache, where servers and ``layers`` find it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kimi_eagle3 import __version__
from vllm_kimi_eagle3.bench.prompts import FIVE, read_prompts
from vllm_kimi_eagle3.bench.statistics import Share
from vllm_kimi_eagle3.calibrate import picture
from vllm_kimi_eagle3.calibrate.trials import Decision, Trial, decide, lay_out, rule_of
from vllm_kimi_eagle3.layers import AlignmentRecord, PlanError, alignment, default_boundaries, read_headers
from vllm_kimi_eagle3.layers.files import read_config
from vllm_kimi_eagle3.layers.parse import read_drafter, read_target

if TYPE_CHECKING:
    from vllm_kimi_eagle3.reference import Drafter, Target

SUMMARY = "Measure which layers the drafter was trained on, and remember it for servers."
MEMORY_SHARE = 0.8
"""How much of the free memory a target's weights may take."""
MAX_STATES = 64
"""Longest list of ids: every state is shifted alone, and drafters read three to five."""


def add_parser(subparsers: Any) -> None:
    """Declare the command's options."""
    parser = subparsers.add_parser("calibrate", help=SUMMARY, description=SUMMARY)
    parser.add_argument("--target", required=True, type=Path, metavar="DIR", help="folder of the target")
    parser.add_argument("--drafter", required=True, type=Path, metavar="DIR", help="folder of the drafter")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=".json or .jsonl of prompts (default: five)")
    parser.add_argument("--ids", type=Path, metavar="FILE", help="prompts as token ids, a JSON list of lists")
    parser.add_argument("--raw", action="store_true", help="leave the chat template out, for targets without one")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens to write a prompt (default 256)")
    parser.add_argument(
        "--temperature", type=float, default=0.6, metavar="T", help="each prompt is sampled, too; 0: not (default 0.6)"
    )
    parser.add_argument("--k", type=int, default=3, metavar="N", help="positions to predict for bench (default 3)")
    parser.add_argument("--no-record", action="store_true", help="measure and tell, but remember nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the hit rates (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print. ``PlanError`` (bad input) passes through; the caller words it."""
    if options.picture is not None:
        picture.require()
    if not (1 <= options.tokens <= 1_000_000 and 1 <= options.k <= 64 and 0 <= options.temperature <= 10):
        raise PlanError("--tokens and --k must be at least 1 (k at most 64), --temperature 0 to 10")
    target_config, drafter_config = read_config(options.target), read_config(options.drafter)
    facts, draft = read_target(target_config), read_drafter(drafter_config)
    if not draft.use_aux_hidden_state:
        raise PlanError("the drafter takes no auxiliary hidden states, so there are no layers to calibrate")
    ids = draft.lists[0].ids if draft.lists else None
    base = ids if ids is not None else default_boundaries(facts.num_layers)
    if len(base) > MAX_STATES:
        raise PlanError(f"the drafter lists {len(base)} layer ids, but at most {MAX_STATES} can be measured")
    trials = lay_out(base, facts.num_layers)
    if not trials:
        raise PlanError(
            f"the ids {list(base)} are no ascending layers of a target of {facts.num_layers}, shifted or not"
        )
    _check_places(options)
    headers = read_headers(options.drafter if options.drafter.is_dir() else options.drafter.parent)
    data = _measure(options, trials)
    shares: dict[Trial, Share] = data.pop("shares")
    decision = decide(shares)
    record = None
    if decision.boundaries is not None:
        record = AlignmentRecord(
            key=alignment.content_key(target_config, drafter_config, headers) or "",
            ids=ids,
            num_layers=facts.num_layers,
            boundaries=decision.boundaries,
            rule=rule_of(ids, decision.boundaries),
            hit_rates={trial.name: share.rate for trial, share in shares.items() if trial.whole},
            intervals={trial.name: share.interval for trial, share in shares.items() if trial.whole},
            measured_on=f"vllm-kimi-eagle3 {__version__}, torch reference, float32,"
            f" {next(iter(shares.values())).total} tokens, {datetime.date.today().isoformat()}",
        )
    path = _remember(record) if record is not None and not options.no_record else None
    result = to_json(ids, shares, decision, record, path, data)
    if options.picture is not None:
        picture.draw(result, options.picture)
    print(json.dumps(result, indent=2) if options.json else text(result))
    return 0 if decision.boundaries is not None else 1


def to_json(
    ids: tuple[int, ...] | None,
    shares: dict[Trial, Share],
    decision: Decision,
    record: AlignmentRecord | None,
    path: Path | None,
    more: dict[str, Any],
) -> dict[str, Any]:
    """The result as plain data; shifts are against vLLM's reading of the ids as boundaries."""
    return {
        "rule": record.rule if record is not None else None,
        "decided": record is not None,
        "boundaries": list(record.boundaries) if record is not None else None,
        "ids": None if ids is None else list(ids),
        "hit_rates": {trial.name: share.rate for trial, share in shares.items() if trial.whole},
        "intervals": {trial.name: list(share.interval) for trial, share in shares.items() if trial.whole},
        "record": None if path is None else str(path),
        "trials": [
            {
                "name": trial.name,
                "boundaries": list(trial.boundaries),
                "hits": share.hits,
                "total": share.total,
                "rate": share.rate,
                "interval": list(share.interval),
            }
            for trial, share in shares.items()
        ],
        "sentence": decision.sentence,
        "needed_tokens": decision.needed,
        **more,
    }


def text(data: dict[str, Any]) -> str:
    """The result for a terminal, with a bar a trial."""
    lines = ["  shift  boundaries        right first tokens"]
    for trial in data["trials"]:
        low, high = trial["interval"]
        bar = "█" * round(30 * trial["rate"])
        mark = "  <- best" if trial["boundaries"] == data["boundaries"] else ""
        numbers = f"{trial['rate']:6.1%} ({low:.1%} to {high:.1%})"
        lines.append(f"  {trial['name']:>5}  {', '.join(map(str, trial['boundaries'])):16}  {numbers:26} {bar}{mark}")
    lines.append("")
    covered = data["coverage"]
    lines.append(f"measured on {covered['total']} tokens; {covered['rate']:.1%} of them can be drafted at all")
    learnt = data["relabelled"]
    best = max(trial["rate"] for trial in data["trials"])
    if learnt["rate"] > best + 0.15:
        lines.append(
            f"warning: with a vocabulary mapping learnt from the text {learnt['rate']:.1%} would be right: d2t is wrong"
        )
    elif data["decided"] and best < 0.3:
        lines.append("warning: even the best is poor; this drafter hardly fits the target, whatever the layers")
    if data["decided"]:
        rule = f"the {data['rule']} rule" if data["rule"] else "neither rule, but measured"
        lines.append(f"decided: boundaries {tuple(data['boundaries'])}, by {rule}")
        lines.append(f"remembered in {data['record']}" if data["record"] else "not remembered")
    else:
        lines.append(f"not decided: {data['sentence']}")
        if data["needed_tokens"]:
            lines.append(
                f"next: calibrate with more text, by more --prompts or --tokens, {data['needed_tokens']} in all"
            )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------


def _measure(options: argparse.Namespace, trials: list[Trial]) -> dict[str, Any]:
    """Everything that needs torch."""
    try:
        import torch

        from vllm_kimi_eagle3.calibrate import measure, texts
    except ImportError as error:
        raise PlanError(f"calibrate runs the models in torch, which can't be imported: {error}") from None
    target, drafter = _load(options)
    if options.ids is not None:
        prompts = texts.read_ids(options.ids, target.vocab_size)
    else:
        plain = [prompt.text for prompt in (read_prompts(options.prompts) if options.prompts else FIVE)]
        prompts = texts.encode(options.target, plain, chat=not options.raw)
    stop = target.config.get("eos_token_id")
    stops = frozenset(token for token in (stop if isinstance(stop, list) else [stop]) if isinstance(token, int))
    with torch.inference_mode():
        written = texts.write(
            target,
            prompts,
            options.tokens,
            measure.kept_streams(trials),
            temperature=options.temperature,
            stop=stops,
            progress=_progress("the target writes"),
        )
        guesses = measure.run_trials(drafter, written, trials, _progress("the drafter reads"))
        best = max(guesses, key=lambda trial: guesses[trial].share.rate)
        positions = measure.simulate(drafter, written, best.boundaries, options.k)
        learnt, covered = measure.relabelled(guesses[best]), measure.coverage(drafter, guesses[best])
    return {
        "shares": {trial: found.share for trial, found in guesses.items()},
        "relabelled": _plain(learnt),
        "coverage": _plain(covered),
        "per_position": [_plain(share) for share in positions],
    }


def _load(options: argparse.Namespace) -> tuple[Target, Drafter]:
    import torch

    from vllm_kimi_eagle3.reference import Cache, Drafter, Target

    _check_memory(options.target)
    try:
        target = Target.load(options.target)
        # Its first forward, too: a config may hold anything, and what reads it says so by whatever error it meets.
        with torch.inference_mode():
            target.forward([0, 0], Cache())
    except KeyError as error:
        raise PlanError(f"the target in {options.target} lacks {error}, so it can't be run") from None
    except Exception as error:
        raise PlanError(f"the target can't be run by the torch reference: {_short(error)}") from None
    try:
        drafter = Drafter.load(options.drafter, target)
        # Minutes of writing come next: find out now whether every weight is there and fits.
        width = drafter.weights["fc.weight"].shape[1]
        drafter.forward([0, 0], drafter.combine_hidden_states(torch.zeros(2, width)), Cache())
        return target, drafter
    except KeyError as error:
        raise PlanError(f"the drafter in {options.drafter} lacks {error}, so it can't be run") from None
    except Exception as error:
        raise PlanError(f"the drafter can't be run by the torch reference: {_short(error)}") from None


def _short(error: Exception) -> str:
    """An error in one line; what is not a sentence by itself gets its name."""
    words = " ".join(str(error).split())[:300]
    return words if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {words}"


def _check_places(options: argparse.Namespace) -> None:
    """Minutes of measuring come next: find out now whether what they give can be written."""
    if options.picture is not None and not options.picture.absolute().parent.is_dir():
        raise PlanError(f"--picture {options.picture}: its folder does not exist")
    if options.no_record:
        return
    place = alignment.cache_folder() / "alignment"
    try:
        nearest = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        why = None if nearest.is_dir() else "Not a directory"
        if why is None and not os.access(nearest, os.W_OK | os.X_OK):
            why = "Permission denied"
    except OSError as error:
        why = error.strerror
    if why is not None:
        raise PlanError(_unwritable(place, why))


def _unwritable(place: Path, why: str | None) -> str:
    return (
        f"the record can't be written below {place}: {why}; set VLLM_KIMI_EAGLE3_CACHE to a folder of yours, or pass"
        " --no-record"
    )


def _check_memory(folder: Path) -> None:
    """Say before the machine is out of memory that it would be. float32 takes twice what a bfloat16 file does."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return
    if 2 * stored > MEMORY_SHARE * free:
        raise PlanError(
            f"the target's files take {stored / 2**30:.0f} GiB, twice that in float32, and {free / 2**30:.0f} GiB of"
            " memory are free; calibrate on a machine that holds it"
        )


def _remember(record: AlignmentRecord) -> Path | None:
    if not record.key:
        return None
    try:
        return alignment.save(record)
    except OSError as error:
        raise PlanError(_unwritable(alignment.cache_folder(), error.strerror)) from None


def _plain(share: Share) -> dict[str, Any]:
    return {"hits": share.hits, "total": share.total, "rate": share.rate, "interval": list(share.interval)}


def _progress(what: str) -> Any:
    """A bar on one line, on a terminal only."""

    def show(done: int, of: int) -> None:
        if sys.stderr.isatty():
            bar = "#" * round(30 * done / max(of, 1))
            end = "\r\033[K" if done == of else ""
            print(f"\r{what:20} [{bar:30}] {done}/{of}{end}", end="", file=sys.stderr, flush=True)

    return show
