# SPDX-License-Identifier: Apache-2.0
"""Join results of ``throughput.py`` into tables, and say of each bar whether it holds. Pure but for reading files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.bench.breakeven import StepTimes, acceptance_length
from vllm_kimi_eagle3.layers.files import read_object

FORMAT = "vllm-kimi-eagle3 throughput 1"
OF_STOCK, OF_UPSTREAM = 0.25, 1.15
TIMES_STOCK, SHARE_OF_UPSTREAM = 4.0, 0.9
COST = 1.01
PREDICTION = 0.10
ENOUGH_STEPS = 50

Key = tuple[int, int]
"""Context and concurrency of a cell."""


def load(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read results. Raises ValueError, one sentence, when a file is none."""
    found: list[dict[str, Any]] = []
    for path in paths:
        data = read_object(path, 64 << 20, values=10_000_000)
        if data.get("format") != FORMAT:
            raise ValueError(f"{path} is not a result of bench/gpu/throughput.py; give files that --out wrote")
        found.append(data | {"file": path.name})
        try:
            joined(found[-1:], "")
            text(found[-1:], "")
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"{path} is no whole result of bench/gpu/throughput.py ({type(error).__name__}: {error}); measure again"
            ) from None
    return found


def release(result: dict[str, Any]) -> str:
    """The release without a local version, such as 0.32.0 of 0.32.0+cpu."""
    return result["vllm"].partition("+")[0]


def label(result: dict[str, Any]) -> str:
    """Release and variant."""
    return f"{release(result)} {result['variant']}"


def merged(results: Sequence[dict[str, Any]], mode: str, k: int | None = None) -> dict[str, dict[Key, dict[str, Any]]]:
    """The cells of a mode by label: later files of one label add cells, or replace them.

    Raises:
        ValueError: they can't be compared: other hardware, layers, k or sizes.
    """
    tables: dict[str, dict[Key, dict[str, Any]]] = {}
    alike: dict[str, Any] = {}
    for result in results:
        settings = result["settings"]
        if result["mode"] != mode or (k is not None and settings["k"] not in (None, k)):
            continue
        for name in ("layers", "tiny", "acceptance", "graphs", "compile"):
            value = settings[name]
            if alike.setdefault(name, value) != value:
                raise ValueError(
                    f"{result['file']} has {name} = {value}, others of {mode} {alike[name]}: not comparable"
                )
        if alike.setdefault("hardware", result["hardware"]) != result["hardware"]:
            raise ValueError(
                f"{result['file']} is of {result['hardware']}, others of {alike['hardware']}: not comparable"
            )
        cells = {(cell["context"], cell["concurrency"]): cell for cell in result["cells"]}
        tables.setdefault(label(result), {}).update(cells)
    return tables


def bar(name: str, value: float | None, limit: float, *, least: bool, steps: int | None = None) -> dict[str, Any]:
    """A bar and whether it holds; None for ``holds`` where something was not measured, or with too few steps."""
    holds = None if value is None else (value >= limit if least else value <= limit)
    if steps is not None and steps < ENOUGH_STEPS:
        holds = None
    sign = "at least" if least else "at most"
    return {"bar": name, "value": value, "wanted": f"{sign} {limit:g}", "holds": holds, "steps": steps}


def _median(cell: dict[str, Any] | None) -> float | None:
    return None if cell is None else cell["step_ms"]["median"]


def _speed(cell: dict[str, Any] | None) -> float | None:
    return None if cell is None else cell["tok_s"]


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _steps(*cells: dict[str, Any] | None) -> int | None:
    counted = [cell["steps"] for cell in cells if cell is not None]
    return min(counted) if counted else None


def _upstream(tables: dict[str, Any], upstream: str) -> dict[Key, dict[str, Any]]:
    return tables.get(f"{upstream} stock") or tables.get(f"{upstream} overlay") or {}


def _releases(tables: dict[str, Any], upstream: str) -> list[str]:
    """Releases that were run with the overlay or stock, but for the yardstick."""
    found = {name.split()[0] for name in tables if not name.endswith(" none")}
    return sorted(found - {upstream})


