# SPDX-License-Identifier: Apache-2.0
"""The run-time watch, without an engine: when it warns, what it reads, what it costs. The rest is in tests/engine."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3 import watch
from vllm_kimi_eagle3.bench.statistics import Share
from vllm_kimi_eagle3.layers import PlanError
from vllm_kimi_eagle3.patching.engine import probe
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Need


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(rates: list[tuple[float, int]], seconds: float = 1.0, **chosen: float) -> list[tuple[Share, float]]:
    """Verify steps at ``seconds`` each: for each pair, so many of which that share is accepted."""
    clock, said = Clock(), list[tuple[Share, float]]()
    one = watch.Watch(watch.Settings(**chosen), lambda *what: said.append(what), clock)
    for rate, steps in rates:
        for i in range(steps):
            one.observe(2 if (i * 7919) % 1000 < 1000 * rate else 0)
            clock.now += seconds
    return said


def test_one_warning_only() -> None:
    said = watched([(0.1, 5000)])
    assert len(said) == 1
    share, minutes = said[0]
    assert share.total >= 200 and 0.05 < share.rate < 0.15 and minutes >= 1


@pytest.mark.parametrize(
    ("rates", "seconds", "chosen"),
    [
        ([(0.7, 5000)], 1.0, {}),  # healthy
        ([(0.0, 190)], 1.0, {}),  # few drafts
        ([(0.0, 5000)], 0.001, {}),  # bad, but for five seconds only
        ([(0.29, 220)], 1.0, {}),  # the interval reaches over the threshold
        ([(0.1, 100), (0.9, 5000)], 1.0, {}),  # a bad start
        ([(0.1, 5000)], 1.0, {"below": 0.05}),
        ([(0.1, 5000)], 1.0, {"minutes": 1440.0}),
    ],
)
def test_no_warning(rates: list[tuple[float, int]], seconds: float, chosen: dict[str, float]) -> None:
    assert watched(rates, seconds, **chosen) == []


def test_it_turns_bad_later() -> None:
    assert len(watched([(0.8, 1000), (0.1, 1000)])) == 1


def test_settings() -> None:
    for off in ({}, {watch.SWITCH: ""}, {watch.SWITCH: "0"}, {watch.SWITCH: "off"}, {watch.BELOW: "nonsense"}):
        assert watch.settings(off) is None
    on = {watch.SWITCH: "1"}
    assert watch.settings(on) == watch.Settings(0.3, 1.0)
    assert watch.settings({**on, watch.BELOW: "0.5", watch.MINUTES: "10"}) == watch.Settings(0.5, 10.0)
    bad = [(watch.SWITCH, "yes"), (watch.BELOW, "30"), (watch.BELOW, "x"), (watch.BELOW, "nan"), (watch.MINUTES, "0")]
    for name, value in bad:
        with pytest.raises(PlanError, match=f"{name} is '{value}'.*(must be|expected)"):
            watch.settings({**on, name: value})


def test_a_vllm_of_another_shape_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = tmp_path / "vllm/v1/core/sched/scheduler.py"
    module.parent.mkdir(parents=True)
    text = (
        "class Scheduler:\n    def __init__(self, c):\n        self.vllm_config = c\n"
        "    def make_spec_decoding_stats(self, spec_decoding_stats, {0}num_draft_tokens, num_accepted_tokens): ...\n"
        "    def update_from_output(self):\n        self.make_spec_decoding_stats()\n"
    )
    needs: list[Need] = []
    for source in (text.format(""), text.format("request, "), text.replace("self.vllm_config", "self.config"), "x = 1"):
        module.write_text(source)
        needs.append(probe(watch.WATCH, SourceTree(tmp_path)).need)
    assert needs == [Need.APPLY, Need.REFUSED, Need.REFUSED, Need.NOT_APPLICABLE]


def test_the_watch_never_ends_a_server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(watch.SWITCH, "1")
    monkeypatch.setattr(watch.ENGINE, "apply", lambda *_: 1 / 0)
    monkeypatch.setattr(watch.logger, "propagate", True)
    watch.begin(types.SimpleNamespace(), types.SimpleNamespace())  # type: ignore[arg-type]
    assert "has no effect: ZeroDivisionError" in caplog.text


def test_the_command_quotes_what_it_names() -> None:
    config: Any = types.SimpleNamespace(
        speculative_config=types.SimpleNamespace(
            target_model_config=types.SimpleNamespace(model="/models/my target"),
            draft_model_config=types.SimpleNamespace(model="owner/drafter"),
        )
    )
    assert "--target '/models/my target' --drafter owner/drafter" in watch.command_of(config)


def test_an_observation_costs_little(benchmark: Any) -> None:
    """tests/engine compares it with a step; here a bar that a slip would not pass: two microseconds."""
    one = watch.Watch(watch.Settings(), lambda *_: None)

    def observe() -> None:
        for accepted in (0, 1, 2, 3) * 250:
            one.observe(accepted)

    benchmark.pedantic(observe, rounds=50, warmup_rounds=2)
    if benchmark.stats is not None:
        assert benchmark.stats.stats.min / 1000 < 2e-6
