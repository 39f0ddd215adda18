# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3 calibrate``: measure which layers the drafter was trained on, and remember it.

The target is run once, by vLLM or by the plain torch reference, and its streams are kept; the drafter alone is
repeated, on the torch reference. Nothing is written into a model folder; the record goes to the package's cache, where
servers and ``layers`` find it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kimi_eagle3 import __version__
from vllm_kimi_eagle3.bench.prompts import FIVE, read_prompts
from vllm_kimi_eagle3.bench.statistics import Share
from vllm_kimi_eagle3.calibrate import picture
from vllm_kimi_eagle3.calibrate.trials import Decision, Trial, decide, lay_out, rule_of
from vllm_kimi_eagle3.layers import AlignmentRecord, PlanError, alignment, default_boundaries, read_headers
from vllm_kimi_eagle3.layers.files import read_config
from vllm_kimi_eagle3.layers.parse import Target as TargetFacts
from vllm_kimi_eagle3.layers.parse import read_drafter, read_target
from vllm_kimi_eagle3.patching.release import installed_release
from vllm_kimi_eagle3.verify.start import parse, quiet_stdout, require_vllm, start

if TYPE_CHECKING:
    from vllm_kimi_eagle3.calibrate.texts import Written
    from vllm_kimi_eagle3.reference import Drafter, Target

SUMMARY = "Measure which layers the drafter was trained on, and remember it for servers."
EPILOG = (
    "Every other argument goes to vLLM, as for `vllm serve`: --tensor-parallel-size 8 and so on; the drafter's not."
)
SMALL = 1 << 30
"""Largest checkpoint, in bytes, that ``auto`` runs in plain torch."""
MEMORY_SHARE = 0.8
"""How much of the free memory a target's weights may take."""
MAX_STATES = 64
"""Longest list of ids: every state is shifted alone, and drafters read three to five."""


