# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3 verify``: does the drafter get the states it should, on this model and this machine?

Starts an engine as ``vllm serve`` would with the same arguments, lets a few requests join and leave, records what the
drafter is given in every step, and compares that row by row with a reference. Extra memory is bounded: rows are fetched
after each step and kept for the requests of one run only, and the reference holds one layer at a time once the model is
larger than it may hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kimi_eagle3 import __version__
from vllm_kimi_eagle3.layers import PlanError, read_headers
from vllm_kimi_eagle3.layers.files import load_json, read_bytes, read_config, require_model
from vllm_kimi_eagle3.layers.parse import read_drafter, read_target
from vllm_kimi_eagle3.patching.release import installed_release
from vllm_kimi_eagle3.verify.start import parse, quiet_stdout, require_vllm, start

if TYPE_CHECKING:
    import torch

    from vllm_kimi_eagle3.verify.compare import Comparison
    from vllm_kimi_eagle3.verify.drive import Driver, Request, Served
    from vllm_kimi_eagle3.verify.oracle import Oracle
    from vllm_kimi_eagle3.verify.report import Facts

SUMMARY = "Compare what the drafter is given, in every situation, with a reference."
EPILOG = "Every other argument goes to vLLM, as for `vllm serve`: --tensor-parallel-size 8 --dtype bfloat16 and so on."

TEXTS = (
    "The harbour lay quiet under a thin mist. Two boats had left before dawn, and the third was being loaded when",
    "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] <= right[0]:\n",
    "Question: A train leaves at 9:40 and arrives at 12:05. How long is the journey? Answer: The journey takes",
    "The committee met on Tuesday to discuss the budget. After a long debate, it was decided that the library, the"
    " swimming pool and the two parks would be kept open, that the car park would be closed, and that",
    "1, 2, 3, 4, 5, 6, 7,",
    "Dear Mr Brown,\n\nThank you for your letter of 3 May. I am writing to confirm",
)
HF_BYTES = 8 << 30
"""Largest target for which ``auto`` computes a reference from the checkpoint: beyond it a CPU takes too long."""
WHOLE_BYTES = 128 << 20
"""Largest checkpoint that is held whole, converted to float32 (and once more in its own dtype)."""
MAX_PROMPTS = 64 << 20
"""Largest file of prompts."""
ROW_BYTES = 256 << 20
"""Most memory for recorded rows."""


def add_parser(subparsers: Any) -> None:
    """Declare the command's options."""
    parser = subparsers.add_parser("verify", help=SUMMARY, description=SUMMARY, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--target", required=True, metavar="MODEL", help="the target: a folder, or a name vLLM knows")
    parser.add_argument("--drafter", required=True, metavar="MODEL", help="the drafter")
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=3, metavar="K", help="drafts a step (default: %(default)s)"
    )
    parser.add_argument(
        "--reference",
        choices=("auto", "hf", "self"),
        default="auto",
        help="hf: computed from the checkpoints; self: the engine's own prefill; auto: hf where it is feasible",
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a prompt a line, or a JSON list of texts or lists of token ids"
    )
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens a request (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="largest relative error (default: by dtype)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a page with the picture")
    parser.set_defaults(run=run, takes_rest=True)


def run(options: argparse.Namespace) -> int:
    """Start, observe, compare, report: 0 if nothing differs, 1 if anything does.

    Raises:
        PlanError: anything that keeps the comparison from being made; the caller words it and exits with 2.
    """
    _check(options)
    with quiet_stdout() as say:
        facts, comparison = _verify(options)
        from vllm_kimi_eagle3.verify import report

        if options.report is not None:
            try:
                options.report.write_text(report.html(facts, comparison), encoding="utf-8")
            except OSError as error:
                raise PlanError(f"{options.report}: {error.strerror}") from None
        if options.json:
            say(json.dumps(report.to_json(facts, comparison), indent=2))
        else:
            say(report.block(facts, comparison))
    return 0 if comparison.ok else 1


def _check(options: argparse.Namespace) -> None:
    """What can be said before an engine is started."""
    for name, value in (("--target", options.target), ("--drafter", options.drafter)):
        require_model(name, value)
        if Path(value).exists():
            config = read_config(Path(value))
            if name == "--target":
                read_target(config)
            elif Path(value).is_dir():
                read_drafter(config)
                read_headers(Path(value))
    for name, number in (("--num-speculative-tokens", options.num_speculative_tokens), ("--tokens", options.tokens)):
        if number < 1:
            raise PlanError(f"{name} is {number}; at least 1 was expected")
    if options.tolerance is not None and not options.tolerance > 0:
        raise PlanError(f"--tolerance is {options.tolerance}; a number above 0 was expected")
    if options.prompts is not None and not options.prompts.is_file():
        raise PlanError(f"--prompts {options.prompts}: no such file")
    if options.report is not None and not options.report.absolute().parent.is_dir():
        raise PlanError(f"--report {options.report}: its folder does not exist")
    if options.report is not None and options.report.is_dir():
        raise PlanError(f"--report {options.report} is a folder")
    if options.reference == "hf" and not (Path(options.target).is_dir() and Path(options.drafter).is_dir()):
        raise PlanError("--reference hf reads the checkpoints itself, so --target and --drafter must be folders")


