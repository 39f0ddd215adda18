# SPDX-License-Identifier: Apache-2.0
"""The trained tiny pair: the right layers from either config, and from ids that are wrong by design."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.calibrate import measure, texts
from vllm_kimi_eagle3.calibrate.trials import Trial, decide, lay_out
from vllm_kimi_eagle3.commands import calibrate as command_module
from vllm_kimi_eagle3.layers import PlanError, alignment, read_headers, resolve
from vllm_kimi_eagle3.reference import Drafter, Target, speculate
from vllm_kimi_eagle3.tiny_kimi.materialize import HERE, materialize

RIGHT = (4, 7, 9)
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return materialize(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def target(pair: dict[str, Path]) -> Target:
    return Target.load(pair["deepseek_v3"])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    held_out = json.loads((HERE / "heldout.json").read_text())
    return [list(item["prompt"].encode()) for item in held_out[::5]]


@pytest.fixture(scope="module")
def written(target: Target, prompts: list[list[int]]) -> list[texts.Written]:
    """All boundaries are kept, so that every test can look at any."""
    with torch.inference_mode():
        return texts.write(target, prompts, 64, range(11), temperature=0.6)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_KIMI_EAGLE3_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize("base", [(3, 6, 8), (4, 7, 9), (5, 8, 10)])
def test_the_right_layers_from_any_ids(
    pair: dict[str, Path], target: Target, written: list[texts.Written], kind: str, base: tuple[int, ...]
) -> None:
    """One early, right, one late: whatever the list says, the measurement finds the same layers."""
    drafter = Drafter.load(pair[f"eagle3_{kind}_nested"], target)
    found = measure.run_trials(drafter, written, [t for t in lay_out(base, 10) if t.whole])
    decision = decide({trial: guesses.share for trial, guesses in found.items()})
    assert decision.boundaries == RIGHT, decision.sentence


def test_one_state_off_is_seen(pair: dict[str, Path], target: Target, written: list[texts.Written]) -> None:
    drafter = Drafter.load(pair["eagle3_gqa_nested"], target)
    found = measure.run_trials(drafter, written, lay_out((4, 7, 8), 10))
    best = max(found, key=lambda trial: found[trial].share.rate)
    assert best == Trial("3:+1", RIGHT)


def test_the_streams_are_those_of_one_pass(target: Target, written: list[texts.Written]) -> None:
    """The kept streams equal a fresh pass over the whole text, row by row."""
    for text in written[:2]:
        out = target.forward(text.ids)
        for boundary, stream in text.streams.items():
            assert torch.allclose(stream, out.boundaries[boundary], atol=2e-4)
        assert torch.equal(text.says, out.logits.argmax(-1))
        if text.greedy:
            assert text.ids[text.prompt :] == text.says[text.prompt - 1 : -1].tolist()


def test_simulated_acceptance_is_that_of_the_whole_loop(
    pair: dict[str, Path], target: Target, written: list[texts.Written]
) -> None:
    """Drafter alone against target and drafter together, text by text, to the last count."""
    drafter, k = Drafter.load(pair["eagle3_gqa_boundary"], target), 3
    for text in [t for t in written if t.greedy][:3]:
        simulated = measure.simulate(drafter, [text], RIGHT, k)
        trace = speculate(target, drafter, text.ids[: text.prompt], RIGHT, k, len(text.ids) - text.prompt)
        steps = [s for s in trace.steps if s.drafts and s.start + k < len(text.ids)]
        assert simulated[0].total == len(steps)
        assert [share.hits for share in simulated] == [sum(s.accepted > i for s in steps) for i in range(k)]


def test_a_shuffled_vocabulary_is_recognised(
    pair: dict[str, Path], target: Target, written: list[texts.Written]
) -> None:
    drafter = Drafter.load(pair["eagle3_gqa_boundary"], target)
    sound = measure.guess(drafter, written, RIGHT)
    assert measure.relabelled(sound).rate < sound.share.rate + 0.02, "nothing to gain where d2t is right"
    order = torch.randperm(len(drafter.draft_to_target), generator=torch.Generator().manual_seed(1))
    drafter.draft_to_target = drafter.draft_to_target[order]
    shuffled = measure.guess(drafter, written, RIGHT)
    assert shuffled.share.rate < 0.1 and measure.relabelled(shuffled).rate > 0.7
    untrained = Drafter.load(pair["eagle3_gqa_boundary"], target)
    generator = torch.Generator().manual_seed(2)
    untrained.weights = {
        n: w if "norm" in n else torch.randn(w.shape, generator=generator) / 16 for n, w in untrained.weights.items()
    }  # type: ignore[assignment]
    noise = measure.guess(untrained, written, RIGHT)
    assert noise.share.rate < 0.1 and measure.relabelled(noise).rate < 0.3


def test_coverage(pair: dict[str, Path], target: Target, written: list[texts.Written]) -> None:
    drafter = Drafter.load(pair["eagle3_gqa_boundary"], target)
    guesses = measure.guess(drafter, written, RIGHT)
    assert measure.coverage(drafter, guesses).rate >= guesses.share.rate


@pytest.fixture
def command(
    pair: dict[str, Path], prompts: list[list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(prompts))

    def call(drafter: Path, *more: str, tokens: int = 128) -> tuple[int, dict[str, Any]]:
        arguments = ["calibrate", "--target", str(pair["kimi_k25"]), "--drafter", str(drafter), "--ids", str(ids)]
        status = cli.main([*arguments, "--tokens", str(tokens), "--temperature", "0", "--json", *more])
        out = capsys.readouterr()
        return status, json.loads(out.out) if out.out else {"error": out.err}

    return call


def read_only(source: Path, folder: Path, ids: list[int] | None) -> Path:
    """A copy with other nested ids, that nobody may write into."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop(IDS, None)
    config["eagle_config"] = {"use_aux_hidden_state": True} | ({IDS: ids} if ids else {})
    (folder / "config.json").write_text(json.dumps(config))
    for path in (*folder.iterdir(), folder):
        path.chmod(stat.S_IRUSR | (stat.S_IXUSR if path.is_dir() else 0))
    return folder