def add_parser(subparsers: Any) -> None:
    """Declare the command's options."""
    parser = subparsers.add_parser("calibrate", help=SUMMARY, description=SUMMARY, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--target", required=True, type=Path, metavar="DIR", help="folder of the target")
    parser.add_argument("--drafter", required=True, type=Path, metavar="DIR", help="folder of the drafter")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=".json or .jsonl of prompts (default: five)")
    parser.add_argument("--ids", type=Path, metavar="FILE", help="prompts as token ids, a JSON list of lists")
    parser.add_argument("--raw", action="store_true", help="leave the chat template out, for targets without one")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens to write a prompt (default 256)")
    parser.add_argument(
        "--temperature", type=float, default=0.6, metavar="T", help="each prompt is sampled, too; 0: not (default 0.6)"
    )
    parser.add_argument(
        "--states",
        choices=("auto", "engine", "reference"),
        default="auto",
        help="what runs the target: vLLM, with any argument of vllm serve besides, or plain torch in float32; auto:"
        " torch for unquantised targets up to 1 GiB, and where vLLM is missing",
    )
    parser.add_argument("--k", type=int, default=3, metavar="N", help="positions to predict for bench (default 3)")
    parser.add_argument("--no-record", action="store_true", help="measure and tell, but remember nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the hit rates (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, takes_rest=True)


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
    data = _measure(options, trials, facts)
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
            measured_on=f"vllm-kimi-eagle3 {__version__}, {data['ran_on']},"
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
    lines.append(
        f"measured on {covered['total']} tokens ({data['ran_on']}); {covered['rate']:.1%} of them can be drafted at all"
    )
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


def _measure(options: argparse.Namespace, trials: list[Trial], facts: TargetFacts) -> dict[str, Any]:
    """Everything that needs torch."""
    try:
        import torch

        from vllm_kimi_eagle3.calibrate import measure, texts
    except ImportError as error:
        raise PlanError(f"calibrate runs the drafter in torch, which can't be imported: {error}") from None
    on_engine = _on_engine(options)
    target = None if on_engine else _load_target(options.target)
    drafter = _load_drafter(options, target)
    if options.ids is not None:
        prompts = texts.read_ids(options.ids, target.vocab_size if target is not None else facts.vocab_size or 1 << 31)
    else:
        plain = [prompt.text for prompt in (read_prompts(options.prompts) if options.prompts else FIVE)]
        prompts = texts.encode(options.target, plain, chat=not options.raw)
    config = read_config(options.target)
    inner = config.get("text_config")
    stop = (inner if isinstance(inner, dict) else config).get("eos_token_id")
    settings: dict[str, Any] = {
        "temperature": options.temperature,
        "stop": frozenset(t for t in (stop if isinstance(stop, list) else [stop]) if isinstance(t, int)),
        "progress": _progress("the target writes"),
    }
    kept = measure.kept_streams(trials)
    with torch.inference_mode(), tempfile.TemporaryDirectory(prefix="vllm-kimi-eagle3-") as folder:
        if target is None:
            with quiet_stdout():
                written, ran_on = _write_on_engine(options, prompts, kept, Path(folder), settings)
        else:
            written = texts.write(target, prompts, options.tokens, kept, **settings)
            ran_on = "torch reference, float32"
        return {"ran_on": ran_on, **read(drafter, written, trials, options.k, _progress("the drafter reads"))}


def _on_engine(options: argparse.Namespace) -> bool:
    """Whether vLLM runs the target. ``auto``: where the torch reference can't, or would take long."""
    if options.states == "auto":
        quantised = "quantization_config" in json.dumps(read_config(options.target))
        small = _stored(options.target) <= SMALL and not quantised
        chosen = not small and importlib.util.find_spec("vllm") is not None
    else:
        chosen = options.states == "engine"
    if not chosen and options.rest:
        raise PlanError(
            f"{options.rest[0]} is no option of calibrate; arguments of vllm serve are taken with --states engine"
        )
    return chosen


def _write_on_engine(
    options: argparse.Namespace,
    prompts: Sequence[Sequence[int]],
    kept: set[int],
    folder: Path,
    settings: dict[str, Any],
) -> tuple[list[Written], str]:
    """The texts, and in words what ran the target."""
    require_vllm("calibrate --states engine")
    from vllm_kimi_eagle3.calibrate import engine as source

    longest = max(map(len, prompts)) + options.tokens + 1
    parsed = parse(str(options.target), options.rest, max(2048, longest))
    _check_arguments(parsed)
    engine = start(
        parsed,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        async_scheduling=False,
    )
    try:
        config = engine.vllm_config.model_config
        dtype = str(config.dtype).removeprefix("torch.")
        if dtype not in ("bfloat16", "float32"):
            raise PlanError(
                f"the engine runs in {dtype}, where vLLM scales what the drafter reads; give --dtype bfloat16"
            )
        if config.max_model_len < longest:
            raise PlanError(
                f"prompts and --tokens take {longest} tokens, but the engine's max_model_len is"
                f" {config.max_model_len}; give fewer --tokens or a larger --max-model-len"
            )
        written, device = source.write(engine, prompts, options.tokens, kept, folder, **settings)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(f"the engine ended while the target wrote: {_short(error)}") from None
    finally:
        engine.engine_core.shutdown()  # the drafter does not need the target's memory
    return written, f"vLLM {installed_release()}, {dtype}, {device}"


def _check_arguments(parsed: Any) -> None:
    """What of vLLM's arguments can't be, said before minutes of loading."""
    if getattr(parsed, "speculative_config", None) is not None:
        raise PlanError("--speculative-config is of no use here: calibrate runs the target without a drafter")
    if int(getattr(parsed, "pipeline_parallel_size", 1) or 1) > 1:
        raise PlanError("calibrate needs all layers in each process: use --tensor-parallel-size, no pipeline stages")
    if str(getattr(parsed, "dtype", "auto")) in ("float16", "half"):
        raise PlanError("in float16 vLLM scales what the drafter reads (D16); calibrate with --dtype bfloat16")


def read(
    drafter: Drafter,
    written: Sequence[Written],
    trials: Sequence[Trial],
    k: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """The drafter over what the target wrote: ``shares`` by trial, and what else ``to_json`` takes."""
    from vllm_kimi_eagle3.calibrate import measure

    guesses = measure.run_trials(drafter, written, trials, progress)
    best = max(guesses, key=lambda trial: guesses[trial].share.rate)
    return {
        "shares": {trial: found.share for trial, found in guesses.items()},
        "relabelled": _plain(measure.relabelled(guesses[best])),
        "coverage": _plain(measure.coverage(drafter, guesses[best])),
        "per_position": [_plain(share) for share in measure.simulate(drafter, written, best.boundaries, k)],
        "per_position_boundaries": list(best.boundaries),
    }


def _load_target(folder: Path) -> Target:
    import torch

    from vllm_kimi_eagle3.reference import Cache, Target

    _check_memory(folder)
    try:
        target = Target.load(folder)
        # Its first forward, too: a config may hold anything, and what reads it says so by whatever error it meets.
        with torch.inference_mode():
            target.forward([0, 0], Cache())
        return target
    except KeyError as error:
        raise PlanError(f"the target in {folder} lacks {error}, so it can't be run") from None
    except Exception as error:
        raise PlanError(f"the target can't be run by the torch reference: {_short(error)}") from None


def _load_drafter(options: argparse.Namespace, target: Target | None) -> Drafter:
    """The drafter, which runs on the torch reference wherever the target does."""
    import torch

    from vllm_kimi_eagle3.reference import Borrowed, Cache, Drafter

    tied = bool(read_config(options.target).get("tie_word_embeddings"))
    try:
        drafter = Drafter.load(options.drafter, target or Borrowed(options.target, tied=tied))
        # Minutes of writing come next: find out now whether every weight is there and fits.
        width = drafter.weights["fc.weight"].shape[1]
        drafter.forward([0, 0], drafter.combine_hidden_states(torch.zeros(2, width)), Cache())
        return drafter
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
    stored = _stored(folder)
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return
    if 2 * stored > MEMORY_SHARE * free:
        raise PlanError(
            f"the target's files take {stored / 2**30:.0f} GiB, twice that in float32, and {free / 2**30:.0f} GiB of"
            " memory are free; give --states engine, which runs it on vLLM, or calibrate on a machine that holds it"
        )


def _stored(folder: Path) -> int:
    """Bytes of weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


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
