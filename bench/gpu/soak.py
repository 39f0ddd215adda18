# SPDX-License-Identifier: Apache-2.0
"""Mixed traffic for a long time on one server with the overlay: no error, no growth, steady acceptance, right text.

    python bench/gpu/soak.py --out RESULT.json [--minutes 20]

Needs a CUDA vLLM, this package installed (its entry point must be found), and a GPU with 6 GB free. Chat-sized and long
prompts join and leave, one request in eight is given up by its client halfway, some are sampled. Every ten seconds the
memory of all of the server's processes and of the GPU, and the acceptance of what was drafted since, are noted; at the
end the greedy text of a sample is compared with that of a server without speculation. Exit code 1 when anything is not
as it should be.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import socket
import statistics
import tempfile
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from campaign import header, need_gpus, result_file, write
from vllm.third_party import pynvml

from vllm_kimi_eagle3.bench.client import Client, ServerError
from vllm_kimi_eagle3.bench.serve import serve
from vllm_kimi_eagle3.regression.runs import make_pair
from vllm_kimi_eagle3.tiny_kimi import held_out_prompts

MAX_MODEL_LEN = 512
CLIENTS = 24
EVERY = 10.0
"""Seconds between two looks."""
ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_KIMI_EAGLE3": "on"}
# The cache is smaller than the traffic wants, so that some requests have to give way now and then.
ARGUMENTS = [
    *("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16"),
    *("--gpu-memory-utilization", "0.06", "--kv-cache-memory-bytes", str(16 << 20)),
]
GREW = 0.02
"""Growth of memory, from the second quarter's median to the last's, that is called none."""


class Traffic:
    """Clients that ask one thing after another until they are told to stop."""

    def __init__(self, url: str, prompts: list[str]) -> None:
        self.client = Client(url, timeout=120)
        self.prompts = prompts
        self.stop = threading.Event()
        self.errors: list[str] = []
        self.counts: dict[str, int] = {}
        self.lock = threading.Lock()

    def one_client(self, seed: int) -> None:
        """Ask until the end."""
        rng = random.Random(seed)
        while not self.stop.is_set():
            text = rng.choice(self.prompts)
            long = rng.random() < 0.15
            text = (text * 4)[-MAX_MODEL_LEN + 120 :] if long else text[-rng.randint(8, 120) :]
            tokens, kind = rng.choice((8, 32, 64, 100)), rng.random()
            try:
                if kind < 0.125:
                    self.give_up(text, rng)
                    self.count("given up")
                elif kind < 0.3:
                    self.client.chat(text, tokens, 0.7, rng.randrange(1 << 30), True)
                    self.count("sampled")
                else:
                    self.client.complete(text, tokens)
                    self.count("answered")
                if long:
                    self.count("long")
            except (ServerError, OSError) as error:
                self.errors.append(str(error)[:300])
            if rng.random() < 0.05:
                time.sleep(rng.random())

    def count(self, what: str) -> None:
        """One more of these."""
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def give_up(self, text: str, rng: random.Random) -> None:
        """Send a request and hang up while it is being answered."""
        parts = urllib.parse.urlsplit(self.client.url)
        body = json.dumps({"model": self.client.model, "prompt": text, "max_tokens": 100, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(rng.random() * 0.1)


def minutes(text: str) -> float:
    """An argument: long enough for a second quarter and a last one, of one look each."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    least = 4 * EVERY / 60
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} was given, but a number of minutes from {least:.2g} on was expected")
    return value


def memory() -> dict[str, float]:
    """MiB of the server's processes, in the host and on its GPU, where others may be at work."""
    resident, own = 0, set[int]()
    for process in psutil.Process().children(recursive=True):
        try:
            resident += process.memory_full_info().uss
            own.add(process.pid)
        except psutil.Error:
            continue
    pynvml.nvmlInit()
    devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    running = [p for device in devices for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]
    used = sum(p.usedGpuMemory or 0 for p in running if p.pid in own)
    return {"host_mib": resident / 2**20, "gpu_mib": used / 2**20}


def greedy(url: str, prompts: list[str]) -> list[tuple[int, ...]]:
    """Greedy text of a sample, one request at a time."""
    client = Client(url, timeout=120)
    return [client.complete(text[-100:], 48).token_ids for text in prompts]


