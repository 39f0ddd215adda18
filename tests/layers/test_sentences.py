# SPDX-License-Identifier: Apache-2.0
"""Every sentence and every plan, word by word, as ``tests/data/sentences.json`` has them.

What a person reads at three in the morning is an interface, and what other tests look for in it is a word or two. Write
the file anew with ``REWRITE=1``, and read the difference as a user would.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.layers import corpus
from vllm_kimi_eagle3.layers import (
    AlignmentRecord,
    CheckpointHeaders,
    PlanError,
    alignment,
    config_updates,
    explain,
    files,
    read_headers,
    resolve,
    stock_boundaries,
)
from vllm_kimi_eagle3.layers.headers import TensorInfo, read_header
from vllm_kimi_eagle3.layers.parse import describe

GOLDEN = corpus.DATA / "sentences.json"
RELEASES = ("0.15.0", "0.17.1", "0.19.1", "0.21.0", "0.24.0", "0.28.0", "0.33.0", "0.99.0")
TEN = {"num_hidden_layers": 10, "hidden_size": 64, "vocab_size": 320}
IDS = "eagle_aux_hidden_state_layer_ids"
RATES = {"1": 0.5, "-1": 0.25, "0": 0.375}
RECORD = AlignmentRecord("ab" * 32, (3, 6, 8), 10, (4, 7, 9), "output", RATES, {"0": (0.25, 0.5)})
FC = {"fc.weight": TensorInfo("F16", (4, 192), 0, 0)}


def nested(*ids: Any, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {IDS: list(ids), **more}}


def told(call: Callable[[], Any]) -> Any:
    """A result, or the sentence in its place."""
    try:
        return call()
    except PlanError as error:
        return f"PlanError: {error}"


def plan(target: Any, drafter: Any, headers: CheckpointHeaders | None = None, **options: Any) -> Any:
    """Everything that is said of one pair: the plan, its line, its text, and what would be written."""

    def tell() -> dict[str, Any]:
        found = resolve(target, drafter, headers=headers, **options)
        told_of = {"plan": found.to_json(), "text": explain.plan_text(found, headers)}
        if options:
            return told_of
        stock = {r: told(lambda r=r: stock_boundaries(r, target, drafter)) for r in RELEASES}
        texts = {r: s if isinstance(s, str) else explain.stock_text(found, s, " (x)") for r, s in stock.items()}
        return {**told_of, "stock": texts, "updates": config_updates(found, drafter)}

    return told(tell)


def plans() -> Iterator[tuple[str, Any]]:
    """Pairs: the corpus, and what no real checkpoint has."""
    for name in corpus.DRAFTERS:
        target, drafter = corpus.target(corpus.expected(name)["target"]), corpus.drafter(name)
        yield f"corpus {name}", plan(target, drafter)
        for rule in ("output", "boundary"):
            yield f"corpus {name} by {rule} rule", plan(target, drafter, layer_rule=rule)
    with_fc, with_table = CheckpointHeaders(FC), CheckpointHeaders({**FC, "model.d2t": TensorInfo("I64", (9,), 0, 0)})
    packed = CheckpointHeaders({"midlayer.fc.weight": TensorInfo("U8", (4, 96), 0, 0)})
    wide = CheckpointHeaders({"fc.weight": TensorInfo("BF16", (4, 320), 0, 0)})
    odd = CheckpointHeaders({"fc.weight": TensorInfo("F32", (4, 100), 0, 0)})
    flat = CheckpointHeaders({"fc.weight": TensorInfo("F32", (192,), 0, 0)})
    without = nested(2, 5, 7, use_aux_hidden_state=False)
    cases: dict[str, tuple[Any, ...]] = {
        "nothing": ({},),
        "nothing, with fc": ({}, with_fc),
        "nothing, packed": ({}, packed),
        "nothing, flat fc": ({}, flat),
        "nothing, wide fc": ({}, wide),
        "nothing, odd fc": ({}, odd),
        "small vocabulary": ({"draft_vocab_size": 100}, with_fc),
        "small vocabulary with table": ({"draft_vocab_size": 100}, with_table),
        "large vocabulary": ({"draft_vocab_size": 320}, with_fc),
        "ambiguous": (nested(3, 6, 8),),
        "out of order": (nested(8, 6, 3),),
        "twice": (nested(3, 3, 8),),
        "beyond": (nested(3, 6, 12),),
        "negative": (nested(-1, 6, 8),),
        "the last": (nested(3, 6, 10),),
        "the first": ({IDS: [0, 5, 7]},),
        "old SpecForge": (nested(1, 5, 6),),
        "one": ({IDS: [4]},),
        "five": ({IDS: [1, 2, 3, 4, 5]},),
        "top, unshifted default": ({IDS: [1, 4, 6]},),
        "empty": ({IDS: []},),
        "layer_ids": ({"eagle_config": {"layer_ids": [3, 6, 8]}},),
        "two lists that agree": ({IDS: [4, 7, 9], **nested(3, 6, 8)},),
        "two lists that don't": ({IDS: [4, 7, 9], **nested(3, 6, 7)},),
        "no aux": (without,),
        "no aux, with fc": (without, with_fc),
        "no aux, no list": (nested(use_aux_hidden_state=False),),
        "other width": ({"hidden_size": 32},),
        "null width": ({"hidden_size": 64, "target_hidden_size": None},),
        "another target's width": ({"target_hidden_size": 128},),
        "count": ({"num_aux_hidden_states": 4},),
        "no count": ({"num_aux_hidden_states": 0},),
        "a width of letters": ({"hidden_size": "64"},),
        "a negative width": ({"target_hidden_size": -1},),
        "count, with fc": ({"num_aux_hidden_states": 4}, with_fc),
        "speculators of another kind": ({"speculators_config": {}, "speculators_model_type": "mtp"},),
        "eagle_config is a list": ({"eagle_config": [1]},),
        "use_aux is a number": ({"eagle_config": {"use_aux_hidden_state": 1}},),
        "original is a list": ({"kimi_eagle3_original": [1]},),
        "a list": ([],),
        "ids are a text": ({IDS: "2,5,7"},),
        "an id is a float": ({IDS: [2.0, 5, 7]},),
        "an id is true": (nested(True, 5, 7),),
        "an id is huge": ({IDS: [10**400, 2]},),
    }
    for name, (drafter, *more) in cases.items():
        yield name, plan(TEN, drafter, *more)
    options: dict[str, dict[str, Any]] = {
        "rule": {"layer_rule": "output"},
        "unknown rule": {"layer_rule": "outputs"},
        "ids": {"layer_ids": [4, 7, 9]},
        "ids by rule": {"layer_ids": [3, 6, 8], "layer_rule": "output"},
        "no ids": {"layer_ids": []},
        "ids are a text": {"layer_ids": "x"},
        "record": {"alignment": RECORD},
        "record and rule": {"alignment": RECORD, "layer_rule": "boundary"},
        "record and same rule": {"alignment": RECORD, "layer_rule": "output"},
        "record of neither rule": {
            "alignment": dataclasses.replace(RECORD, rule=None, boundaries=(2, 5, 9), hit_rates={})
        },
        "record of other layers": {"alignment": dataclasses.replace(RECORD, num_layers=12)},
        "record of other ids": {"alignment": dataclasses.replace(RECORD, ids=None)},
        "stages": {"pipeline_parallel_size": 2},
        "fixed fc": {"fixed_fc_states": 4},
        "no last": {"layer_ids": [2, 5, 10], "last_boundary_capturable": False},
        "embeddings": {"layer_ids": [0, 5, 7]},
    }
    for name, chosen in options.items():
        yield f"option {name}", plan(TEN, nested(3, 6, 8), **chosen)
        yield f"option {name}, no aux", plan(TEN, without, **chosen)
    targets: dict[str, Any] = {
        "none": {},
        "a list": [],
        "no width": {"num_hidden_layers": 10},
        "no layers": {"hidden_size": 64},
        "too many layers": {"num_hidden_layers": 10_001, "hidden_size": 64},
        "no layer": {"num_hidden_layers": 0, "hidden_size": 64},
        "too wide": {"num_hidden_layers": 10, "hidden_size": (1 << 20) + 1},
        "six layers": {"num_hidden_layers": 6, "hidden_size": 64},
        "text": {"text_config": {"num_hidden_layers": 10}, "hidden_size": 64},
        "text without layers": {"text_config": {}, "num_hidden_layers": 10, "hidden_size": 64},
        "experts": {**TEN, "n_routed_experts": 8, "architectures": ["A", 7, "B"], "model_type": 7},
        "dense v2": {**TEN, "architectures": ["DeepseekV2ForCausalLM"]},
    }
    for name, target in targets.items():
        yield f"target {name}", plan(target, nested(3, 6, 8))


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: dict[str, tuple[Any, bytes]] = {
    "empty": ({}, b""),
    "good": ({"a": GOOD, "__metadata__": {"format": "pt"}}, b"\0" * 8),
    "a list": ([], b""),
    "null": ({"a": None}, b""),
    "no dtype": ({"a": {**GOOD, "dtype": 7}}, b"\0" * 8),
    "negative": ({"a": {**GOOD, "shape": [-2]}}, b"\0" * 8),
    "true": ({"a": {**GOOD, "shape": [True, 2]}}, b"\0" * 8),
    "huge": ({"a": {**GOOD, "shape": [1 << 63]}}, b"\0" * 8),
    "not huge": ({"a": {**GOOD, "shape": [(1 << 63) - 1]}}, b"\0" * 8),
    "sixteen": ({"a": {**GOOD, "shape": [1] * 15 + [2]}}, b"\0" * 8),
    "seventeen": ({"a": {**GOOD, "shape": [1] * 16 + [2]}}, b"\0" * 8),
    "unknown dtype": ({"a": {**GOOD, "dtype": "F3", "shape": [3]}}, b"\0" * 8),
    "three offsets": ({"a": {**GOOD, "data_offsets": [0, 8, 8]}}, b"\0" * 8),
    "backwards": ({"a": {**GOOD, "data_offsets": [8, 0]}}, b"\0" * 8),
    "too short": ({"a": GOOD}, b"\0" * 7),
    "too long": ({"a": GOOD}, b"\0" * 9),
    "another size": ({"a": {**GOOD, "shape": [3]}}, b"\0" * 8),
    "a hole": ({"a": GOOD, "b": {**GOOD, "data_offsets": [9, 17]}}, b"\0" * 17),
    "shared": ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, b"\0" * 12),
    "two": ({"b": {**GOOD, "data_offsets": [8, 16]}, "a": GOOD}, b"\0" * 16),
    **{f"bits of {dtype}": ({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, 8]}}, b"\0" * 8) for dtype in
       ("F64", "F32", "BF16", "F8_E4M3", "U8", "F6_E2M3", "F4", "C64")},
}  # fmt: skip
RAW: dict[str, bytes] = {
    "nothing": b"",
    "seven": b"\0" * 7,
    "one": (1).to_bytes(8, "little") + b"{",
    "two": (2).to_bytes(8, "little") + b"{}",
    "more than is there": (3).to_bytes(8, "little") + b"{}",
    "the largest": (4 << 20).to_bytes(8, "little") + b"{}" + b" " * ((4 << 20) - 2),
    "larger": ((4 << 20) + 1).to_bytes(8, "little") + b"{}" + b" " * ((4 << 20) - 1),
}
TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"a": [1',
    "list": b"[1]",
    "bytes": b"\xff",
    "nan": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "twice": b'{"a": 1, "b": 2, "b": 3, "a": 4}',
    "long key twice": b'{"' + b"k" * 100 + b'": 1, "' + b"k" * 100 + b'": 2}',
    "deep": b'{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    "values": b'{"a": [' + b"0," * 99_997 + b"0]}",
    "too many values": b'{"a": [' + b"0," * 99_999 + b"0]}",
    "letters": '{"ä": "\\u0041"}'.encode(),
}
CHANGES: list[dict[str, Any]] = [
    {}, {"format": 2}, {"key": "0" * 64}, {"key": None}, {"num_layers": True}, {"num_layers": 0}, {"num_layers": 1},
    {"num_layers": 10_000}, {"num_layers": 10_001}, {"num_layers": "10"}, {"ids": "3,21"}, {"ids": None},
    {"ids": [3, 6, True]}, {"boundaries": None}, {"boundaries": []}, {"boundaries": [4, 7, 11]},
    {"boundaries": [-1, 7, 9]}, {"boundaries": [7, 4, 9]}, {"boundaries": [4, 4, 9]}, {"boundaries": [3, 6, 8]},
    {"ids": None, "boundaries": [0, 5, 10]}, {"rule": "boundary"}, {"rule": "outputs"}, {"rule": None},
    {"rule": "boundary", "boundaries": [3, 6, 8]}, {"hit_rates": {"0": 1.5}}, {"hit_rates": {"0": -0.5}},
    {"hit_rates": {"0": 0, "1": 1}}, {"hit_rates": {"0": True}}, {"hit_rates": {"0": "1"}}, {"hit_rates": {"2": 0.5}},
    {"hit_rates": []}, {"intervals": {"0": [0.5, 0.4]}}, {"intervals": {"0": [0.5, 0.5]}}, {"intervals": {"0": 0.5}},
    {"intervals": {"0": [0.5]}}, {"intervals": {"0": [0, 2]}}, {"intervals": []}, {"measured_on": "x" * 600},
    {"measured_on": 7},
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 7, -1.5, 1 << 64, (1 << 64) - 1, "x" * 40, "x" * 41, "ä\n", [1, [2], {}, "x"], (1,),
    list(range(8)), list(range(9)), {"a": 1}, b"x", {1},
]  # fmt: skip


def every(folder: Path) -> dict[str, Any]:
    """All cases, by name; the folder's own path is written as FOLDER."""
    said: dict[str, Any] = {}
    for name, found in plans():
        said[f"plan: {name}"] = found
    ten = resolve(TEN, nested(3, 6, 8))
    for boundaries in ((1, 4, 6), (4, 7, 9), (5, 8, 10), (3, 6, 9), (3, 6)):
        moved = dataclasses.replace(ten, boundaries=boundaries)
        said[f"stock and {boundaries}"] = explain.stock_text(
            moved, stock_boundaries("0.33.0", TEN, nested(3, 6, 8)), ""
        )
    for release in ("0.14.9", "1", "v0.20.1rc1", "0.33", "x0.33.0", "0.333333.0", "0.26.1.dev3+g1"):
        said[f"release: {release}"] = told(lambda r=release: stock_boundaries(r, TEN, {}).to_json())
    path = folder / "model.safetensors"
    for name, content in RAW.items():
        path.write_bytes(content)
        said[f"header: {name}"] = told(lambda: shown(read_header(path)))
    for name, (head, data) in HEADERS.items():
        text = json.dumps(head).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        said[f"header: {name}"] = told(lambda: shown(read_header(path)))
    text = json.dumps({"a": GOOD}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    said["headers: one"] = told(lambda: (read_headers(folder) or CheckpointHeaders({})).digest)
    (folder / "b.safetensors").write_bytes(path.read_bytes())
    said["headers: the same twice"] = told(lambda: read_headers(folder))
    for number in range(300):
        (folder / f"{number}.safetensors").touch()
    said["headers: many files"] = told(lambda: read_headers(folder))
    said["headers: no folder"] = told(lambda: read_headers(folder / "none"))
    for other in folder.iterdir():
        other.unlink()
    config = folder / "config.json"
    for name, content in TEXTS.items():
        config.write_bytes(content)
        said[f"config: {name}"] = told(lambda: sorted(files.read_config(folder)))
        said[f"config by its own path: {name}"] = told(lambda: sorted(files.read_config(config)))
    for size in (100, 101):
        config.write_bytes(b" " * size)
        said[f"config: {size} bytes"] = told(lambda: len(files.read_bytes(config, 100)))
    config.unlink()
    said["config: none"] = told(lambda: files.read_config(folder))
    config.mkdir()
    said["config: a folder"] = told(lambda: files.read_config(folder))
    config.rmdir()
    for name, link in {"out": "/etc/hostname", "circle": "config.json", "to nothing": "nothing"}.items():
        config.symlink_to(link)
        said[f"config: a link {name}"] = told(lambda: files.read_config(folder))
        config.unlink()
    said["config: no path"] = told(lambda: files.read_config(folder / "a\0b"))
    for number, change in enumerate(CHANGES):
        data = {**RECORD.to_json(), **change}
        said[f"record {number}: {str(change)[:60]}"] = told(
            lambda data=data: alignment.parse(data, RECORD.key, "HERE").to_json()
        )
    said["record: summary"] = [RECORD.summary(), dataclasses.replace(RECORD, hit_rates={"x": 1.0, "1": 0.5}).summary()]
    for key in ("", "A" * 64, "0" * 63, "0" * 63 + "\n", "f" * 64, "0123456789abcdef" * 4):
        said[f"key {key!a}"] = told(lambda key=key: str(alignment.record_path(key, folder)))
    saved = alignment.save(RECORD, folder)
    said["record: file"] = saved.read_text()
    saved.unlink()
    saved.mkdir()
    said["record: a folder"] = told(lambda: alignment.load(RECORD.key, folder))
    saved.rmdir()
    said["record: none"] = told(lambda: alignment.load(RECORD.key, folder))
    saved.parent.rmdir()
    saved.parent.touch()
    said["record: no folder"] = told(lambda: alignment.load(RECORD.key, folder))
    for value in VALUES:
        said[f"describe {str(value)[:30]!a} {type(value).__name__} {len(str(value))}"] = describe(value)
    pairs = [({}, {}), (TEN, nested(3, 6, 8)), ({"text_config": TEN}, {"model_type": "eagle", **nested(3, 6, 8)})]
    for target, drafter in pairs:
        for digest in (None, "ab"):
            headers = CheckpointHeaders({}, digest)
            said[f"key of {len(target)} {len(drafter)} {digest}"] = told(
                lambda t=target, d=drafter, h=headers: alignment.content_key(t, d, h)
            )
    return json.loads(json.dumps(said).replace(str(folder), "FOLDER"))


def shown(tensors: dict[str, TensorInfo]) -> dict[str, Any]:
    return {name: dataclasses.astuple(info) for name, info in tensors.items()}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = every(tmp_path_factory.mktemp("sentences"))
    if os.environ.get("REWRITE"):
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return found


def test_word_by_word(said: dict[str, Any]) -> None:
    expected = json.loads(GOLDEN.read_text())
    assert sorted(said) == sorted(expected)
    different = {name: (said[name], expected[name]) for name in expected if said[name] != expected[name]}
    assert not different, json.dumps(different, indent=1)[:4000]


def test_each_refusal_is_one_sentence_of_printable_letters(said: dict[str, Any]) -> None:
    refusals = [text for text in said.values() if isinstance(text, str) and text.startswith("PlanError: ")]
    assert len(refusals) > 100
    for text in refusals:
        assert text.isascii() and text.isprintable() and len(text) < 600, text
