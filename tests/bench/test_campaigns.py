# SPDX-License-Identifier: Apache-2.0
"""What the GPU campaigns make of what they saw: each verdict is right, and each fault turns it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "gpu"))

import cells
import soak
import two_gpus

LOOKS = [{"host_mib": 1000.0, "gpu_mib": 900.0, "accepted": 0.7 + 0.01 * (i % 3)} for i in range(40)]
TEXT = [(1, 2, 3, 4)] * 5


def grown(key: str, by: float) -> list[dict[str, float]]:
    return [{**look, key: look[key] * (1 + by * i / 40)} for i, look in enumerate(LOOKS)]


def test_a_steady_server_is_right() -> None:
    found = soak.verdict(LOOKS, [], TEXT, TEXT, TEXT)
    assert found["ok"] and found["text_the_same_before_and_after"]


@pytest.mark.parametrize(
    ("looks", "errors", "after"),
    [
        (grown("host_mib", 0.1), [], TEXT),
        (grown("gpu_mib", 0.1), [], TEXT),
        (grown("accepted", -0.2), [], TEXT),
        *(([look | {key: 0.0} for look in LOOKS], [], TEXT) for key in LOOKS[0]),
        (LOOKS, ["connection reset"], TEXT),
        (LOOKS, [], [(1, 9, 9, 9)] * 5),
    ],
    ids=[
        *("host memory", "GPU memory", "acceptance"),
        *("host memory not seen", "GPU memory not seen", "nothing accepted"),
        *("an error", "text"),
    ],
)
def test_what_a_soak_is_to_find(looks: list[dict[str, float]], errors: list[str], after: list[Any]) -> None:
    assert not soak.verdict(looks, errors, TEXT, TEXT, after)["ok"]


BOTH = "EngineCore_DP0 pid=1", "EngineCore_DP1 pid=2"


def server(rate: float, *said_by: str) -> dict[str, Any]:
    return {"ok": True, "acceptance_rate": rate, "drafted": 90, "text": TEXT, "boundaries_said_by": list(said_by)}


@pytest.mark.parametrize(
    ("two", "right"),
    [
        (server(0.71, *BOTH), True),
        (server(0.71, "EngineCore_DP0 pid=1", "APIServer pid=3"), False),
        (server(0.60, *BOTH), False),
        (server(0.71, *BOTH) | {"text": [(1, 2, 3, 9)] * 5}, True),
        (server(0.71, *BOTH) | {"text": [(1, 8, 9, 9)] * 5}, False),
        (server(0.71, *BOTH) | {"drafted": 0}, False),
    ],
    ids=["both engines", "one engine alone", "less accepted", "a near-tie", "other text", "nothing drafted"],
)
def test_data_parallel_is_held_to_one_engine(two: dict[str, Any], right: bool) -> None:
    results = {"V2, served by one": server(0.72, "EngineCore pid=1"), "V2, DP 2": two}
    two_gpus.compared(results)
    assert results["V2, DP 2"]["ok"] is right
    assert results["V2, served by one"]["ok"] and (two["tokens_equal_to_one"] == 1) is (two["text"] == TEXT)


def test_every_cell_is_there_once_and_stock_stands_between() -> None:
    every = cells.cells(["V2", "V1"])
    names = [cell.name for cell in every]
    assert len(set(names)) == len(names)
    for runner in ("V1", "V2"):
        assert [cell.overlay for cell in every if cell.chain == runner] == ["on", "on", "stock", "on"]
        for backend in cells.BACKENDS:
            assert {f"{runner}, {backend}, {mode}" for mode in cells.MODES} <= set(names)