@pytest.mark.parametrize(("ids", "shift", "rule"), [([3, 6, 8], "1", "output"), ([5, 8, 10], "-1", None)])
def test_the_command_remembers_for_the_resolver(
    pair: dict[str, Path],
    command: Callable[..., tuple[int, dict[str, Any]]],
    cache: Path,
    tmp_path: Path,
    ids: list[int],
    shift: str,
    rule: str | None,
) -> None:
    drafter = read_only(pair["eagle3_gqa_nested"], tmp_path / "drafter", ids)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in drafter.iterdir())
    status, data = command(drafter)
    assert status == 0 and data["decided"] and data["boundaries"] == list(RIGHT) and data["rule"] == rule
    assert max(data["hit_rates"], key=data["hit_rates"].get) == shift and set(data["intervals"]) == set(
        data["hit_rates"]
    )
    assert Path(data["record"]).is_relative_to(cache)
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in drafter.iterdir())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (pair["kimi_k25"], drafter)]
    headers = read_headers(drafter)
    plan = resolve(*configs, headers=headers, alignment=alignment.load(alignment.content_key(*configs, headers)))
    assert plan.boundaries == RIGHT and plan.decided_by == "alignment record"


def test_little_text_does_not_decide(
    pair: dict[str, Path], command: Callable[..., tuple[int, dict[str, Any]]], cache: Path
) -> None:
    status, data = command(pair["eagle3_gqa_nested"], tokens=6)
    assert status == 1 and not data["decided"] and data["record"] is None and data["rule"] is None
    assert data["needed_tokens"] > 60 and not cache.exists()


