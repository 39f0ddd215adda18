# SPDX-License-Identifier: Apache-2.0
"""Who decides, and what comes out: the corpus, the order of deciders, and what must be refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.layers import corpus
from vllm_kimi_eagle3.layers import (
    AlignmentRecord,
    CheckpointHeaders,
    PlanError,
    config_updates,
    default_boundaries,
    resolve,
)
from vllm_kimi_eagle3.layers.explain import disagreement, plan_text
from vllm_kimi_eagle3.layers.headers import TensorInfo
from vllm_kimi_eagle3.layers.parse import read_drafter, read_target
from vllm_kimi_eagle3.layers.resolve import default_outputs
from vllm_kimi_eagle3.layers.stock import RunnerReading, StockReading

KIMI = corpus.target("kimi-k2.5")
TEN = {"num_hidden_layers": 10, "hidden_size": 64}
NESTED = "eagle_config.eagle_aux_hidden_state_layer_ids"


def nested(*ids: object) -> dict:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}}


def top(*ids: object) -> dict:
    return {"eagle_aux_hidden_state_layer_ids": list(ids)}


def fc(inputs: int, dtype: str = "BF16", **more: TensorInfo) -> CheckpointHeaders:
    return CheckpointHeaders({"fc.weight": TensorInfo(dtype, (64, inputs), 0, 0), **more})


@pytest.mark.parametrize("name", corpus.DRAFTERS)
def test_corpus(name):
    expected = corpus.expected(name)
    target = corpus.target(expected["target"])
    assert len(expected["why"]) > 20
    if "error" in expected:
        with pytest.raises(PlanError, match=expected["error"]):
            resolve(target, corpus.drafter(name))
        return
    plan = resolve(target, corpus.drafter(name))
    data = plan.to_json()
    for key in ("ids", "ids_key", "rule", "decided_by", "boundaries"):
        assert data[key] == expected[key], key
    if expected["warning"] is None:
        assert plan.warnings == ()
    else:
        assert any(expected["warning"] in warning for warning in plan.warnings)
    # Negative control: the expectation can tell one layer off.
    assert [boundary + 1 for boundary in data["boundaries"]] != expected["boundaries"] or not expected["boundaries"]


@pytest.mark.parametrize("name", [name for name in corpus.DRAFTERS if "error" not in corpus.expected(name)])
def test_config_updates_make_every_reader_agree_and_are_idempotent(name):
    target, drafter = corpus.target(corpus.expected(name)["target"]), corpus.drafter(name)
    plan = resolve(target, drafter)
    updated = {**drafter, **config_updates(plan, drafter)}
    assert resolve(target, updated) == plan
    # The user's rule still means the checkpoint's own list, not the one that we wrote.
    for rule in ("output", "boundary"):
        assert outcome(target, updated, rule) == outcome(target, drafter, rule)
    assert config_updates(plan, updated) == config_updates(plan, drafter)
    if plan.boundaries:
        assert updated["eagle_aux_hidden_state_layer_ids"] == list(plan.boundaries)
        assert updated["num_aux_hidden_states"] * updated.get("target_hidden_size", 7168) == plan.fc_width
    json.dumps(updated)


def outcome(target: dict, drafter: dict, rule: str) -> object:
    try:
        return resolve(target, drafter, layer_rule=rule)
    except PlanError as error:
        return str(error)


def test_the_line_says_everything():
    plan = resolve(TEN, nested(3, 6, 8), layer_rule="output")
    assert plan.line() == (
        f"checkpoint ids [3, 6, 8] ({NESTED}), output rule (decided by explicit), "
        "boundaries (4, 7, 9) = outputs of layers 3, 6, 8"
    )
    assert resolve(TEN, {}, layer_ids=[4]).line() == (
        "explicit ids [4], boundary rule (decided by explicit), boundaries (4,) = output of layer 3"
    )
    assert "no auxiliary" in resolve(TEN, {"eagle_config": {"use_aux_hidden_state": False}}).line()


@pytest.mark.parametrize("layers", range(7, 130))
def test_both_default_triples_name_the_same_states(layers):
    target = {"num_hidden_layers": layers, "hidden_size": 64}
    outputs = resolve(target, nested(*default_outputs(layers)))
    boundaries = resolve(target, nested(*default_boundaries(layers)))
    assert (outputs.rule, boundaries.rule) == ("output", "boundary")
    assert outputs.decided_by == boundaries.decided_by == "default triple"
    assert outputs.boundaries == boundaries.boundaries == resolve(target, {}).boundaries


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_a_target_too_small_for_the_default_is_refused(layers):
    with pytest.raises(PlanError, match=rf"is senseless for a target of {layers} layers; pass layer_ids$"):
        resolve({"num_hidden_layers": layers, "hidden_size": 64}, {})


@pytest.mark.parametrize("ids", [(1, 29, 58), (2, 29, 57), (2, 30, 57), (2, 30), (30,), (1, 29, 57, 58)])
def test_nearly_a_default_triple_is_ambiguous(ids):
    plan = resolve(KIMI, nested(*ids))
    assert (plan.decided_by, plan.boundaries) == ("ambiguous", ids)
    (warning,) = plan.warnings
    assert str(ids) in warning and str(tuple(i + 1 for i in ids)) in warning and "calibrate" in warning


def test_the_default_triple_of_another_target_is_ambiguous():
    assert resolve(TEN, nested(1, 2, 4)).decided_by == "ambiguous"
    assert resolve(TEN, nested(1, 4, 6)).decided_by == "default triple"


def test_a_known_producer_needs_all_of_its_marks():
    marks = {"model_type": "kimi_k2", "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    assert resolve(KIMI, {**nested(2, 30, 58), **marks}).decided_by == "known producer"
    for missing in ({"model_type": "deepseek_v3"}, {"architectures": ["LlamaForCausalLMEagle3"]}):
        assert resolve(KIMI, {**nested(2, 30, 58), **marks, **missing}).decided_by == "default triple"
    # One mark off, and with another list, the producer's habit says nothing.
    assert resolve(KIMI, {**nested(3, 30, 58), **marks}).decided_by == "ambiguous"


def test_what_vllm_drops_from_a_speculators_config_is_not_read():
    speculators = {"speculators_config": {}, "speculators_model_type": "eagle3", "transformer_layer_config": {}}
    assert resolve(KIMI, {**speculators, **nested(3, 21, 44)}).decided_by == "default"
    kept = {**speculators, "transformer_layer_config": nested(3, 21, 44)}
    assert resolve(KIMI, kept).boundaries == (3, 21, 44)
    # With a model_type vLLM loads it as an ordinary config and drops nothing.
    assert resolve(KIMI, {**speculators, **nested(3, 21, 44), "model_type": "llama"}).boundaries == (3, 21, 44)
    assert resolve(KIMI, {**kept, "speculators_model_type": "peagle"}).boundaries == (3, 21, 44)


def record(**changes) -> AlignmentRecord:
    made = AlignmentRecord("0" * 64, (3, 6, 8), 10, (4, 7, 9), "output", {"-1": 0.2, "0": 0.3, "1": 0.5})
    return dataclasses.replace(made, **changes)


def test_order_of_deciders():
    drafter = nested(3, 6, 8)
    assert resolve(TEN, drafter).decided_by == "ambiguous"
    measured = resolve(TEN, drafter, alignment=record())
    assert (measured.decided_by, measured.boundaries) == ("alignment record", (4, 7, 9))
    assert "0.500" in measured.evidence
    chosen = resolve(TEN, drafter, alignment=record(), layer_rule="boundary")
    assert (chosen.decided_by, chosen.boundaries) == ("explicit", (3, 6, 8))
    assert "measured" in chosen.warnings[0]
    # A record beats the format too: the format says what the writer should have meant.
    assert resolve(TEN, top(3, 6, 8), alignment=record()).boundaries == (4, 7, 9)
    listed = resolve(TEN, drafter, layer_rule="output", layer_ids=[1, 2, 3])
    assert (listed.ids_key, listed.boundaries) == ("explicit", (2, 3, 4))


def test_a_record_for_something_else_is_not_used():
    for other in (record(ids=(2, 5, 7), boundaries=(3, 6, 8)), record(num_layers=12), record(ids=None)):
        plan = resolve(TEN, nested(3, 6, 8), alignment=other)
        assert plan.decided_by == "ambiguous"
        assert "not used" in plan.warnings[0]


def test_a_record_may_fit_neither_rule():
    plan = resolve(TEN, nested(3, 6, 8), alignment=record(boundaries=(2, 5, 7), rule=None))
    assert (plan.rule, plan.boundaries) == ("measured", (2, 5, 7))
    for boundaries in ((3, 6, 8), (1, 4, 6), (0, 5, 7), (5, 7, 10)):
        measured = record(ids=None, boundaries=boundaries, rule=None)
        assert resolve(TEN, {}, alignment=measured).boundaries == boundaries


@pytest.mark.parametrize("boundaries", [(2, 5), (2, 5, 7, 9)])
def test_a_record_of_another_count_is_shown_whole(boundaries):
    plan = resolve(TEN, nested(3, 6, 8), alignment=record(boundaries=boundaries, rule=None))
    rows = plan_text(plan, None).splitlines()[-len(boundaries) :]
    assert [row.split()[:3] for row in rows] == [[str(n), "-", str(b)] for n, b in enumerate(boundaries, 1)]


def test_stock_runners_that_differ_each_in_its_own_way():
    plan = resolve(TEN, nested(3, 6, 8))
    wrong, nothing = RunnerReading((2, 5, 7)), RunnerReading(None, "crashes")
    for v1, v2 in ((wrong, nothing), (nothing, wrong), (wrong, RunnerReading((1, 2, 3)))):
        assert disagreement(plan, StockReading("0.33.0", v1, v2, "V2")) == "all three differ"
    assert "neither" in disagreement(plan, StockReading("0.33.0", nothing, nothing, "V2"))


def test_fc_width_settles_the_count():
    assert resolve(TEN, top(1, 2, 3, 4, 5), headers=fc(5 * 64)).fc_width == 320
    with pytest.raises(PlanError, match="takes 192, 3 states"):
        resolve(TEN, top(1, 2, 3, 4, 5), headers=fc(3 * 64))
    with pytest.raises(PlanError, match="takes 320, 5 states"):
        resolve(TEN, {}, headers=fc(5 * 64))
    with pytest.raises(PlanError, match="no whole number"):
        resolve(TEN, {}, headers=fc(200))
    # A packed weight's shape says nothing, and the checkpoint's shape outranks the config's number.
    assert resolve(TEN, {}, headers=fc(96, "U8")).boundaries == (2, 5, 7)
    assert resolve(TEN, {"num_aux_hidden_states": 4}, headers=fc(192)).boundaries == (2, 5, 7)


def test_a_release_with_a_fixed_fc():
    assert resolve(TEN, top(2, 5, 7), fixed_fc_states=3).boundaries == (2, 5, 7)
    with pytest.raises(PlanError, match=r"0\.22"):
        resolve(TEN, top(2, 5), fixed_fc_states=3)


def test_what_the_release_can_capture():
    assert resolve(TEN, top(2, 5, 10)).boundaries == (2, 5, 10)
    with pytest.raises(PlanError, match=r"0\.25\.1"):
        resolve(TEN, top(2, 5, 10), last_boundary_capturable=False)
    assert resolve(TEN, top(0, 5, 7)).boundaries == (0, 5, 7)
    # By the output rule 0 is an ordinary layer and 10 doesn't exist.
    assert resolve(TEN, nested(0, 5, 7), layer_rule="output").boundaries == (1, 6, 8)
    # Nested and by no rule: no stock vLLM captures the embeddings, so its reading is nobody's.
    with pytest.raises(PlanError, match=r"names id 0.* or the output of layer 0; pass layer_rule output or boundary$"):
        resolve(TEN, nested(0, 5, 7))
    assert resolve(TEN, nested(0, 5, 7), layer_rule="boundary").boundaries == (0, 5, 7)
    with pytest.raises(PlanError, match="boundary 11"):
        resolve(TEN, top(2, 5, 10), layer_rule="output")
    with pytest.raises(PlanError, match="one stage"):
        resolve(TEN, top(2, 5, 7), pipeline_parallel_size=2)
    without = {"eagle_config": {"use_aux_hidden_state": False}}
    assert resolve(TEN, without, pipeline_parallel_size=2).boundaries == ()


def test_a_drafter_without_aux_states():
    without = {"eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [2, 5, 7]}}
    plan = resolve(TEN, without)
    assert (plan.boundaries, plan.fc_width, plan.use_aux_hidden_state) == ((), None, False)
    assert plan.outputs() == "no captured states"
    assert config_updates(plan, without) == {}
    assert "not used" in plan.warnings[0]
    with pytest.raises(PlanError, match="leave layer_ids out"):
        resolve(TEN, without, layer_ids=[1, 2, 3])
    assert any("fc.weight" in warning for warning in resolve(TEN, without, headers=fc(192)).warnings)
    for odd in (0, "false", None, [], 1):
        with pytest.raises(PlanError, match="true or false"):
            resolve(TEN, {"eagle_config": {"use_aux_hidden_state": odd}})


def test_a_drafter_of_another_width_gets_the_targets_width():
    plan = resolve(TEN, {"hidden_size": 32}, headers=fc(192))
    assert plan.warnings == ()
    assert config_updates(plan, {"hidden_size": 32})["target_hidden_size"] == 64
    assert "32" in resolve(TEN, {"hidden_size": 32}).warnings[0]
    assert "target_hidden_size" not in config_updates(plan, {"hidden_size": 64})


def test_missing_vocabulary_table():
    target = {**TEN, "vocab_size": 1000}
    drafter = {"draft_vocab_size": 100}
    assert "d2t" in resolve(target, drafter, headers=fc(192)).warnings[0]
    assert resolve(target, drafter, headers=fc(192, d2t=TensorInfo("I64", (100,), 0, 0))).warnings == ()


@pytest.mark.parametrize(
    "value",
    [
        [float("nan"), 1, 2],
        [True, 2, 3],
        ["2", "30"],
        [None],
        [[2], 3],
        {"2": 1},
        "2,30,58",
        7,
        True,
        1.5,
        [10**5000, 2, 3],
        [-(10**5000), 2, 3],
        [-1, 2, 3],
        [2, 5, 11],
        [5, 5, 7],
        [7, 5, 2],
    ],
)
@pytest.mark.parametrize("where", ["top", "nested", "explicit"])
def test_bad_ids_end_in_one_sentence(value, where):
    drafter = {}
    if where == "top":
        drafter = {"eagle_aux_hidden_state_layer_ids": value}
    if where == "nested":
        drafter = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": value}}
    with pytest.raises(PlanError) as caught:
        resolve(TEN, drafter, layer_ids=value if where == "explicit" else None)
    message = str(caught.value)
    assert message.isascii() and "\n" not in message and len(message) < 400
    assert "layer_ids" in message


@pytest.mark.parametrize(
    "target",
    [
        {},
        {"num_hidden_layers": 10},
        {"hidden_size": 64},
        {"num_hidden_layers": 0, "hidden_size": 64},
        {"num_hidden_layers": 10**9, "hidden_size": 64},
        {"num_hidden_layers": True, "hidden_size": 64},
        {"num_hidden_layers": "61", "hidden_size": 64},
        {"num_hidden_layers": 61, "hidden_size": float("inf")},
        {"text_config": []},
        [],
        None,
        "kimi",
    ],
)
def test_bad_targets(target):
    with pytest.raises(PlanError, match="target"):
        resolve(target, {})


@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_experts_by_each_of_their_names(key):
    assert [read_target({**TEN, key: count}).moe for count in (0, 1, 8, "8", None)] == [False, True, True, False, False]


@pytest.mark.parametrize("value", [0, -1, True, 7.0, "7", None, (1 << 30) + 1])
def test_a_vocabulary_of_no_size_is_none(value):
    """What only serves a warning may be missing: vLLM itself says what it thinks of it."""
    assert read_target({**TEN, "vocab_size": value}).vocab_size is None
    assert read_drafter({"draft_vocab_size": value}).draft_vocab_size is None


def test_the_limits_themselves_are_sound():
    for size in (1, 1 << 30):
        assert read_target({**TEN, "vocab_size": size}).vocab_size == size
    largest = read_target({"num_hidden_layers": 10_000, "hidden_size": 1 << 20})
    assert (largest.num_layers, largest.hidden_size) == (10_000, 1 << 20)


def test_what_kind_of_model_it_is():
    for value, kept in (("kimi_k2", "kimi_k2"), (7, None), (None, None)):
        assert read_target({**TEN, "model_type": value}).model_type == kept
        assert read_drafter({"model_type": value}).model_type == kept
    # The text part's own name counts, as its layers do.
    assert read_target({"text_config": {**TEN, "model_type": "inner"}, "model_type": "outer"}).model_type == "inner"


def test_a_transformer_part_counts_in_speculators_configs_alone():
    drafter = {"hidden_size": 64, "transformer_layer_config": {"hidden_size": 32}}
    assert read_drafter(drafter).hidden_size == 64
    assert read_drafter({**drafter, "speculators_config": {}, "speculators_model_type": "eagle3"}).hidden_size == 32


def test_an_empty_list_is_said_wherever_it_stands():
    for drafter in (top(), nested(), {"eagle_config": {"layer_ids": []}}):
        (warning,) = resolve(TEN, drafter).warnings
        assert warning.endswith("is an empty list, which vLLM reads as no list at all")


def test_bad_rule_and_empty_ids():
    with pytest.raises(PlanError, match="'output' or 'boundary'"):
        resolve(TEN, {}, layer_rule="outputs")
    with pytest.raises(PlanError, match="empty"):
        resolve(TEN, {}, layer_ids=[])
    with pytest.raises(PlanError, match="eagle_config"):
        resolve(TEN, {"eagle_config": [1]})
