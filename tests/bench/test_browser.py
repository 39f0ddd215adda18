# SPDX-License-Identifier: Apache-2.0
"""The report in a real headless browser: it draws, in light and in dark, and asks the network for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import browse, colours, needs_browser, picture

from vllm_kimi_eagle3.bench import report

pytestmark = needs_browser


def data() -> dict[str, Any]:
    prompts = [
        {"name": name, "tokens": 512, "seconds": 9.0, "tok_s": speed, "finish_reason": "length"}
        for name, speed in (("relativity", 49.0), ("n-queens", 57.5), ("tcp-udp", 55.0))
    ]
    empty = dict.fromkeys(("acceptance_rate", "acceptance_length", "per_position", "conditional"))
    base = {"setting": "greedy", "temperature": 0.0, "concurrency": 1, "ms_per_token": 12.1, "prompts": prompts}
    runs = [
        {**base, **empty, "name": "baseline", "tok_s": 82.5},
        {
            **base,
            "name": "drafter",
            "tok_s": 54.6,
            "acceptance_rate": 0.15,
            "acceptance_length": 1.45,
            "per_position": [0.3, 0.1, 0.05],
            "conditional": [0.3, 0.33, 0.5],
        },
    ]
    return {
        "version": "1",
        "vllm": "0.16.0",
        "judged": "drafter",
        "runs": runs,
        "speedups": [None, 0.66],
        "break_even": 2.2,
        "same_text": [3, 3],
        "verdict": "not enough evidence",
        "reasons": ["position 1 is low"],
        "next": "vllm-kimi-eagle3 calibrate",
        "warnings": [],
    }


@pytest.fixture
def page(tmp_path: Path) -> Path:
    trials = [
        {
            "name": name,
            "boundaries": b,
            "hits": h,
            "total": 1000,
            "rate": h / 1000,
            "interval": [h / 1000 - 0.03, h / 1000 + 0.03],
        }
        for name, b, h in (("0", [3, 6, 8], 776), ("1", [4, 7, 9], 855))
    ]
    path = tmp_path / "report.html"
    path.write_text(report.render(data(), {"trials": trials, "boundaries": [4, 7, 9]}))
    return path


def test_light_and_dark(page: Path) -> None:
    light, dark = picture(page, "light"), picture(page, "dark")
    assert (light.getpixel((2, 2)), dark.getpixel((2, 2))) == ((255, 255, 255), (15, 19, 24))
    # The drafter's bars and the baseline's, in the colours of each scheme.
    assert {(217, 115, 13), (140, 149, 159)} <= colours(light)
    assert {(240, 149, 74), (125, 135, 146)} <= colours(dark)


def test_what_the_browser_understood(page: Path) -> None:
    dom = browse(page, "--dump-dom")
    assert dom.count('<svg viewBox="0 0 720') == 4 and dom.count("<tr>") == 3
    assert "Speed-up against acceptance length" in dom and "break-even 2.20" in dom and "Calibration" in dom
    assert "http://" not in dom and "https://" not in dom