def test_the_picture_and_no_record(
    pair: dict[str, Path], command: Callable[..., tuple[int, dict[str, Any]]], cache: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "c.png"
    status, data = command(pair["eagle3_mla_boundary"], "--no-record", "--picture", str(picture), tokens=48)
    assert data["record"] is None and not cache.exists() and status in (0, 1)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_bad_input_is_one_sentence(
    pair: dict[str, Path], command: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    def broken(name: str, **config: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(pair["eagle3_gqa_nested"], folder)
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**known, **config}))
        return folder

    missing = broken("missing")
    weights = load_file(missing / "model.safetensors")
    (missing / "model.safetensors").unlink()
    save_file({name: w for name, w in weights.items() if name != "norm.weight"}, missing / "model.safetensors")
    cases = {
        "no auxiliary": broken("no-aux", eagle_config={"use_aux_hidden_state": False}),
        "no ascending": broken("descending", eagle_config={IDS: [8, 6, 3]}),
        "norm.weight": missing,
        "can't be read": tmp_path / "none",
    }
    for word, drafter in cases.items():
        status, data = command(drafter)
        assert status == 2 and word in data["error"] and data["error"].count("\n") == 1, data
    status, data = command(pair["eagle3_gqa_nested"], "--tokens", "0")
    assert status == 2
    status, data = command(pair["eagle3_gqa_nested"], "--ids", os.devnull)
    assert status == 2 and "ordinary file" in data["error"]


@pytest.mark.parametrize("content", ["pipe", "[[1.5]]", "[[true]]", '["12"]', "[" * 100_000, '{"a": 1}'])
def test_ids_that_are_none(tmp_path: Path, content: str) -> None:
    ids = tmp_path / "ids.json"
    if content == "pipe":
        os.mkfifo(ids)
    else:
        ids.write_text(content)
    with pytest.raises(PlanError, match=r"ids\.json"):
        texts.read_ids(ids, 100)


@pytest.mark.parametrize("flags", [["--picture", "no/such/folder/c.png"], []])
def test_where_nothing_can_be_written_is_said_before_measuring(
    pair: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    monkeypatch.setattr(command_module.picture, "require", lambda: None)
    monkeypatch.setattr(command_module, "_measure", lambda *_: pytest.fail("measured first"))
    if not flags:
        monkeypatch.setenv("VLLM_KIMI_EAGLE3_CACHE", "/dev/null/cache")
    folders = ["--target", str(pair["kimi_k25"]), "--drafter", str(pair["eagle3_gqa_nested"])]
    assert cli.main(["calibrate", *folders, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (flags[1] if flags else "--no-record") in line


@pytest.mark.parametrize(
    ("role", "key", "value"),
    [
        ("target", "rope_scaling", "x"),
        ("target", "topk_group", [1]),
        ("target", "qk_nope_head_dim", -1),
        ("target", "qk_rope_head_dim", 10**40),
        ("target", "moe_layer_freq", None),
        ("drafter", "num_attention_heads", None),
        ("drafter", "rms_norm_eps", [1]),
    ],
)
def test_a_config_that_holds_anything_is_one_sentence(
    pair: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str, key: str, value: object
) -> None:
    folders = {"target": pair["kimi_k25"], "drafter": pair["eagle3_gqa_nested"]}
    copy = tmp_path / role
    shutil.copytree(folders[role], copy)
    config = json.loads((copy / "config.json").read_text())
    config.get("text_config", config)[key] = value
    (copy / "config.json").write_text(json.dumps(config))
    folders[role] = copy
    arguments = [f"--{name}={folder}" for name, folder in folders.items()]
    assert cli.main(["calibrate", *arguments, "--tokens", "1", "--no-record"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the {role} can't be run" in line and len(line) < 500


def test_a_list_of_very_many_ids_ends_at_once(
    pair: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = read_only(pair["eagle3_gqa_nested"], tmp_path / "drafter", list(range(50_000)))
    arguments = ["--target", str(pair["kimi_k25"]), "--drafter", str(drafter), "--no-record"]
    assert cli.main(["calibrate", *arguments]) == 2
    assert "50000 layer ids, but at most 64" in capsys.readouterr().err
