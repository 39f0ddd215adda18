# SPDX-License-Identifier: Apache-2.0
"""Where a decode step's time goes: verify, drafting, sampling, preparation, and the GPU's idle time between.

Named ranges are put around a model runner's methods, which are found by name on either runner and every release; each
kernel belongs to the innermost range in which it was launched, a CUDA graph's kernels to the one that replayed it. The
profiler slows the host down: shares are what to read, not milliseconds.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PREFIX = "step:"
OUTER = "engine"
STEPS = 20
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}

RANGES: dict[str, tuple[tuple[str, str], ...]] = {
    # V1 calls the model in one method, V2 directly, or by replaying a graph.
    "verify": (("", "_model_forward"), ("model", "forward"), ("cudagraph_manager", "run_fullgraph")),
    "sample": (("", "_sample"), ("", "sample")),
    "draft": (("drafter", "propose"), ("speculator", "propose")),
    "prepare": (("", "execute_model"),),
    "after": (("", "sample_tokens"),),
}
"""Range: attributes of the runner ('' is itself) and their methods. Inner ranges take their time from outer ones."""


class Ranges:
    """Named ranges around a runner's methods, on the instances; ``close`` takes them away."""

    def __init__(self, runner: Any) -> None:
        import torch

        self._undo: list[tuple[Any, str]] = []
        for name, places in RANGES.items():
            for owner, method in places:
                holder = getattr(runner, owner, None) if owner else runner
                if callable(getattr(holder, method, None)):
                    self._wrap(holder, method, torch.profiler.record_function, PREFIX + name)
                    if not owner:
                        break  # the runner's own method holds what the others would

    def _wrap(self, holder: Any, method: str, record: Any, name: str) -> None:
        original = getattr(holder, method)

        def ranged(*args: Any, **kwargs: Any) -> Any:
            with record(name):
                return original(*args, **kwargs)

        # Not setattr: a module's own would take a function for what it is, but looks at each attribute.
        holder.__dict__[method] = ranged
        self._undo.append((holder, method))

    def close(self) -> None:
        """Undo."""
        for holder, method in self._undo:
            del holder.__dict__[method]


@contextmanager
def ranges(runner: Any) -> Generator[Ranges]:
    """``Ranges`` for a while."""
    wrapped = Ranges(runner)
    try:
        yield wrapped
    finally:
        wrapped.close()


def profile_steps(runner: Any, step: Callable[[], Any], steps: int = STEPS) -> dict[str, Any]:
    """Run some steps under torch's profiler; see ``read_trace`` for what is returned."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with ranges(runner), tempfile.TemporaryDirectory() as folder:
        with profile(activities=activities) as profiler:
            for _ in range(steps):
                with record_function(PREFIX + OUTER):
                    step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return read_trace(json.loads(trace.read_text())["traceEvents"])


def read_trace(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A Chrome trace's events, added up by range.

    Returns:
        ``steps``; ``wall_ms`` a step; ``gpu_busy``, the share of the wall time in which the GPU has work (None without
        a GPU); and ``rows``: for each range ``calls``, ``host_ms`` (without the ranges inside it), ``gpu_ms`` and
        ``idle_ms``, the GPU's idle time before its kernels, all by step.

    Raises:
        ValueError: no step was recorded.
    """
    spans = sorted(
        (e["ts"], e["ts"] + e.get("dur", 0), e["name"].removeprefix(PREFIX), e.get("tid"))
        for e in events
        if e.get("cat") == "user_annotation" and str(e.get("name", "")).startswith(PREFIX)
    )
    outer = [span for span in spans if span[2] == OUTER]
    if not outer:
        raise ValueError("the trace holds no step")
    starts = [span[0] for span in spans]

    def innermost(time: float, thread: Any) -> str:
        for begin, end, name, tid in reversed(spans[: bisect_right(starts, time)]):
            if end >= time and (tid == thread or thread is None):
                return name
            if name == OUTER and begin < time:
                break
        return "elsewhere"

    rows: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0, "host_ms": 0.0, "gpu_ms": 0.0, "idle_ms": 0.0})
    for index, (begin, end, name, tid) in enumerate(spans):
        rows[name]["calls"] += 1
        rows[name]["host_ms"] += end - begin
        # What encloses it: the last one before it that has not ended. Ranges nest.
        for _, other_end, other, other_tid in reversed(spans[:index]):
            if other_end >= end and other_tid == tid:
                rows[other]["host_ms"] -= end - begin
                break
            if other == OUTER:
                break
    launched = {
        e["args"]["correlation"]: innermost(e["ts"], e.get("tid"))
        for e in events
        if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})
    }
    work = sorted((e["ts"], e["ts"] + e["dur"], e["args"].get("correlation")) for e in events if e.get("cat") in GPU)
    busy, until = 0.0, None
    for begin, end, correlation in work:
        row = rows[launched.get(correlation, "elsewhere")]
        row["gpu_ms"] += end - begin
        if until is None:
            until = begin
        row["idle_ms"] += max(0.0, begin - until)
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    wall = max(outer[-1][1], until or 0.0) - outer[0][0]
    steps = len(outer)
    return {
        "steps": steps,
        "wall_ms": wall / 1000 / steps,
        "gpu_busy": busy / wall if work else None,
        "rows": {
            name: {n: v / steps if n == "calls" else v / 1000 / steps for n, v in row.items()}
            for name, row in sorted(rows.items(), key=lambda item: -item[1]["gpu_ms"] - item[1]["host_ms"] * (not work))
        },
    }
