# SPDX-License-Identifier: Apache-2.0
"""What a speculative step costs on one GPU: random weights of the right shapes, no download, no tokenizer.

    python bench/gpu/throughput.py --mode context --variant none|stock|overlay --out A.json [--seconds 90]
    python bench/gpu/throughput.py --mode share   --variant none|stock|overlay --out B.json [--seconds 150]
    python bench/gpu/throughput.py --mode cost --out C.json [--seconds 150]
    python bench/gpu/throughput.py --report A.json B.json C.json ...

``none`` is without speculation, ``stock`` EAGLE-3 with the overlay off, ``overlay`` with it on. One engine a process,
in this process, on the GPU that ``CUDA_VISIBLE_DEVICES`` names; the release is the one that is installed.

``context``: one request at 512, 8,000 and 30,000 tokens on a DeepSeek-V3 of 16 layers, hidden size 2048, 16 heads.
``share``: what one of Kimi-K2.5's eight tensor-parallel ranks holds of a layer and of the vocabulary, without the
other ranks' traffic, in as many layers as fit beside the cache of the largest cell; drafts are accepted at the rates of
``--acceptance`` by vLLM's own synthetic rejection (0.20.0 and later).
``cost``: stock capture against the overlay, two engines on one GPU that take turns, with a control that is 5 % slower.
``--profile`` adds where a step's time goes; ``--tiny`` runs small shapes on the CPU, to try the script.

A step is the time between two calls of ``LLMEngine.step`` that bring tokens, while all requests decode. The MLA backend
is TRITON_MLA, full CUDA graphs for decode (FULL_DECODE_ONLY), torch.compile as in a server, bf16, greedy.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fcntl
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent))

import throughput_report
from campaign import command, count, counts, duration, need_gpus, result_file, write
from shapes import ROOM, Shape, Unfit, fit, shape_of
from step_profile import profile_steps

from vllm_kimi_eagle3.patching.release import installed_release

WARM = 10
CELL_SECONDS = 9.0
"""A slow cell stops earlier."""


class OutOfTime(Exception):
    """--seconds have passed."""


def engine_arguments(shape: Shape, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Arguments of ``LLM``; the pair's configurations are written to ``folder``."""
    for name, config in (("target", shape.target), ("drafter", shape.drafter)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    arguments: dict[str, Any] = {
        "model": str(folder / "target"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "dtype": "float32" if options.tiny else "bfloat16",
        "max_model_len": max(shape.contexts) + ROOM,
        "max_num_seqs": max(4, *shape.concurrency),
        "enforce_eager": options.tiny,
    }
    if not options.tiny:
        sizes = sorted({n * tokens for n in (1, 2, 4, *shape.concurrency) for tokens in (1, options.k + 1)})
        arguments |= {
            "max_num_batched_tokens": 8192,
            # A cache of a given size, so that nothing is profiled and two engines may start at once.
            "kv_cache_memory_bytes": shape.cache_bytes(shape.target["num_hidden_layers"]),
            "gpu_memory_utilization": 0.9 if options.mode == "share" else 0.05,
            "compilation_config": {
                "cudagraph_mode": options.graphs,
                "cudagraph_capture_sizes": sizes,
                **({"mode": 0} if options.no_compile else {}),
            },
        }
        if options.backend != "default":
            arguments["attention_config"] = {"backend": options.backend}
    if options.variant != "none":
        arguments["speculative_config"] = speculation(options, folder)
    return arguments


def speculation(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The speculative configuration, in the keys that this release has."""
    from vllm.config import SpeculativeConfig

    config: dict[str, Any] = {
        "method": "eagle3",
        "model": str(folder / "drafter"),
        "num_speculative_tokens": options.k,
    }
    if options.drafter_backend:
        config["attention_backend"] = options.drafter_backend
    known = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    # vLLM's CPU sampler has no synthetic acceptance.
    if options.mode == "share" and not options.tiny and "synthetic_acceptance_rates" in known:
        rates = (options.acceptance + options.acceptance[-1:] * options.k)[: options.k]
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return config


class Engine:
    """The installed vLLM on random weights, in this process.

    Args:
        arguments: of ``LLM``.
        seed: of prompts and of the output layers.
    """

    def __init__(self, arguments: dict[str, Any], seed: int = 1) -> None:
        from vllm import LLM

        self.llm: Any = LLM(**arguments)
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.runner: Any = core.model_executor.driver_worker.worker.model_runner
        self.seed, self._names = seed, 0
        self.vocabulary = self.engine.model_config.get_vocab_size()
        self.slower = 0.0  # share of each step to waste, the control of `cost`
        self._unlike_embeddings()

    @property
    def drafter(self) -> Any:
        """V1's proposer or V2's speculator; None without speculation."""
        return getattr(self.runner, "drafter", None) or getattr(self.runner, "speculator", None)

    def _unlike_embeddings(self) -> None:
        """New output layers: vLLM's dummy weights repeat by size, so each token would be followed by itself.

        All requests would then route every draft to the experts of the token before, and verifying were too cheap.
        """
        import torch

        done: set[int] = set()
        for place, model in enumerate((self.runner.model, getattr(self.drafter, "model", None))):
            for name, parameter in [] if model is None else model.named_parameters():
                if "lm_head" in name and parameter.is_floating_point() and parameter.data_ptr() not in done:
                    done.add(parameter.data_ptr())
                    generator = torch.Generator(parameter.device).manual_seed(self.seed + place)
                    with torch.no_grad():
                        parameter.uniform_(-1e-3, 1e-3, generator=generator)

    def prompt(self, number: int, length: int) -> list[int]:
        """The same random tokens for the same number; a shorter prompt begins a longer one, for the prefix cache."""
        draw = random.Random(1000 * self.seed + number)
        return [draw.randrange(self.vocabulary) for _ in range(length)]

    def counters(self) -> dict[str, list[int]]:
        """vLLM's counters of speculation, by what follows ``spec_decode_`` in their names."""
        found = {m.name.split("spec_decode_")[1]: m for m in self.llm.get_metrics() if "spec_decode_" in m.name}
        return {n: [int(v) for v in (m.values if hasattr(m, "values") else [m.value])] for n, m in found.items()}

    def step(self) -> tuple[float, list[int], bool]:
        """Seconds until ``LLMEngine.step`` brings tokens, those, and whether a request has ended.

        With asynchronous scheduling the first call only fills the pipeline, and brings none.
        """
        began = time.perf_counter()
        while not (outputs := self.engine.step()) and self.engine.has_unfinished_requests():
            pass
        if self.slower:
            until = time.perf_counter() + self.slower * (time.perf_counter() - began)
            while time.perf_counter() < until:
                pass
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        return time.perf_counter() - began, tokens, any(output.finished for output in outputs)

    @contextmanager
    def requests(self, concurrency: int, context: int, room: int = ROOM) -> Generator[None]:
        """Requests that all decode, the prompts read and the first steps done; aborted at the end."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0, max_tokens=room, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        names = [f"r{self._names + i}" for i in range(concurrency)]
        self._names += concurrency
        for number, name in enumerate(names):
            self.engine.add_request(name, {"prompt_token_ids": self.prompt(number, context)}, parameters)
        waiting = set(range(concurrency))
        try:
            while waiting:
                for output in self.engine.step():
                    # vLLM may append to the names that it is given.
                    waiting.discard(int(output.request_id.partition("-")[0][1:]) - self._names + concurrency)
            for _ in range(WARM):
                self.step()
            yield
        finally:
            self.engine.abort_request(names)
            while self.engine.has_unfinished_requests():
                self.engine.step()
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for the GPU, so that nothing of these steps is left in the next ones'."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def measure(
    engine: Engine, concurrency: int, context: int, steps: int, until: float, *, profile: bool = False
) -> dict[str, Any]:
    """One cell: ``steps`` decode steps, fewer when ``CELL_SECONDS`` pass or ``until`` (monotonic) is reached.

    Returns:
        Steps, their times in ms, tokens, seconds, tok/s, and what was accepted.
    """
    began = time.monotonic()
    with engine.requests(concurrency, context):
        prefill = time.monotonic() - began
        before, times, tokens = engine.counters(), [], []
        until = min(until, time.monotonic() + CELL_SECONDS)
        ended, start = False, time.perf_counter()
        while len(times) < steps and not ended and time.monotonic() < until:
            _, brought, ended = engine.step()
            tokens += brought
            times.append(time.perf_counter())
        counters = {n: [a - b for a, b in zip(now, before[n], strict=True)] for n, now in engine.counters().items()}
        profiled = profile_steps(engine.runner, engine.step) if profile and not ended else None
    if not times:
        raise OutOfTime
    seconds = times[-1] - start
    spans = [1000 * (b - a) for a, b in zip([start, *times], times, strict=False)]
    cell: dict[str, Any] = {
        "context": context,
        "concurrency": concurrency,
        "steps": len(spans),
        "step_ms": _quartiles(spans),
        "tokens": len(tokens),
        "seconds": seconds,
        "tok_s": len(tokens) / seconds,
        "distinct_tokens": len(set(tokens)),
        "prefill_seconds": round(prefill, 1),
        "ended_early": ended,
    }
    if counters:
        (drafts,), accepted = counters["num_drafts"], counters["num_accepted_tokens_per_pos"]
        cell |= {"drafts": drafts, "accepted_by_position": accepted}
        cell["acceptance_length"] = 1 + sum(accepted) / drafts if drafts else None
    if profiled is not None:
        cell["profile"] = profiled
    return cell


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "mean": statistics.fmean(values)}


def say(line: str) -> None:
    """Progress."""
    print(line, flush=True)


def line_of(cell: dict[str, Any]) -> str:
    """A cell for the terminal."""
    step = cell["step_ms"]
    length = f", {cell['acceptance_length']:.2f} tokens a verify step" if cell.get("acceptance_length") else ""
    return (
        f"context {cell['context']}, concurrency {cell['concurrency']}: {step['median']:.2f} ms a step "
        f"({step['q1']:.2f} to {step['q3']:.2f}, {cell['steps']} steps), {cell['tok_s']:.1f} tok/s{length}"
    )


def header(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """What a result says of itself."""
    import torch

    on_gpu = torch.cuda.is_available() and not options.tiny
    return {
        "format": throughput_report.FORMAT,
        "mode": options.mode,
        "variant": options.variant,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
        "vllm": installed_release(),
        "torch": torch.__version__,
        "command": command("throughput.py"),
        "settings": {
            "tiny": options.tiny,
            "about": shape.about,
            "layers": shape.target["num_hidden_layers"],
            "k": None if options.variant == "none" else options.k,
            "acceptance": options.acceptance if options.mode == "share" else None,
            "backend": options.backend,
            "drafter_backend": options.drafter_backend,
            "graphs": "none" if options.tiny else options.graphs,
            "compile": not options.tiny and not options.no_compile,
            "runner": options.runner,
        },
        "cells": [],
        "not_run": [],
    }


def prepare(options: argparse.Namespace) -> Shape:
    """The environment of the engine, and the pair that fits the GPU. Before vLLM is imported.

    Raises:
        Unfit: there is no such pair.
    """
    off = "stock" if options.tiny else "off"  # vLLM's CPU engine does not run these targets as it is
    os.environ["VLLM_KIMI_EAGLE3"] = "on" if options.variant == "overlay" else off
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if options.runner != "default":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(options.runner == "V2"))
    if options.tiny:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    shape = shape_of(options.mode, options.tiny)
    shape.contexts = options.contexts or shape.contexts
    shape.concurrency = options.concurrency or shape.concurrency
    free = None
    if options.mode == "share" and not options.tiny:
        import torch

        free = torch.cuda.mem_get_info()[0]
    fit(shape, options.layers, free)
    return shape


PATIENCE = 90.0
"""Seconds to wait for others that were to start at the same time."""


_TURN: list[TextIO] = []


def take_turn(meet: Path, parties: int, name: str) -> None:
    """Wait until as many runs as ``parties`` have started, then for this one's turn; it ends with this process.

    Runs that are small enough for one GPU start side by side, which takes most of their time; none of them starts, or
    goes, while another one measures.
    """
    arrive(meet, name)
    until = time.monotonic() + PATIENCE
    while len(list(meet.glob("*.here"))) < parties and time.monotonic() < until:
        time.sleep(0.2)
    _TURN.append((meet / "turn").open("w"))
    fcntl.flock(_TURN[0], fcntl.LOCK_EX)


def arrive(meet: Path, name: str) -> None:
    """Say that this run has started, or never will."""
    meet.mkdir(parents=True, exist_ok=True)
    (meet / f"{name}.here").touch()


def run_cells(options: argparse.Namespace, started: float) -> int:
    """``context`` and ``share``: one engine, cell by cell, written after each."""
    shape = prepare(options)
    # The bars are of single requests: those come first, and longer batches find most of their prompts in the cache.
    cells = [(concurrency, context) for concurrency in shape.concurrency for context in shape.contexts]
    report = header(options, shape)
    report["not_run"] = [list(cell) for cell in cells]
    until = started + options.seconds
    _alarm(options.seconds + 5)
    try:
        with tempfile.TemporaryDirectory() as folder:
            arguments = engine_arguments(shape, options, Path(folder))
            report["engine"] = {n: v for n, v in arguments.items() if n not in ("model", "speculative_config")}
            report["speculative"] = {n: v for n, v in arguments.get("speculative_config", {}).items() if n != "model"}
            report["synthetic"] = "rejection_sample_method" in report["speculative"]
            engine = Engine(arguments)
            report["start_seconds"] = round(time.monotonic() - started, 1)
            report["runner"] = type(engine.runner).__module__
            say(f"{report['vllm']} {options.variant}: started in {report['start_seconds']} s, {shape.about}")
            if options.meet is not None:
                take_turn(options.meet, options.parties, options.out.name)
            for concurrency, context in cells:
                if time.monotonic() > until:
                    break
                steps = options.steps or shape.steps.get(concurrency, 60)
                cell = measure(engine, concurrency, context, steps, until, profile=options.profile)
                report["cells"].append(cell)
                report["not_run"].remove([concurrency, context])
                say(line_of(cell))
                if "profile" in cell:
                    say(throughput_report.profile_table(cell["profile"]))
                write(options.out, report)
    except OutOfTime:
        _silence()
        if options.meet is not None:
            arrive(options.meet, options.out.name)
        say(f"time is up after {options.seconds} s; not run: {report['not_run']}")
    except Exception as error:
        _silence()
        if options.meet is not None:
            arrive(options.meet, options.out.name)
        report["error"] = f"{type(error).__name__}: {error}"[:2000]
        write(options.out, report)
        raise
    _silence()
    write(options.out, report)
    return 0 if report["cells"] else 1


def _alarm(seconds: float) -> None:
    def ring(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, ring)
    # Again and again: an exception inside a callback from C is lost.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1), 3)


def _silence() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


# Cost: a parent that drives two engines, each in a process of its own ------------------------------------------------


def serve_blocks(options: argparse.Namespace) -> int:
    """A child: for each line of stdin {"batch", "context"} or {"steps", "slower"} or {} (end the batch)."""
    shape = prepare(options)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(engine_arguments(shape, options, Path(folder)))
        batch = None
        answer({"ready": True, "runner": type(engine.runner).__module__})
        for line in sys.stdin:
            command = json.loads(line)
            if "batch" in command:
                batch = engine.requests(command["batch"], command["context"])
                batch.__enter__()
                answer({})
            elif "steps" in command:
                engine.slower = command["slower"]
                engine.synchronize()
                done = [engine.step() for _ in range(command["steps"])]
                # Nothing of this engine may run while the other one's turn is timed.
                engine.synchronize()
                answer(
                    {
                        "ms": [1000 * seconds for seconds, _, _ in done],
                        "tokens": sum(len(tokens) for _, tokens, _ in done),
                        "ended": any(ended for _, _, ended in done),
                    }
                )
            elif batch is not None:
                batch.__exit__(None, None, None)
                batch = None
                answer({})
    return 0


def answer(data: dict[str, Any]) -> None:
    """One line for the parent."""
    print(f"ANSWER {json.dumps(data)}", flush=True)


class Child:
    """An engine in a process of its own, which runs when it is asked to."""

    def __init__(self, variant: str, log: Path) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant, "--child"]
        self.variant, self.log = variant, log
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, bufsize=1
        )

    def read(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError when there is none."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"the {self.variant} engine ended: {self.log.read_text()[-3000:]}")

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


SKIPPED = 2
"""First steps of a turn that are left out: with asynchronous scheduling one of them was computed before."""


def turns(stock: Child, overlay: Child, rounds: int, steps: int, slower: float) -> dict[str, Any]:
    """Let both engines take turns (stock, overlay, overlay, stock), and compare their median steps.

    Args:
        stock: one engine.
        overlay: the other.
        rounds: of four turns each.
        steps: that count, of each turn.
        slower: share by which each step of the overlay's is stretched, for the control.
    """
    times: dict[str, list[float]] = {"stock": [], "overlay": []}
    ratios: list[float] = []
    for _ in range(rounds):
        both: dict[str, list[float]] = {"stock": [], "overlay": []}
        for child in (stock, overlay, overlay, stock):
            said = child.ask({"steps": SKIPPED + steps, "slower": slower if child is overlay else 0.0})
            if said["ended"]:
                raise RuntimeError("a request ended while it was measured; lower the number of rounds")
            both[child.variant] += said["ms"][SKIPPED:]
        ratios.append(statistics.median(both["overlay"]) / statistics.median(both["stock"]))
        for name, values in both.items():
            times[name] += values
    return {
        "rounds": rounds,
        "stock_ms": _quartiles(times["stock"]),
        "overlay_ms": _quartiles(times["overlay"]),
        "steps": len(times["stock"]),
        "ratio": statistics.median(ratios),
        "ratios": _quartiles(ratios),
    }


def run_cost(options: argparse.Namespace, started: float) -> int:
    """``cost``: interleaved steps of stock and overlay, and of an overlay that is slower by 5 %."""
    # Nothing in this process touches the GPU but for its name.
    shape = shape_of(options.mode, options.tiny)
    shape.contexts, shape.concurrency = options.contexts or shape.contexts, options.concurrency or shape.concurrency
    options.variant = "both"
    fit(shape, options.layers)
    report = header(options, shape)
    report["not_run"] = list(shape.concurrency)
    children: list[Child] = []
    _alarm(options.seconds)
    rounds, steps = (3, 6) if options.tiny else (15, 10)
    with tempfile.TemporaryDirectory() as folder:
        try:
            children += [Child(name, Path(folder) / f"{name}.log") for name in ("stock", "overlay")]
            report["runner"] = [child.read()["runner"] for child in children]
            say(f"{report['vllm']}: both engines started after {time.monotonic() - started:.0f} s")
            stock, overlay = children
            for batch in shape.concurrency:
                for child in children:
                    child.ask({"batch": batch, "context": shape.contexts[0]})
                turns(stock, overlay, 1 if options.tiny else 3, steps, 0.0)  # warm up
                cell: dict[str, Any] = {
                    "batch": batch,
                    "context": shape.contexts[0],
                    **turns(stock, overlay, rounds, steps, 0.0),
                }
                cell["control"] = turns(stock, overlay, max(3, rounds // 3), steps, options.tamper)
                for child in children:
                    child.ask({})
                report["cells"].append(cell)
                report["not_run"].remove(batch)
                say(
                    f"batch {batch}: stock {cell['stock_ms']['median']:.3f} ms, ratio {cell['ratio']:.4f}, "
                    f"slowed by {options.tamper:.0%}: {cell['control']['ratio']:.4f}"
                )
                write(options.out, report)
        except OutOfTime:
            _silence()
            say(f"time is up after {options.seconds} s; not run: batches {report['not_run']}")
        except RuntimeError as error:
            report["error"] = str(error)[-2000:]
            say(report["error"])
        finally:
            _silence()
            for child in children:
                child.close()
    write(options.out, report)
    return 0 if report["cells"] and "error" not in report else 1


def rates(text: str) -> list[float]:
    """ ".65,.40,.25" as a list of shares that don't grow."""
    found = [float(part) for part in text.split(",")]
    if not all(0 <= rate <= 1 for rate in found) or sorted(found, reverse=True) != found:
        raise ValueError(text)
    return found


def main() -> int:
    """Measure, or report."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("context", "share", "cost"))
    parser.add_argument("--variant", choices=("none", "stock", "overlay"), default="none")
    parser.add_argument("--out", type=result_file, metavar="FILE", help="where the result goes (JSON)")
    parser.add_argument("--seconds", type=duration, default=600, help="stop after this time, with what there is")
    parser.add_argument("--k", type=count, default=3, help="draft tokens a step")
    parser.add_argument(
        "--acceptance", type=rates, default=[0.65, 0.40, 0.25], help="of share, by position, cumulative"
    )
    parser.add_argument("--contexts", type=counts, metavar="N,M", help="instead of the mode's")
    parser.add_argument("--concurrency", type=counts, metavar="N,M", help="instead of the mode's; cost: batches")
    parser.add_argument("--steps", type=count, help="measured steps of each cell")
    parser.add_argument("--layers", type=count, help="instead of the mode's; share: instead of what fits")
    parser.add_argument("--backend", default=None, help="MLA backend (default TRITON_MLA; of cost: vLLM's own choice)")
    parser.add_argument("--drafter-backend", help="the drafter's attention backend, where releases have that key")
    parser.add_argument("--runner", choices=("default", "V1", "V2"), default="default", help="model runner")
    parser.add_argument("--graphs", default="FULL_DECODE_ONLY", help="cudagraph_mode")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile; stock suffers most from that")
    parser.add_argument("--profile", action="store_true", help="and where 20 more steps of each cell spend their time")
    parser.add_argument("--tamper", type=float, default=0.05, help="cost: by what share the control is slower")
    parser.add_argument(
        "--meet", type=Path, metavar="DIR", help="start beside other runs that name it, then take turns"
    )
    parser.add_argument("--parties", type=count, default=1, metavar="N", help="how many runs meet there")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU, to try the script")
    parser.add_argument(
        "--report", nargs="+", type=Path, metavar="FILE", help="join results into tables, with the bars"
    )
    parser.add_argument("--upstream", default="0.33.0", help="the release whose own TRITON_MLA is the yardstick")
    parser.add_argument("--json", action="store_true", help="of --report: JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        return throughput_report.main(options.report, options.upstream, as_json=options.json)
    if options.mode is None or options.out is None:
        parser.error("--mode and --out, or --report")
    if options.meet is not None and options.mode == "cost":
        parser.error("--meet is for context and share; cost starts its own two engines")
    if options.meet is not None and (options.meet / f"{options.out.name}.here").exists():
        parser.error(f"--meet {options.meet}: a run with this --out has met there before; give another folder")
    if not options.tiny:
        need_gpus(parser, 1)
    if options.backend is None:
        options.backend = "default" if options.tiny or options.mode == "cost" else "TRITON_MLA"
    if options.child:
        return serve_blocks(options)
    try:
        return run_cost(options, started) if options.mode == "cost" else run_cells(options, started)
    except Unfit as error:
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