def bars(results: Sequence[dict[str, Any]], upstream: str) -> list[dict[str, Any]]:
    """All bars of what was measured."""
    found: list[dict[str, Any]] = []
    for k in _ks(results):
        of = "" if k == 3 else f", k = {k}"
        context, share = merged(results, "context", k), merged(results, "share", k)
        for rel in _releases(context, upstream):
            stock, overlay = context.get(f"{rel} stock", {}), context.get(f"{rel} overlay", {})
            other = _upstream(context, upstream)
            for key in sorted({*stock, *overlay}):
                name = f"{rel}, step at context {key[0]}{of}: overlay / "
                a, b, c = overlay.get(key), stock.get(key), other.get(key)
                for rival, cell, limit in (("stock", b, OF_STOCK), (upstream, c, OF_UPSTREAM)):
                    ratio = _ratio(_median(a), _median(cell))
                    found.append(bar(f"{name}{rival}", ratio, limit, least=False, steps=_steps(a, cell)))
        for rel in _releases(share, upstream):
            stock, overlay = share.get(f"{rel} stock", {}), share.get(f"{rel} overlay", {})
            other = _upstream(share, upstream)
            for key in sorted(key for key in {*stock, *overlay} if key[1] == 1):
                name = f"{rel}, tok/s at context {key[0]}, concurrency 1{of}: overlay / "
                a, b, c = overlay.get(key), stock.get(key), other.get(key)
                for rival, cell, limit in (("stock", b, TIMES_STOCK), (upstream, c, SHARE_OF_UPSTREAM)):
                    ratio = _ratio(_speed(a), _speed(cell))
                    found.append(bar(f"{name}{rival}", ratio, limit, least=True, steps=_steps(a, cell)))
    for result in results:
        if result["mode"] == "cost":
            for cell in result["cells"]:
                name = f"{release(result)}, cost of the capture, batch {cell['batch']}: overlay / stock"
                found.append(bar(name, cell["ratio"], COST, least=False, steps=cell["steps"]))
                # A control, not a bar of the overlay's: what can't see 5 % proves nothing about 1 %.
                control = cell["control"]
                name += ", slowed on purpose, is seen"
                seen = bar(name, control["ratio"], COST, least=True, steps=control["steps"])
                found.append(seen | {"wanted": f"above {COST:g}", "holds": seen["holds"] and control["ratio"] > COST})
    found += [
        bar(
            f"{p['label']}, context {p['context']}, concurrency {p['concurrency']}: predicted {p['what']} off by",
            p["off"],
            PREDICTION,
            least=False,
            steps=p["steps"],
        )
        for p in predictions(results)
    ]
    return found


