# SPDX-License-Identifier: Apache-2.0
"""However the overlay is loaded, the end state is the same: nothing wrapped twice, SHADOWED reported and never undone.

Five things vary: whether vLLM's modules are imported before, after or while plugins are loaded; which other plugin
comes first or last (one that wraps what we wrap, replaces it, can't be imported, or raises); which process it is; how
that process is made; how often ours is registered. CI plays scenarios that cover every pair of values; ``pytest -m
product`` (``nox -s loading``) plays the full product.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
Scenario = dict[str, str]
FACTORS: dict[str, tuple[str, ...]] = {
    "other": (
        "none",
        "wraps first",
        "wraps last",
        "replaces first",
        "replaces last",
        "broken first",
        "raises first",
        "raises last",
    ),
    "imported": ("before", "during", "after"),
    "process": ("API server", "engine core", "worker", "registry"),
    "registered": ("once", "twice", "threads"),
    "start": ("fork", "spawn"),
}
PRODUCT = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
GATES = (
    "__post_init__ of SpeculativeConfig",
    "__post_init__ of VllmConfig",
    "init_worker of WorkerWrapperBase",
    "init_device of WorkerWrapperBase",
)
OTHER = {
    "wraps": """
def patch():
    original = SpeculativeConfig.__post_init__
    def __post_init__(self):
        return original(self)
    SpeculativeConfig.__post_init__ = __post_init__
""",
    "replaces": """
def patch():
    SpeculativeConfig.__post_init__ = lambda self: None
    SpeculativeConfig.__post_init__.__module__ = __name__
""",
    "broken": "raise ImportError('this plugin is broken')",
    "raises": "def patch():\n    raise RuntimeError('this plugin raises')\n",
}
REGISTER = """
import sys

def register():
    module = sys.modules.get("vllm.config.speculative")
    if module is not None and not hasattr(module, "SpeculativeConfig"):
        # Half imported: it comes back when the import is done.
        sys.other_plugin_waits = [*getattr(sys, "other_plugin_waits", []), now]
        return
    now()

def now():
    global SpeculativeConfig
    from vllm.config.speculative import SpeculativeConfig
    patch()
"""
CONFIGURE = """
import json, pickle, sys
from vllm.engine.arg_utils import EngineArgs
models, out = json.loads(sys.argv[1]), sys.argv[2]
speculative = {"method": "eagle3", "model": models["drafter"], "num_speculative_tokens": 3}
config = EngineArgs(model=models["ours"], speculative_config=speculative, dtype="float32", max_model_len=128,
                    skip_tokenizer_init=True, gpu_memory_utilization=0.1).create_engine_config()