def _verify(options: argparse.Namespace) -> tuple[Facts, Comparison]:
    require_vllm("verify")
    import torch

    from vllm_kimi_eagle3 import activation
    from vllm_kimi_eagle3.verify.compare import FLIPPED, compare, times
    from vllm_kimi_eagle3.verify.drive import CaptureError, Driver
    from vllm_kimi_eagle3.verify.report import Facts

    engine = _engine(options)
    config = engine.vllm_config
    if activation.target_architecture(config.model_config) is None:
        found = getattr(config.model_config.hf_config, "architectures", None)
        raise PlanError(
            f"--target {options.target} is {found}; verify knows {' and '.join(sorted(activation.TARGETS))}"
        )
    record: dict[str, Any] = dict(config.additional_config.get(activation.RECORD, {}))
    plan: dict[str, Any] = record.get("plan") or activation.make_plan(config, record).to_json()
    boundaries: list[int] = list(plan["boundaries"])
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    max_model_len: int = config.model_config.max_model_len
    prompts = _prompts(options, engine, max_model_len)
    try:
        driver = Driver(engine)
        cache = _cache(options, dtype, driver)
        chosen, oracle = _reference(options, boundaries, dtype, cache, driver)
        bar = options.tolerance
        if cache is not None and bar is None and chosen == "self":
            bar = FLIPPED  # a prefill attends to what is not rounded yet
        median_times, draft_times = times(cache is not None, latents=driver.info["mla"])
        served = _serve(options, driver, prompts, config)
        # The rows of whole requests are held from here on; `self` asks the engine once more for each.
        comparison = compare(
            served,
            oracle,
            boundaries,
            dtype=dtype,
            block_size=config.cache_config.block_size,
            max_model_len=max_model_len,
            bar=bar,
            median_times=median_times,
            draft_times=draft_times,
            progress=lambda done: _progress("compared", done, len(served)),
        )
        captured = driver.info["captured"]
        if captured is not None and sorted(captured) != boundaries:
            comparison.problems.insert(
                0, f"the model captures boundaries {captured}, but the drafter was trained on {boundaries}"
            )
        driver.close()
    except CaptureError as error:
        raise PlanError(str(error)) from None
    verifying = [c for s in served for c in s.calls if c.positions[0] >= len(s.prompt_ids) and c.scheduled > 1]
    return Facts(
        version=__version__,
        vllm=installed_release() or "of unknown release",
        torch=torch.__version__,
        runner=driver.info["runner"],
        device=driver.info["device"],
        ranks=driver.info["ranks"],
        dtype=dtype,
        target=str(activation.target_architecture(config.model_config)),
        drafter=driver.info["drafter"],
        k=options.num_speculative_tokens,
        rule=plan["rule"],
        decided_by=plan["decided_by"],
        boundaries=boundaries,
        captured=captured,
        reference=chosen,
        requests=len(served),
        tokens=sum(len(s.prompt_ids) + len(s.output_ids) for s in served),
        accepted_per_step=sum(len(c.positions) - 1 for c in verifying) / max(1, len(verifying)),
        overlay=activation.mode(),
        warnings=list(plan.get("warnings", ())),
    ), comparison


def _engine(options: argparse.Namespace) -> Any:
    """An engine with the user's arguments, and the drafter.

    Raises:
        PlanError: vLLM does not know an argument, or does not start.
    """
    parsed = parse(options.target, options.rest)
    given: Any = getattr(parsed, "speculative_config", None) or {}
    if not isinstance(given, dict):
        raise PlanError("--speculative-config is no JSON object")
    speculative: dict[str, Any] = dict(given)
    if speculative.get("method", "eagle3") != "eagle3":
        raise PlanError(f"--speculative-config names method {speculative['method']!r}; verify is for eagle3")
    speculative.setdefault("num_speculative_tokens", options.num_speculative_tokens)
    options.num_speculative_tokens = speculative["num_speculative_tokens"]
    return start(parsed, speculative_config={**speculative, "method": "eagle3", "model": options.drafter})


