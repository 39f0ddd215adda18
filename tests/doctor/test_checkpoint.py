# SPDX-License-Identifier: Apache-2.0
"""Each check of a pair is silent on a good checkpoint and fires on one that is bad in exactly one way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.layers import corpus
from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.doctor.checkpoint import CHECKS, Pair, check_pair, families, read_pair
from vllm_kimi_eagle3.doctor.tensors import integers
from vllm_kimi_eagle3.layers import CheckpointHeaders, PlanError

H, V, SMALL, HEADS, DIM, INNER = 16, 40, 12, 2, 8, 24
Weights = dict[str, Any]


def target_config(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 10,
        "hidden_size": H,
        "vocab_size": V,
        "max_position_embeddings": 64,
        "torch_dtype": "bfloat16",
        **more,
    }


def drafter_config(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": DIM,
        "intermediate_size": INNER,
        "vocab_size": V,
        "draft_vocab_size": SMALL,
        "max_position_embeddings": 64,
        "torch_dtype": "float16",
        "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
        **more,
    }


def zeros(*shape: int) -> Any:
    return numpy.zeros(shape, numpy.float16)


def weights() -> Weights:
    picked = numpy.arange(SMALL) * 3  # draft id i is token 3 i
    mask = numpy.zeros(V, bool)
    mask[picked] = True
    one = "midlayer."
    return {
        "fc.weight": zeros(H, 3 * H),
        "norm.weight": zeros(H),
        "lm_head.weight": zeros(SMALL, H),
        "d2t": picked - numpy.arange(SMALL),
        "t2d": mask,
        f"{one}hidden_norm.weight": zeros(H),
        f"{one}input_layernorm.weight": zeros(H),
        f"{one}post_attention_layernorm.weight": zeros(H),
        f"{one}self_attn.q_proj.weight": zeros(HEADS * DIM, 2 * H),
        f"{one}self_attn.k_proj.weight": zeros(DIM, 2 * H),
        f"{one}self_attn.v_proj.weight": zeros(DIM, 2 * H),
        f"{one}self_attn.o_proj.weight": zeros(H, HEADS * DIM),
        f"{one}mlp.gate_proj.weight": zeros(INNER, H),
        f"{one}mlp.up_proj.weight": zeros(INNER, H),
        f"{one}mlp.down_proj.weight": zeros(H, INNER),
    }


def write(folder: Path, config: dict[str, Any], tensors: Weights | None = None, readme: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file({name: numpy.ascontiguousarray(value) for name, value in tensors.items()}, folder / "a.safetensors")
    if readme is not None:
        (folder / "README.md").write_text(readme)
    return folder


def without(*names: str) -> Callable[[Weights], Weights]:
    return lambda w: {name: value for name, value in w.items() if name not in names}


def change(**new: Any) -> Callable[[Weights], Weights]:
    return lambda w: {**w, **{name.replace("__", "."): value for name, value in new.items()}}


def offsets(change_at: dict[int, int]) -> Callable[[Weights], Weights]:
    def edit(w: Weights) -> Weights:
        table = w["d2t"].copy()
        for index, value in change_at.items():
            table[index] = value
        return {**w, "d2t": table}

    return edit


def same(w: Weights) -> Weights:
    return w


IDS = {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}
MLA = {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}

# name: (check that must fire, its level, a word of its message, target keys, drafter keys, change of the weights)
BAD: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any], Callable[[Weights], Weights]]] = {
    "another target": ("target-served", "warning", "Qwen3", {"architectures": ["Qwen3ForCausalLM"]}, {}, same),
    "not a drafter": ("model-type", "error", "LlamaForCausalLM", {}, {"architectures": ["LlamaForCausalLM"]}, same),
    "name and weights differ": ("model-type", "error", "ordinary attention", {}, MLA, same),
    "no model type": ("model-type", "error", "no model_type", {}, {"model_type": None}, same),
    "ids beyond the target": (
        "layers",
        "error",
        "12",
        {},
        {"eagle_aux_hidden_state_layer_ids": [2, 5, 12]},
        same,
    ),
    "ambiguous ids": (
        "layers",
        "warning",
        "not certain",
        {},
        {
            "eagle_aux_hidden_state_layer_ids": None,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 5, 8]},
        },
        same,
    ),
    "fc of another target": ("fc-width", "error", "no whole number", {}, {}, change(fc__weight=zeros(H, 50))),
    "fc of another drafter": ("fc-width", "error", "hidden_size", {}, {}, change(fc__weight=zeros(H + 2, 3 * H))),
    "no fc": ("fc-width", "error", "no fc.weight", {}, {}, without("fc.weight")),
    "another vocabulary": ("draft-vocabulary", "error", "50", {}, {"vocab_size": 50}, same),
    "more drafts than tokens": ("draft-vocabulary", "error", "41", {}, {"draft_vocab_size": V + 1}, same),
    "d2t of another size": ("draft-vocabulary", "error", "d2t has shape", {}, {"draft_vocab_size": 13}, same),
    "no d2t": ("draft-vocabulary", "error", "no d2t", {}, {}, without("d2t")),
    "d2t out of range": ("d2t-range", "error", "token 110", {}, {}, offsets({11: 99})),
    "d2t negative": ("d2t-range", "error", "token -3", {}, {}, offsets({0: -3})),
    "d2t twice": ("d2t-unique", "error", "11 different", {}, {}, offsets({1: 2, 2: 1})),
    "d2t out of order": ("d2t-order", "warning", "6 for id 1, then 3 for id 2", {}, {}, offsets({1: 5, 2: 1})),
    "d2t of ids": ("d2t-range", "error", "draft id", {}, {}, change(d2t=numpy.arange(SMALL) * 3 + 5)),
    "d2t in floats": ("d2t", "error", "integers were expected", {}, {}, change(d2t=numpy.zeros(SMALL, "f4"))),
    "t2d of another run": ("t2d", "warning", "not the 12", {}, {}, change(t2d=numpy.ones(V, bool))),
    "embeddings too few": ("embed-tokens", "error", "[39, 16]", {}, {}, change(embed_tokens__weight=zeros(39, H))),
    "embeddings too wide": ("embed-tokens", "error", "[40, 17]", {}, {}, change(embed_tokens__weight=zeros(V, 17))),
    "no embeddings to borrow": ("embed-tokens", "error", "16 wide", {}, {"hidden_size": 32}, same),
    "no lm_head": ("lm-head", "error", "no lm_head", {}, {}, without("lm_head.weight")),
    "lm_head too small": ("lm-head", "error", "[11, 16]", {}, {}, change(lm_head__weight=zeros(11, H))),
    "norm without switch": (
        "norms",
        "error",
        "does not set norm_before_fc",
        {},
        {},
        change(input_norm__weight=zeros(48)),
    ),
    "switch without norm": ("norms", "error", "sets fc_norm", {}, {"fc_norm": True}, same),
    "too few norms": (
        "norms",
        "error",
        "2 fc_norm",
        {},
        {"fc_norm": True},
        change(fc_norm__0__weight=zeros(H), fc_norm__1__weight=zeros(H)),
    ),
    "unknown tensor": ("tensors", "error", "adapter", {}, {}, change(adapter__weight=zeros(2))),
    "doubled prefix": (
        "tensors",
        "warning",
        "leading `model.`",
        {},
        {},
        lambda w: {("model." + n if n == "norm.weight" else n): v for n, v in w.items()},
    ),
    "missing tensor": ("tensors", "error", "mlp.up_proj", {}, {}, without("midlayer.mlp.up_proj.weight")),
    "wrong shape": ("tensors", "error", "q_proj", {}, {"num_attention_heads": 4}, same),
    "float16": ("dtype", "warning", "float16", {"torch_dtype": "float16"}, {}, same),
    "config of another precision": ("dtype", "info", "bfloat16", {}, {"torch_dtype": "bfloat16"}, same),
    "short drafter": ("max-length", "warning", "is 32", {}, {"max_position_embeddings": 32}, same),
    "short yarn": (
        "max-length",
        "warning",
        "knows 32 positions",
        {},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
        same,
    ),
    "other verifier": (
        "trained-for",
        "warning",
        "Kimi-K2.5",
        {"vocab_size": V, "_name_or_path": "deepseek-ai/DeepSeek-V3"},
        {"base_model": "moonshotai/Kimi-K2.5"},
        same,
    ),
}


def findings(folder: Path, target: dict[str, Any], drafter: dict[str, Any], edit: Callable[[Weights], Weights]) -> Any:
    config = {key: value for key, value in drafter_config(**drafter).items() if value is not None}
    paths = write(folder / "deepseek-v3", target_config(**target)), write(folder / "drafter", config, edit(weights()))
    return check_pair(read_pair(*paths))


def test_the_good_pair_is_silent(tmp_path: Path) -> None:
    found = findings(tmp_path, {}, {}, same)
    assert [f for f in found if f.level != "ok"] == []
    assert {f.id for f in found} >= {bad[0] for bad in BAD.values()} - {"d2t"}, "a check that never speaks"


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_pair_is_named(tmp_path: Path, name: str) -> None:
    check, level, word, target, drafter, edit = BAD[name]
    found = findings(tmp_path, target, drafter, edit)
    hits = [f for f in found if f.id == check and f.level == level and word in f.message]
    assert hits, [f for f in found if f.level != "ok"]
    if level in ("warning", "error"):
        assert hits[0].why or check in ("d2t", "layers")
        assert hits[0].do or check in ("d2t", "layers")


def test_absolute_ids_are_recognised(tmp_path: Path) -> None:
    found = findings(tmp_path, {}, {}, change(d2t=numpy.arange(SMALL) * 3 + 5))
    assert any("look like target ids" in f.do for f in found)


def test_every_check_has_a_negative_control() -> None:
    checks = {"trained-for" if c.__name__ == "trained_for" else c.__name__.replace("_", "-") for c in CHECKS}
    assert checks <= {bad[0] for bad in BAD.values()} | {"layers"}


def test_mla_and_the_mtp_trap(tmp_path: Path) -> None:
    more = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "head_dim": None}
    sizes = {"kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 3, "v_head_dim": 5}

    def mla(w: Weights) -> Weights:
        kept = {name: value for name, value in w.items() if "self_attn" not in name}
        one = "midlayer.self_attn."
        return {
            **kept,
            f"{one}q_proj.weight": zeros(HEADS * 5, 2 * H),
            f"{one}kv_a_proj_with_mqa.weight": zeros(6, 2 * H),
            f"{one}kv_a_layernorm.weight": zeros(4),
            f"{one}kv_b_proj.weight": zeros(HEADS * 8, 4),
            f"{one}o_proj.weight": zeros(H, HEADS * 5),
        }

    found = findings(tmp_path, {}, {**more, **sizes}, mla)
    assert [(f.id, f.level) for f in found if f.level != "ok"] == [("model-type", "info")]
    assert "D18" in next(f.why for f in found if f.id == "model-type")
    found = findings(
        tmp_path, {}, {**more, **sizes, "norm_before_fc": True}, lambda w: mla(change(input_norm__weight=zeros(48))(w))
    )
    assert any(f.id == "norms" and f.level == "error" for f in found)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("moonshotai/Kimi-K2.5", {"Kimi-K2.5"}),
        ("AQ-MedAI/Kimi-K25-eagle3", {"Kimi-K2.5"}),
        ("AQ-MedAI/Kimi-K2-Instruct-eagle3", {"Kimi-K2"}),
        ("moonshotai/Kimi-K2-Instruct-0905", {"Kimi-K2"}),
        ("kimi-k2-0905", {"Kimi-K2"}),
        ("lightseekorg/kimi-k2.6-eagle3.1-mla", {"Kimi-K2.6"}),
        ("deepseek-ai/DeepSeek-R1", {"DeepSeek-V3"}),
        ("deepseek-ai/DeepSeek-V2-Lite", {"DeepSeek-V2"}),
        ("some/thing", set()),
    ],
)
def test_families(name: str, expected: set[str]) -> None:
    assert families(name) == expected


def test_the_origin_s_control_drafter_is_recognised(tmp_path: Path) -> None:
    """A drafter for K2 on K2.5: the experiment that misled, told from the model card alone."""
    target = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": target_config(vocab_size=V)}
    folder = write(tmp_path / "Kimi-K2.5", target)
    card = "---\nlicense: apache-2.0\nbase_model:\n- moonshotai/Kimi-K2-Instruct\n---\n# A drafter\n"
    drafter = write(tmp_path / "drafter", drafter_config(), weights(), card)
    (found,) = [f for f in check_pair(read_pair(folder, drafter)) if f.id == "trained-for"]
    assert found.level == "warning" and "Kimi-K2-Instruct" in found.message and "README" in found.message
    write(tmp_path / "drafter", drafter_config(), weights(), card.replace("Kimi-K2-Instruct", "Kimi-K2.5"))
    (found,) = [f for f in check_pair(read_pair(folder, drafter)) if f.id == "trained-for"]
    assert found.level == "ok"
    other = drafter_config(speculators_config={"verifier": {"architectures": ["Qwen3ForCausalLM"]}})
    write(tmp_path / "drafter", {**other, "speculators_model_type": "eagle3"}, weights(), "no card")
    (found,) = [f for f in check_pair(read_pair(folder, drafter)) if f.id == "trained-for"]
    assert found.level == "warning" and "Qwen3ForCausalLM" in found.message


def test_without_weights_it_says_so(tmp_path: Path) -> None:
    paths = write(tmp_path / "deepseek-v3", target_config()), write(tmp_path / "drafter", drafter_config())
    found = check_pair(read_pair(*paths))
    assert all(f.level in ("ok", "info") for f in found)
    assert any("no safetensors" in f.message for f in found)


@pytest.mark.parametrize("name", corpus.DRAFTERS)
def test_the_corpus_never_crashes(name: str) -> None:
    """Configs of real checkpoints and hostile ones: findings, or one sentence, and no alarm on the sound ones."""
    expected = corpus.expected(name)
    try:
        found = check_pair(read_pair(corpus.DATA / "targets" / expected["target"], corpus.DATA / "drafters" / name))
    except PlanError:
        return
    layers = [f for f in found if f.id == "layers"]
    assert ("error" in expected) == any(f.level == "error" for f in layers) or "fc" in expected.get("error", "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*drafter_config(), "eagle_config", "speculators_config", "transformer_layer_config", "fc_norm"])


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(KEYS, JSON, max_size=5), st.dictionaries(st.sampled_from(list(target_config())), JSON, max_size=3)
)
def test_any_config_gives_findings(drafter: dict[str, Any], target: dict[str, Any]) -> None:
    pair = Pair(target_config(**target), drafter_config(**drafter), Path(), CheckpointHeaders({}), "deepseek-v3")
    assert all(f.message for f in check_pair(pair))


def test_integers_are_read_back(tmp_path: Path) -> None:
    for kind in ("i8", "i4", "i2", "i1", "u1", "bool"):
        values = numpy.array([0, 1, 1, 0, 1]).astype(kind)
        write(tmp_path / kind, {}, {"model.d2t": values, "z": zeros(3)})
        assert list(integers(tmp_path / kind, "d2t") or []) == [0, 1, 1, 0, 1]
    assert integers(tmp_path / "i8", "t2d") is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = (
        write(tmp_path / "deepseek-v3", target_config()),
        write(tmp_path / "d", drafter_config(), weights()),
    )
    call = ["doctor", "--files-only", "--target", str(target), "--drafter", str(drafter)]
    assert cli.main([*call, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) >= {"vllm", "fixes", "checks"} and all(
        set(c) >= {"id", "level", "message"} for c in data["checks"]
    )
    assert cli.main(call) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    write(tmp_path / "d", drafter_config(), without("d2t")(weights()))
    assert cli.main(call) == 1
    assert "ERROR   draft-vocabulary" in capsys.readouterr().out
    for bad in (call[:-2], ["doctor", "--files-only"], [*call[:-1], str(tmp_path / "none")]):
        assert cli.main(bad) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1, captured.err
