# SPDX-License-Identifier: Apache-2.0
"""What the overlay changes, on a real engine: ``make demo``.

Serves the tiny trained Kimi-K2.5 of ``tiny_kimi/`` three times with ``vllm serve`` on the CPU engine: without
speculation, with its EAGLE-3 drafter as stock vLLM captures the layers, and with the overlay. Each server gets the same
held-out prompts; one table shows what came out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from serving import Server, ServerError, serve
from tiny_kimi.materialize import materialize

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


def measure(server: Server, prompts: list[str], tokens: int) -> dict[str, Any]:
    """Send every prompt once, one after another; the texts, the speed and the speculation counters."""
    server.complete(prompts[0], 8)  # the first request of a server pays for what is made lazily
    before = server.speculation()
    start = time.monotonic()
    answers = [server.complete(prompt, tokens) for prompt in prompts]
    seconds = time.monotonic() - start
    after = server.speculation()
    counts = {key: after[key] - before[key] for key in ("drafts", "drafted", "accepted")}
    earlier = before["accepted_by_position"] or [0] * K
    by_position = [now - then for now, then in zip(after["accepted_by_position"], earlier, strict=False)]
    drafts = counts["drafts"]
    total = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return {
        "tokens": total,
        "tok_s": total / seconds,
        "token_ids": [answer["choices"][0]["token_ids"] for answer in answers],
        "texts": [answer["choices"][0]["text"] for answer in answers],
        **counts,
        "acceptance_rate": counts["accepted"] / counts["drafted"] if drafts else None,
        "acceptance_length": 1 + counts["accepted"] / drafts if drafts else None,
        "per_position": [accepted / drafts for accepted in by_position] if drafts else None,
    }


def capture_line(server: Server) -> str:
    """What the server's own log says of the layers it captures."""
    ours = [line for line in server.log_lines("boundaries") if "vllm-kimi-eagle3" in line]
    stock = server.log_lines("uxiliary layers")
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
    held_out = json.loads((ROOT / "examples/tiny_kimi/heldout.json").read_text())
    prompts = [item["prompt"] for item in held_out[: options.prompts]]
    results: list[dict[str, Any]] = []
    for name, env, arguments in runs(pair):
        with console.status(f"{name}: starting vllm serve") as status:
            log = CACHE / "demo" / f"{name.replace(' ', '-').replace(',', '')}.log"
            env = {**env, "VLLM_CACHE_ROOT": str(CACHE / "vllm"), "VLLM_CPU_KVCACHE_SPACE": "1"}
            common = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"]
            try:
                with serve(pair["kimi_k25_legacy"], log, *common, *arguments, env=env) as server:
                    status.update(f"{name}: {len(prompts)} prompts, {options.tokens} tokens each")
                    results.append({"name": name, **measure(server, prompts, options.tokens)})
                    results[-1]["capture"] = capture_line(server)
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