def _prompts(options: argparse.Namespace, engine: Any, max_model_len: int) -> list[list[int]]:
    """Prompts as token ids, short enough for the tokens that follow."""
    texts: list[Any] = list(TEXTS)
    if options.prompts is not None:
        try:
            content = read_bytes(options.prompts, MAX_PROMPTS).decode("utf-8")
        except UnicodeDecodeError:
            raise PlanError(f"--prompts {options.prompts} is not UTF-8 text") from None
        listed: Any = (
            load_json(content.encode(), str(options.prompts), MAX_PROMPTS) if content.lstrip().startswith("[") else None
        )
        texts = content.splitlines() if listed is None else listed
    vocabulary = int(engine.vllm_config.model_config.get_vocab_size())
    room = max_model_len - options.tokens - options.num_speculative_tokens - 2
    if room < 1:
        raise PlanError(f"--tokens {options.tokens} leaves no room for a prompt in --max-model-len {max_model_len}")
    prompts: list[list[int]] = []
    for item in texts:
        ids = item if isinstance(item, list) else _encode(engine, item)
        if not ids or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
            if item == "":
                continue
            raise PlanError(f"--prompts: {str(item)[:60]!a} is neither a text nor a list of ids below {vocabulary}")
        prompts.append(ids[-room:])
    if not prompts:
        raise PlanError(f"--prompts {options.prompts}: no prompt in it")
    return prompts


def _encode(engine: Any, text: Any) -> list[int]:
    tokenizer = engine.get_tokenizer() if hasattr(engine, "get_tokenizer") else engine.tokenizer
    if tokenizer is None:
        raise PlanError("the engine has no tokenizer; give --prompts a JSON list of lists of token ids")
    return list(tokenizer.encode(text)) if isinstance(text, str) else []


def _reference(
    options: argparse.Namespace, boundaries: list[int], dtype: str, cache: torch.dtype | None, driver: Driver
) -> tuple[str, Oracle]:
    """The reference asked for, or the best that is feasible."""
    import torch

    from vllm_kimi_eagle3.verify.oracle import CheckpointOracle, PrefillOracle

    if options.reference != "self":
        target, drafter = Path(options.target), Path(options.drafter)
        size, drafter_size = _weights(target), _weights(drafter)
        feasible = target.is_dir() and drafter.is_dir() and size <= HF_BYTES
        if options.reference == "hf" or feasible:
            lazy = size > WHOLE_BYTES
            check_drafts = drafter if drafter_size <= WHOLE_BYTES and not lazy else None
            try:
                return "hf", CheckpointOracle(
                    target,
                    check_drafts,
                    boundaries,
                    getattr(torch, dtype),
                    lazy=lazy,
                    cache_dtype=cache,
                    latent_cache=driver.info["mla"],
                )
            except (ValueError, KeyError, OSError) as error:
                if options.reference == "hf":
                    raise PlanError(f"--reference hf: {error}") from None
                print(f"no reference from the checkpoints, the engine's own prefill instead: {error}", file=sys.stderr)
    return "self", PrefillOracle(driver)


def _cache(options: argparse.Namespace, dtype: str, driver: Driver) -> torch.dtype | None:
    """What the engine's KV cache rounds to beyond ``dtype``; its worker knows, since a checkpoint may ask for fp8."""
    from vllm_kimi_eagle3.verify.oracle import cache_dtype

    try:
        return cache_dtype(driver.info["cache_dtype"], dtype)
    except ValueError as error:
        if options.tolerance is not None:
            return None  # whoever gives a bar knows what this cache costs
        raise PlanError(f"{error}; verify without --kv-cache-dtype, or give --tolerance") from None


def _weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def _serve(options: argparse.Namespace, driver: Driver, prompts: list[list[int]], config: Any) -> list[Served]:
    """Requests that join running ones and leave them, one alone, and one again where its prefix is cached."""
    from vllm_kimi_eagle3.verify.drive import Request

    joining = [Request(p, max(1, options.tokens - 3 * i), joins_at=2 * i) for i, p in enumerate(prompts)]
    rounds: list[list[Request]] = [joining, [Request(max(prompts, key=len), options.tokens)]]
    if config.cache_config.enable_prefix_caching:
        rounds.append(rounds[1])
    width = int(config.model_config.get_hidden_size()) * 4 * 3
    tokens = sum(len(r.prompt_ids) + r.max_tokens for requests in rounds for r in requests)
    if tokens * width > ROW_BYTES:
        raise PlanError(
            f"the rows of {tokens} tokens would take {tokens * width >> 20} MiB; give fewer or shorter --prompts"
        )
    served: list[Served] = []
    total = sum(map(len, rounds))
    for requests in rounds:
        done = len(served)
        served += driver.run(requests, lambda ended, done=done: _progress("served", done + ended, total))
    return served


def _progress(word: str, done: int, total: int) -> None:
    """A bar on stderr; a line each where that is no terminal."""
    filled = 30 * done // max(1, total)
    end = "\n" if done >= total or not sys.stderr.isatty() else ""
    start = "\r" if sys.stderr.isatty() else ""
    print(f"{start}[{'#' * filled}{'.' * (30 - filled)}] {word} {done}/{total}", end=end, file=sys.stderr, flush=True)
