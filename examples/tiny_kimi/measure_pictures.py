# SPDX-License-Identifier: Apache-2.0
"""What each choice of ``drafter_media`` is worth on the picture pair: ``python measure_pictures.py [--scenes 40]``.

Every drafter of the pair, served with every choice, on the same held-out scenes, shown and told; greedy, k = 3. One
engine each, all on this machine's CPU. Prints a table, or JSON with ``--json``; the counters are the engine's own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_kimi_eagle3.fixes.drafter_media import CHOICES, KEY
from vllm_kimi_eagle3.regression.engine import RECORDS, run_engine
from vllm_kimi_eagle3.regression.pictures import about_a_picture, about_a_told
from vllm_kimi_eagle3.tiny_kimi.materialize import materialize_pictures
from vllm_kimi_eagle3.tiny_kimi.scenes import ORDERS, Scene

FIRST = 1_000_100
TRAINED_ON = {"pictures_gqa": "embedding", "pictures_mla": "embedding", "pictures_gqa_placeholder": "placeholder"}


def measure(pair: dict[str, Path], drafter: str, choice: str, scenes: int) -> dict[str, Any]:
    """Acceptance on scenes shown and told, and how many answers were right."""
    numbers = range(FIRST, FIRST + scenes)
    orders = [list(ORDERS)[i % len(ORDERS)] for i in range(scenes)]
    told = [(about_a_told(n, o), 160, [257, 258], 0, []) for n, o in zip(numbers, orders, strict=True)]
    shown = [(about_a_picture(o), 160, [257, 258], 0, [{"scenes": [n]}]) for n, o in zip(numbers, orders, strict=True)]
    done = run_engine(
        pair["pictures"],
        [[request] for request in shown] + [[request] for request in told],
        drafter=pair[drafter],
        additional_config={"kimi_eagle3": {"layer_rule": "output", KEY: choice}},
        max_model_len=384,
        skip_tokenizer_init=False,
        limit_mm_per_prompt={"vision_chunk": 1},
    )
    result: dict[str, Any] = {}
    for half, rounds in (("shown", done.result["rounds"][:scenes]), ("told", done.result["rounds"][scenes:])):
        drafted, accepted = (
            sum(r["counters"][f"num_{name}_tokens"][0] for r in rounds) for name in ("draft", "accepted")
        )
        answers = [bytes(i for i in r["output_ids"][0] if i < 256).decode() for r in rounds]
        right = sum(a == Scene.random(n).answer(o) for a, n, o in zip(answers, numbers, orders, strict=True))
        result[half] = {"acceptance_rate": accepted / drafted, "drafted": drafted, "right": right}
    return result


def main() -> None:
    """Measure all pairs of drafter and choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(RECORDS, str(Path(folder) / "records"))
        pair = materialize_pictures(Path(folder) / "pair")
        console = Console(stderr=options.json)
        jobs = [(drafter, choice) for drafter in TRAINED_ON for choice in CHOICES]
        results = {
            f"{drafter} {choice}": measure(pair, drafter, choice, options.scenes)
            for drafter, choice in track(jobs, "engines", console=console)
        }
    if options.json:
        print(json.dumps({"scenes": options.scenes, "runs": results}, indent=2))
        return
    view = Table("drafter", "trained on", "served with", "shown", "told", "right")
    for name, result in results.items():
        drafter, choice = name.split()
        rates = [f"{result[half]['acceptance_rate']:.1%}" for half in ("shown", "told")]
        view.add_row(
            drafter, TRAINED_ON[drafter], choice, *rates, f"{result['shown']['right']}, {result['told']['right']}"
        )
    console.print(view)


if __name__ == "__main__":
    main()