def _ks(results: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({r["settings"]["k"] for r in results if r["settings"]["k"] is not None and r["mode"] != "cost"})


def predictions(results: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Break-even arithmetic against what was measured, for each cell of ``share`` with a drafter.

    Predicted from median step times and the *asked* acceptance where the release can be asked for one, else from what
    it accepted; measured as tokens by wall time. The baseline's step is that of the run without speculation.
    """
    for result in results:
        if result["mode"] != "share" or result["variant"] == "none":
            continue
        k = result["settings"]["k"]
        plain = merged([r for r in results if release(r) == release(result)], "share").get(
            f"{release(result)} none", {}
        )
        for cell in result["cells"]:
            base = plain.get((cell["context"], cell["concurrency"]))
            rates = _acceptance(result, cell)
            step = cell["step_ms"]["median"] / 1000
            times = StepTimes(base["step_ms"]["median"] / 1000 if base else step, step)
            pairs = [("tok/s", cell["concurrency"] * times.tok_s(rates), cell["tok_s"])]
            if base is not None:
                pairs.append(("speed-up", times.speedup(rates), cell["tok_s"] / base["tok_s"]))
            for what, predicted, measured in pairs:
                yield {
                    "label": label(result) + ("" if k == 3 else f", k = {k}"),
                    "context": cell["context"],
                    "concurrency": cell["concurrency"],
                    "what": what,
                    "predicted": predicted,
                    "measured": measured,
                    "off": abs(predicted / measured - 1),
                    "break_even": times.ratio(k) if base is not None else None,
                    "length": acceptance_length(rates),
                    "steps": cell["steps"],
                }


def _acceptance(result: dict[str, Any], cell: dict[str, Any]) -> list[float]:
    if result.get("synthetic"):
        return list(result["speculative"]["synthetic_acceptance_rates"])
    drafts = cell.get("drafts") or 0
    return [count / drafts for count in cell["accepted_by_position"]] if drafts else [0.0] * result["settings"]["k"]


def joined(results: Sequence[dict[str, Any]], upstream: str) -> dict[str, Any]:
    """Tables, predictions and bars as plain data."""
    return {
        "runs": [
            {n: r.get(n) for n in ("file", "mode", "variant", "vllm", "torch", "hardware", "date", "command", "runner")}
            | {"settings": r["settings"], "error": r.get("error"), "not_run": r.get("not_run")}
            for r in results
        ],
        "bars": bars(results, upstream),
        "predictions": list(predictions(results)),
    }


def text(results: Sequence[dict[str, Any]], upstream: str) -> str:
    """The report as Markdown."""
    lines: list[str] = []
    for mode in ("context", "share"):
        for k in _ks(results) or [None]:
            tables = merged(results, mode, k)
            if tables:
                about = next(r["settings"] for r in results if r["mode"] == mode)
                lines += [f"## {mode}: k = {k}, {about['layers']} layers, {about['about']}", ""]
                lines += _table(tables, mode)
    for result in results:
        if result["mode"] == "cost":
            lines += [f"## cost: {result['vllm']}, {result['hardware']}", ""]
            rows = [("batch", "stock ms", "overlay ms", "ratio", "quartiles", "control", "steps")]
            for c in result["cells"]:
                q = c["ratios"]
                rows.append(
                    (
                        str(c["batch"]),
                        f"{c['stock_ms']['median']:.3f}",
                        f"{c['overlay_ms']['median']:.3f}",
                        f"{c['ratio']:.4f}",
                        f"{q['q1']:.4f} to {q['q3']:.4f}",
                        f"{c['control']['ratio']:.4f}",
                        str(c["steps"]),
                    )
                )
            lines += [*_rows(rows), ""]
    for result in results:
        for cell in result["cells"]:
            if "profile" in cell:
                lines += [
                    f"## profile: {label(result)}, {cell['context']} tokens, concurrency {cell['concurrency']}",
                    "",
                ]
                lines += [profile_table(cell["profile"]), ""]
    predicted = list(predictions(results))
    if predicted:
        lines += ["## predicted from step times and acceptance, against measured", ""]
        rows = [("run", "context", "concurrency", "what", "predicted", "measured", "off", "breaks even at", "length")]
        for p in predicted:
            even = "-" if p["break_even"] is None else f"{p['break_even']:.2f}"
            rows.append(
                (
                    p["label"],
                    str(p["context"]),
                    str(p["concurrency"]),
                    p["what"],
                    f"{p['predicted']:.2f}",
                    f"{p['measured']:.2f}",
                    f"{p['off']:.1%}",
                    even,
                    f"{p['length']:.2f}",
                )
            )
        lines += [*_rows(rows), ""]
    lines += ["## bars", ""]
    rows = [("bar", "value", "wanted", "holds")]
    for b in bars(results, upstream):
        holds = {True: "yes", False: "NO", None: "not measured"}[b["holds"]]
        if b["holds"] is None and b["value"] is not None:
            holds = f"too few steps ({b['steps']})"
        rows.append((b["bar"], "-" if b["value"] is None else f"{b['value']:.3f}", b["wanted"], holds))
    lines += _rows(rows)
    lines += [f"error in {r['file']}: {r['error']}" for r in results if r.get("error")]
    lines += [f"not run in {r['file']}: {r['not_run']}" for r in results if r.get("not_run")]
    return "\n".join(lines)


def _table(tables: dict[str, dict[Key, dict[str, Any]]], mode: str) -> list[str]:
    rows = [("run", "context", "concurrency", "step ms", "quartiles", "steps", "tok/s", "against none", "length")]
    for name, cells in tables.items():
        plain = tables.get(f"{name.split()[0]} none", {})
        for (context, concurrency), cell in sorted(cells.items()):
            step = cell["step_ms"]
            against = _ratio(cell["tok_s"], _speed(plain.get((context, concurrency))))
            # Random weights accept nothing: of `context` the step alone says something.
            speed = f"{cell['tok_s']:.1f}" if mode == "share" else "-"
            rows.append(
                (
                    name,
                    str(context),
                    str(concurrency),
                    f"{step['median']:.2f}",
                    f"{step['q1']:.2f} to {step['q3']:.2f}",
                    str(cell["steps"]),
                    speed,
                    f"{against:.2f}x" if against is not None and mode == "share" else "-",
                    f"{cell['acceptance_length']:.2f}" if cell.get("acceptance_length") else "-",
                )
            )
    return [*_rows(rows), ""]


def profile_table(profile: dict[str, Any]) -> str:
    """Where a step's time goes, as Markdown."""
    rows = [("range", "calls", "host ms", "GPU ms", "GPU idle before ms")]
    for name, row in profile["rows"].items():
        rows.append(
            (name, f"{row['calls']:.1f}", f"{row['host_ms']:.2f}", f"{row['gpu_ms']:.2f}", f"{row['idle_ms']:.2f}")
        )
    busy = "no GPU" if profile["gpu_busy"] is None else f"GPU busy {profile['gpu_busy']:.0%}"
    head = f"{profile['steps']} profiled steps of {profile['wall_ms']:.2f} ms, {busy}"
    return "\n".join([head, "", *_rows(rows)])


def _rows(rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def main(paths: Sequence[Path], upstream: str, *, as_json: bool = False) -> int:
    """Print the report; 0 when every bar that was measured holds, 1 when one does not, 2 for bad input."""
    try:
        results = load(paths)
        data = joined(results, upstream)
        print(json.dumps(data, indent=1) if as_json else text(results, upstream), flush=True)
    except ValueError as error:
        print(f"throughput: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough; at exit Python would try to write it once more
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 1 if any(b["holds"] is False for b in data["bars"]) else 0