def main() -> int:
    """Run the traffic and write what was seen, after every look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_file, required=True, help="where the results go (JSON)")
    parser.add_argument("--minutes", type=minutes, default=20.0, help="how long (default: %(default)s)")
    options = parser.parse_args()
    need_gpus(parser, 1)
    prompts = [bytes(p).decode() for p in held_out_prompts()]
    report: dict[str, Any] = {
        **header("soak.py"),
        "settings": f"bf16, k = 3, compiled with CUDA graphs, {CLIENTS} clients, 16 requests at once",
    }
    looks: list[dict[str, float]] = []
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pair = make_pair(folder, wide=True)
            drafter = {"method": "eagle3", "model": str(pair["eagle3_gqa_boundary"]), "num_speculative_tokens": 3}
            environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(folder / "cache")}
            target = str(pair["deepseek_v3"])
            with serve(target, ARGUMENTS, folder / "plain", environment=environment) as url:
                plain = greedy(url, prompts)
            speculating = [*ARGUMENTS, "--speculative-config", json.dumps(drafter)]
            with serve(target, speculating, folder / "log", environment=environment) as url:
                before_text = greedy(url, prompts)
                traffic = Traffic(url, prompts)
                with ThreadPoolExecutor(CLIENTS) as pool:
                    clients = [pool.submit(traffic.one_client, seed) for seed in range(CLIENTS)]
                    try:
                        began, before = time.monotonic(), traffic.client.counters()
                        while time.monotonic() - began < options.minutes * 60:
                            time.sleep(EVERY)
                            now = traffic.client.counters()
                            part, before = now.since(before), now
                            rate = part.accepted / max(1, part.drafted)
                            looks.append(
                                {"s": time.monotonic() - began, **memory(), "accepted": rate, "tokens": part.generated}
                            )
                            report |= {"looks": looks, "counts": traffic.counts, "errors": traffic.errors[:20]}
                            write(options.out, report)
                            print({k: round(v, 3) for k, v in looks[-1].items()}, len(traffic.errors), flush=True)
                    finally:  # also when the server has ended: the clients would ask on for ever
                        traffic.stop.set()
                    for client in clients:
                        client.result()
                after_text = greedy(url, prompts)
            log = (folder / "log").read_text(errors="replace").splitlines()
    except ServerError as error:
        report |= {"ok": False, "error": str(error)[:600]}
        write(options.out, report)
        print(f"NOT {report['error']}", flush=True)
        return 1
    report |= verdict(looks, traffic.errors, plain, before_text, after_text)
    report["errors_in_log"] = [line[:300] for line in log if " ERROR " in line][:20]
    report["preempted"] = next((line for line in reversed(log) if "reempt" in line), "")[:300]
    report["ok"] = bool(report["ok"]) and not report["errors_in_log"]
    write(options.out, report)
    print({k: v for k, v in report.items() if k != "looks"}, flush=True)
    return int(not report["ok"])


def verdict(
    looks: list[dict[str, float]], errors: list[str], plain: list[Any], before: list[Any], after: list[Any]
) -> dict[str, Any]:
    """Growth, steadiness and text, each with its figure."""
    quarter = len(looks) // 4
    parts = looks[quarter : 2 * quarter], looks[-quarter:]

    def growth(key: str) -> float | None:
        """None where nothing was seen, as where NVML does not know the server's processes by their numbers here."""
        early, late = (statistics.median(look[key] for look in part) for part in parts)
        return late / early - 1 if early else None

    def same(one: list[Any]) -> float:
        pairs = [(a, b) for x, y in zip(plain, one, strict=True) for a, b in zip(x, y, strict=False)]
        return sum(a == b for a, b in pairs) / len(pairs)

    rates = [look["accepted"] for look in looks]
    found: dict[str, Any] = {
        "growth": {key: growth(key) for key in ("host_mib", "gpu_mib", "accepted")},
        "accepted": {"median": statistics.median(rates), "lowest": min(rates), "highest": max(rates)},
        "text_equal_to_no_speculation": {"before": same(before), "after": same(after)},
        "text_the_same_before_and_after": before == after,
    }
    host, gpu, accepted = found["growth"].values()
    seen = None not in (host, gpu, accepted)
    # In bf16 a batch of several tokens rounds otherwise than one of one, and takes another turn at a near-tie.
    steady = seen and max(host, gpu) <= GREW and abs(accepted) < 0.05
    found["ok"] = steady and not errors and same(after) > 0.8
    return found


if __name__ == "__main__":
    raise SystemExit(main())
