# SPDX-License-Identifier: Apache-2.0
"""Ask a Kimi-K2.5 about pictures while it speculates: ``python examples/image_prompt.py``.

Serves the picture pair of ``vllm_kimi_eagle3/tiny_kimi`` with ``vllm serve`` on the CPU engine, once for each thing
that its drafter may see at the places of a picture, and asks by the OpenAI API about pictures it was not trained on;
then about the same scenes told in words. One table shows what was right, and what share of the drafts was accepted.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from vllm_kimi_eagle3.bench.client import Client, ServerError
from vllm_kimi_eagle3.bench.serve import serve
from vllm_kimi_eagle3.fixes.drafter_media import CHOICES, KEY
from vllm_kimi_eagle3.tiny_kimi.materialize import materialize_pictures
from vllm_kimi_eagle3.tiny_kimi.scenes import ORDERS, Scene, question

CACHE = Path(__file__).resolve().parent.parent / ".cache"
FIRST = 2_000_000
"""The first scene to ask about; the pair was trained on lower ones."""
K = 3


def picture(scene: Scene) -> dict[str, Any]:
    """A scene as the part of a chat message that carries a picture."""
    buffer = io.BytesIO()
    scene.draw().save(buffer, format="PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def ask(client: OpenAI, model: str, shown: dict[str, Any] | None, text: str) -> str:
    """One question, answered greedily."""
    content: Any = text if shown is None else [shown, {"type": "text", "text": text}]
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], max_tokens=200, temperature=0
    )
    return answer.choices[0].message.content or ""


def measure(url: str, scenes: list[Scene]) -> dict[str, Any]:
    """Every scene shown and told: answers, and the counters of each half."""
    server, client = Client(url), OpenAI(base_url=f"{url}/v1", api_key="none")
    orders = [list(ORDERS)[i % len(ORDERS)] for i in range(len(scenes))]
    result: dict[str, Any] = {"answers": []}
    for half in ("shown", "told"):
        before, right = server.counters(), 0
        for scene, order in zip(scenes, orders, strict=True):
            told = half == "told"
            text = (scene.told() if told else "") + question(order)
            said = ask(client, server.model, None if told else picture(scene), text)
            right += said == scene.answer(order)
            result["answers"].append({"scene": scene.told(), "how": half, "question": question(order), "answer": said})
        counts = server.counters().since(before)
        result[half] = {
            "right": right,
            "acceptance_rate": counts.acceptance_rate,
            "acceptance_length": counts.acceptance_length,
        }
    return result


def table(results: dict[str, dict[str, Any]], count: int) -> Table:
    """What came out, a line for each choice."""
    view = Table(title=f"{count} scenes, shown and told; greedy, k = {K}", title_justify="left")
    for column in ("drafter_media", "shown: right", "accepted", "told: right", "accepted"):
        view.add_column(column, justify="left" if column == "drafter_media" else "right", no_wrap=True)
    for choice, result in results.items():
        cells = [
            cell for half in ("shown", "told") for cell in (result[half]["right"], result[half]["acceptance_rate"])
        ]
        view.add_row(choice, str(cells[0]), f"{cells[1] or 0:.1%}", str(cells[2]), f"{cells[3] or 0:.1%}")
    return view


def main() -> int:
    """Run it. Exit code 0 when all servers gave the same answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=6, help="how many pictures to ask about (default 6)")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=["placeholder", "embedding"], metavar="CHOICE")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    options = parser.parse_args()
    if options.scenes < 1:
        parser.error("--scenes must be at least 1")

    console = Console(stderr=options.json, width=max(100, Console().width))
    pair = materialize_pictures(CACHE / "picture_pair")
    scenes = [Scene.random(FIRST + i) for i in range(options.scenes)]
    drafter = {"method": "eagle3", "model": str(pair["pictures_gqa"]), "num_speculative_tokens": K}
    results: dict[str, dict[str, Any]] = {}
    for choice in options.choices:
        log = CACHE / "image_prompt" / f"{choice}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
        arguments += ["--speculative-config", json.dumps(drafter)]
        arguments += ["--additional-config", json.dumps({"kimi_eagle3": {"layer_rule": "output", KEY: choice}})]
        env = {"VLLM_KIMI_EAGLE3": "on", "VLLM_CACHE_ROOT": str(CACHE / "vllm"), "VLLM_CPU_KVCACHE_SPACE": "1"}
        with console.status(f"{choice}: starting vllm serve"):
            try:
                with serve(str(pair["pictures"]), arguments, log, environment=env) as url:
                    results[choice] = measure(url, scenes)
            except ServerError as error:
                print(f"{choice}: {error}", file=sys.stderr)
                return 1
    answers = [[entry["answer"] for entry in result["answers"]] for result in results.values()]
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        first = next(iter(results.values()))["answers"][0]
        console.print(f"[bold]a picture of[/bold] {first['scene'][1:-1]}", highlight=False)
        console.print(
            f"[bold]asked[/bold] {first['question']}\n[bold]answered[/bold] {first['answer']}", highlight=False
        )
        console.print(table(results, len(scenes)))
    return 0 if all(answer == answers[0] for answer in answers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