open(out, "wb").write(pickle.dumps(config))
"""


def pairwise(factors: dict[str, tuple[str, ...]]) -> list[Scenario]:
    """Scenarios in which every two values of two factors meet: each time the best of some hundred random ones."""
    generator = random.Random(0)
    names = list(factors)
    open_pairs = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    chosen: list[Scenario] = []
    while open_pairs:
        (a, x), (b, y) = min(open_pairs)
        candidates: list[Scenario] = []
        for _ in range(200):
            candidates.append({name: generator.choice(values) for name, values in factors.items()} | {a: x, b: y})
        best = max(candidates, key=lambda scenario: len(pairs(scenario) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen


def pairs(scenario: Scenario) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(itertools.combinations(scenario.items(), 2))


def selected() -> list[Scenario]:
    """Every pair of values of the forked ones, which are cheap; each process spawned, with another plugin each."""
    forked = [{**s, "start": "fork"} for s in pairwise({k: v for k, v in FACTORS.items() if k != "start"})]
    spawned = [
        {"other": "wraps last", "imported": "after", "process": "API server", "registered": "once"},
        {"other": "replaces first", "imported": "during", "process": "engine core", "registered": "twice"},
        {"other": "replaces last", "imported": "before", "process": "worker", "registered": "threads"},
    ]
    return [*forked, *({**s, "start": "spawn"} for s in spawned)]


@pytest.fixture(scope="module")
def play(answer: Callable[..., Any], models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("loading")
    for kind, code in OTHER.items():
        info = folder / kind / "other_plugin-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nother = other_plugin_{kind}:register\n")
        # One that raises does so at once, whatever is imported by then.
        last = "register = patch\n" if kind == "raises" else ""
        (folder / kind / f"other_plugin_{kind}.py").write_text(code + REGISTER + last)
    config = folder / "config.pickle"
    done = subprocess.run([sys.executable, "-c", CONFIGURE, json.dumps(models), str(config)], capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert b"vllm_kimi_eagle3" in config.read_bytes(), "the configuration demands no overlay"

    def run(scenarios: list[Scenario], seconds: float = 3600) -> list[dict[str, Any]]:
        job = {"config": str(config), "plugins": str(folder), "scenarios": scenarios}
        return answer("loading.py", job, seconds)

    return run


def check(scenario: Scenario, seen: dict[str, Any]) -> None:
    """The end state: the same in every scenario but for what the other plugin has really done."""
    assert "raised" not in seen, seen["raised"]
    kind, _, order = scenario["other"].partition(" ")
    assert seen.get("loader") == ("this plugin raises" if kind == "raises" else None)
    # A plugin that is loaded while a module is being imported gets at it after us, whoever comes first.
    lost = kind == "replaces" and (order == "last" or scenario["imported"] == "during")
    expected: dict[str, Any] = {name: [1, None] for name in GATES}
    if lost:
        gone = "vllm.config.speculative.SpeculativeConfig.__post_init__ was replaced after us by somebody else"
        expected[GATES[0]] = [0, gone]
        assert seen["error"] is not None and f"a gate is missing: {gone}" in seen["error"]
    else:
        assert seen["error"] is None
        applied = {"C1", "C2", "C3", "C5", "D15", "D22", "D24"}
        assert {name for name, found in seen["states"].items() if found == "APPLIED"} >= applied
        assert len(seen["patched"]) == len(set(seen["patched"])) >= 6
    assert seen["gates"] == expected
    assert seen["theirs"] == int(kind in ("wraps", "replaces"))
    late = seen["late"]
    assert late["states"] == ["C2"] and "SHADOWED" in late["error"]
    assert late["theirs"], "somebody else's replacement was undone"
    assert any("RotaryEmbedding.forward_cpu was replaced by somebody else" in sentence for sentence in late["left"])
    # Gates under somebody else's wrapper stay, and are silent; all others are gone.
    covered = kind == "wraps" and (order == "last" or scenario["imported"] == "during")
    assert late["gates"] == [lost or covered, False, False, False]
    assert len(late["left"]) == 1 + (lost or covered)
    if scenario["process"] == "registry" and kind == "raises":
        assert "this plugin raises" in seen["registry"]["loader"], "vLLM's own rule: the inspection fails"
    elif scenario["process"] == "registry":
        assert seen["registry"]["patched"] == []
        assert [count for count, _ in seen["registry"]["gates"].values()][1:] == [1, 1, 1]


def test_the_scenarios_cover_every_pair() -> None:
    chosen = selected()
    covered = {pair for scenario in chosen for pair in pairs(scenario)}
    wanted = {
        ((a, x), (b, y)) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]
        if "spawn" not in (x, y)
    }  # fmt: skip
    assert wanted <= covered
    assert {s["process"] for s in chosen if s["start"] == "spawn"} == {"API server", "engine core", "worker"}


def ends_the_same(play: Any, scenarios: list[Scenario]) -> None:
    seen = play(scenarios)
    assert len(seen) == len(scenarios)
    for scenario, result in zip(scenarios, seen, strict=True):
        try:
            check(scenario, result)
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"{scenario}: {error}\n{json.dumps(result, indent=1)[:3000]}") from error


def test_every_pair_ends_the_same(play: Any) -> None:
    ends_the_same(play, selected())


@pytest.mark.product
@pytest.mark.parametrize("start", FACTORS["start"])
@pytest.mark.parametrize("other", FACTORS["other"])
def test_the_full_product_ends_the_same(play: Any, other: str, start: str) -> None:
    """In sixteen parts of 36 scenarios, each some minutes."""
    ends_the_same(play, [s for s in PRODUCT if (s["other"], s["start"]) == (other, start)])


def test_a_configuration_demands_the_overlay_where_it_arrives(tmp_path: Path) -> None:
    """vLLM swallows a plugin that can't be loaded; the process ends all the same."""
    record = tmp_path / "record.pickle"
    receive = "import sys, pickle\n{0}\nrecord = pickle.load(open(sys.argv[1], 'rb'))\nprint(type(record).__name__)\n"
    make = (
        "import sys, pickle\nfrom vllm_kimi_eagle3.record import Record\n"
        "open(sys.argv[1], 'wb').write(pickle.dumps(Record(version={0!r}, plan={{}}, fixes=[])))\n"
    )
    from vllm_kimi_eagle3 import __version__

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, str(record)]
        return subprocess.run(command, env={"PATH": "", **environment}, capture_output=True, text=True)

    assert run(make.format(__version__)).returncode == 0
    assert run(receive.format("")).stdout == "Record\n"  # the negative control
    missing = "sys.modules['vllm_kimi_eagle3'] = None"
    broken = "sys.modules['vllm_kimi_eagle3.activation'] = None"
    for code, environment, word in (
        (missing, {}, "No module named 'vllm_kimi_eagle3.record'"),
        (broken, {}, "vllm_kimi_eagle3.activation"),
        ("", {"VLLM_KIMI_EAGLE3": "off"}, "VLLM_KIMI_EAGLE3 is 'off' in process"),
        ("", {"VLLM_KIMI_EAGLE3": "stock"}, "VLLM_KIMI_EAGLE3 is 'stock' in process"),
    ):
        done = run(receive.format(code), **environment)
        assert done.returncode != 0 and word in done.stderr and not done.stdout, done.stderr
    assert run(make.format("0.0.1")).returncode == 0
    assert "configured by version 0.0.1, but process" in run(receive.format("")).stderr
    warned = run(receive.format("import logging; logging.basicConfig()"), VLLM_KIMI_EAGLE3="warn")
    assert warned.stdout == "Record\n" and "configured by version 0.0.1" in warned.stderr
