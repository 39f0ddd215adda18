# SPDX-License-Identifier: Apache-2.0
"""What the overlay changes, on a real engine: ``make demo``.

Serves the tiny trained Kimi-K2.5 of ``tiny_kimi/`` three times with ``vllm serve`` on the CPU engine: without
speculation, with its EAGLE-3 drafter as stock vLLM captures the layers, and with the overlay. Each server gets the same
held-out prompts; one table shows what came out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_kimi_eagle3.bench.client import Client, ServerError
from vllm_kimi_eagle3.bench.serve import serve
from vllm_kimi_eagle3.tiny_kimi.materialize import HERE, materialize

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
K = 3
"""Draft tokens a step."""


def runs(pair: dict[str, Path]) -> list[tuple[str, dict[str, str], list[str]]]:
    """The three servers: name, environment, arguments."""
    drafter = {"method": "eagle3", "model": str(pair["eagle3_gqa_nested"]), "num_speculative_tokens": K}
    speculate = ["--speculative-config", json.dumps(drafter)]
    # The drafter's checkpoint does not say what its ids mean; who trained it knows: outputs of layers.
    rule = ["--additional-config", json.dumps({"kimi_eagle3": {"layer_rule": "output"}})]
    return [
        ("no speculation", {"VLLM_KIMI_EAGLE3": "on"}, []),
        ("EAGLE-3, overlay off", {"VLLM_KIMI_EAGLE3": "stock"}, speculate),
        ("EAGLE-3, overlay on", {"VLLM_KIMI_EAGLE3": "on"}, speculate + rule),
    ]


def measure(server: Client, prompts: list[str], tokens: int) -> dict[str, Any]:
    """Send every prompt once, one after another; the texts, the speed and the speculation counters."""
    server.complete(prompts[0], 8)  # the first request of a server pays for what is made lazily
    before = server.counters()
    answers = [server.complete(prompt, tokens) for prompt in prompts]
    counts = server.counters().since(before)
    total = sum(answer.tokens for answer in answers)
    return {
        "tokens": total,
        "tok_s": total / sum(answer.seconds for answer in answers),
        "token_ids": [answer.token_ids for answer in answers],
        "texts": [answer.text for answer in answers],
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "acceptance_rate": counts.acceptance_rate,
        "acceptance_length": counts.acceptance_length,
        "per_position": counts.per_position,
    }


def capture_line(log: Path) -> str:
    """What a server's own log says of the layers it captures."""
    lines = [re.sub(r"^.*?\[\w+\.py:\d+\] ", "", line) for line in log.read_text(errors="replace").splitlines()]
    ours = [line for line in lines if line.startswith("vllm-kimi-eagle3 ") and "boundaries" in line]
    stock = [line for line in lines if "auxiliary layers" in line.lower()]
    if ours:
        return ours[-1].partition(": ")[2].partition("; stock")[0]
    return stock[-1] if stock else "-"


def table(results: list[dict[str, Any]]) -> Table:
    """The results, one line a server."""
    view = Table(title=f"Tiny Kimi-K2.5 on vLLM's CPU engine, float32, greedy, k = {K}", title_justify="left")
    for column in ("run", "tokens", "tok/s", "accepted", "by position", "length", "same text"):
        view.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for result in results:
        spoke = result["acceptance_rate"] is not None
        view.add_row(
            result["name"],
            str(result["tokens"]),
            f"{result['tok_s']:.1f}",
            f"{result['acceptance_rate']:.1%}" if spoke else "-",
            " ".join(f"{share:.3f}" for share in result["per_position"]) if spoke else "-",
            f"{result['acceptance_length']:.2f}" if spoke else "-",
            "yes" if result["same_text"] else "NO",
        )
    return view


def main() -> int:
    """Run the demo. Exit code 0 when both speculating servers wrote the same text as the plain one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="how many held-out prompts (default 8)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to write for each (default 96)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    options = parser.parse_args()
    if options.prompts < 1 or options.tokens < 1:
        parser.error("--prompts and --tokens must be at least 1")

    # Wide enough for the table, also where the output is no terminal and its width unknown.
    console = Console(stderr=options.json, width=max(100, Console().width))
    pair = materialize(CACHE / "tiny_pair")
    held_out = json.loads((HERE / "heldout.json").read_text())
    prompts = [item["prompt"] for item in held_out[: options.prompts]]
    results: list[dict[str, Any]] = []
    for name, env, arguments in runs(pair):
        with console.status(f"{name}: starting vllm serve") as status:
            log = CACHE / "demo" / f"{name.replace(' ', '-').replace(',', '')}.log"
            env = {**env, "VLLM_CACHE_ROOT": str(CACHE / "vllm"), "VLLM_CPU_KVCACHE_SPACE": "1"}
            common = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"]
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                with serve(str(pair["kimi_k25_legacy"]), [*common, *arguments], log, environment=env) as url:
                    status.update(f"{name}: {len(prompts)} prompts, {options.tokens} tokens each")
                    results.append({"name": name, **measure(Client(url), prompts, options.tokens)})
                results[-1]["capture"] = capture_line(log)
            except ServerError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 1
        results[-1]["same_text"] = results[-1]["token_ids"] == results[0]["token_ids"]
        console.print(f"{name}: {results[-1]['tokens']} tokens, {results[-1]['tok_s']:.1f} tok/s")

    if options.json:
        print(json.dumps({"runs": results}, indent=2))
    else:
        console.print(table(results))
        console.print("same text: token by token, as without speculation\n", highlight=False)
        for result in results:
            console.print(f"[bold]{result['name']}[/bold] captures: {result['capture']}", highlight=False)
    return 0 if all(result["same_text"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
