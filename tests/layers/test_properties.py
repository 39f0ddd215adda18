# SPDX-License-Identifier: Apache-2.0
"""What holds for every input: total, deterministic, in range, explicit first, stable under its own result."""

from __future__ import annotations

import copy

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.layers import CapturePlan, PlanError, config_updates, resolve, stock_boundaries
from vllm_kimi_eagle3.layers.parse import NESTED_KEY, ORIGINAL_KEY, TOP_KEY

KEYS = [
    "architectures", "draft_vocab_size", "eagle_config", "hidden_size", "layer_ids", "model_type", "num_hidden_layers",
    "num_aux_hidden_states", "speculators_config", "speculators_model_type", "target_hidden_size", "text_config",
    "transformer_layer_config", "use_aux_hidden_state", "n_routed_experts", "dflash_config", "target_layer_ids",
    "dspark_target_layer_ids", TOP_KEY, ORIGINAL_KEY,
]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.sampled_from(["eagle3", "kimi_k2", "deepseek_v3", "Eagle3DeepseekV2ForCausalLM", "DeepseekV2ForCausalLM", ""]),
    st.text(max_size=8),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8)
IDS = st.lists(st.integers(-1, 66), max_size=6) | st.lists(st.integers(1, 60), min_size=3, max_size=3, unique=True).map(
    sorted
)


@st.composite
def targets(draw: st.DrawFn) -> dict:
    body = {"num_hidden_layers": draw(st.integers(1, 64)), "hidden_size": draw(st.sampled_from([32, 64]))}
    return draw(st.sampled_from([body, {"model_type": "kimi_k25", "text_config": body}]))


@st.composite
def drafters(draw: st.DrawFn) -> dict:
    """Mostly sensible drafter configs, so that many of them resolve."""
    drafter: dict = {}
    if draw(st.booleans()):
        drafter["hidden_size"] = draw(st.sampled_from([32, 64]))
    if draw(st.booleans()):
        drafter[TOP_KEY] = draw(IDS)
    if draw(st.booleans()):
        drafter["eagle_config"] = {draw(st.sampled_from([TOP_KEY, "layer_ids"])): draw(IDS)}
        if draw(st.booleans()):
            drafter["eagle_config"]["use_aux_hidden_state"] = draw(st.booleans())
    if draw(st.booleans()):
        drafter |= {"model_type": "kimi_k2", "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    return drafter


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "layer_rule": st.sampled_from(["output", "boundary"]),
        "last_boundary_capturable": st.booleans(),
        "fixed_fc_states": st.sampled_from([None, 3]),
    },
)


def attempt(*args: object, **options: object) -> CapturePlan | str:
    try:
        return resolve(*args, **options)  # type: ignore[arg-type]
    except PlanError as error:
        message = str(error)
        assert message and "\n" not in message and message.isascii()
        return message


@settings(max_examples=400)
@given(JSON | OBJECTS, JSON | OBJECTS, JSON, JSON)
def test_total_on_arbitrary_json(target, drafter, rule, ids):
    before = copy.deepcopy(drafter)
    attempt(target, drafter)
    attempt(target, drafter, layer_rule=rule, layer_ids=ids, pipeline_parallel_size=ids)
    attempt({"num_hidden_layers": 10, "hidden_size": 64}, drafter)
    assert repr(drafter) == repr(before)  # a NaN is not equal to itself


@settings(max_examples=200)
@given(st.sampled_from(["0.15.1", "0.21.0", "0.23.0", "0.24.0", "0.28.0", "0.33.0", "9.9"]), JSON, OBJECTS)
def test_stock_is_total_too(release, target, drafter):
    for shape in (target, {"num_hidden_layers": 10, "hidden_size": 64}):
        try:
            reading = stock_boundaries(release, shape, drafter)
        except PlanError:
            continue
        for runner in (reading.v1, reading.v2):
            assert runner.boundaries is None or all(1 <= boundary <= 64 for boundary in runner.boundaries)
            assert runner.boundaries is not None or runner.problem


@given(targets(), drafters(), OPTIONS)
def test_deterministic_and_in_range(target, drafter, options):
    plan = attempt(target, drafter, **options)
    assert plan == attempt(copy.deepcopy(target), copy.deepcopy(drafter), **options)
    if isinstance(plan, CapturePlan):
        body = target.get("text_config", target)
        assert all(0 <= boundary <= body["num_hidden_layers"] for boundary in plan.boundaries)
        assert list(plan.boundaries) == sorted(set(plan.boundaries))
        assert bool(plan.boundaries) == plan.use_aux_hidden_state
        assert plan.fc_width == (len(plan.boundaries) * body["hidden_size"] or None)
        assert plan.line() and "\n" not in plan.line()


@given(targets(), drafters(), OPTIONS, IDS)
def test_explicit_ids_always_win(target, drafter, options, ids):
    plan = attempt(target, drafter, **options, layer_ids=ids)
    if isinstance(plan, CapturePlan):
        shift = options.get("layer_rule") == "output"
        assert plan.decided_by == "explicit"
        assert plan.boundaries == tuple(layer + shift for layer in ids)


@given(targets(), drafters(), st.sampled_from(["output", "boundary"]))
def test_an_explicit_rule_always_wins(target, drafter, rule):
    plan = attempt(target, drafter, layer_rule=rule)
    if isinstance(plan, CapturePlan) and plan.use_aux_hidden_state:
        assert (plan.decided_by, plan.rule) == ("explicit", rule)
        if plan.ids is not None:
            assert plan.boundaries == tuple(layer + (rule == "output") for layer in plan.ids)


@given(targets(), drafters(), OPTIONS)
def test_a_plans_own_boundaries_resolve_to_themselves(target, drafter, options):
    plan = attempt(target, drafter, **options)
    assume(isinstance(plan, CapturePlan))
    options.pop("layer_rule", None)
    again = resolve(target, {**drafter, TOP_KEY: list(plan.boundaries)}, **options)
    assert again.boundaries == plan.boundaries
    if plan.boundaries:
        assert again.decided_by == "format"
        # Negative control: by the other rule they would be one off.
        shifted = attempt(target, {TOP_KEY: list(plan.boundaries)}, layer_rule="output")
        assert isinstance(shifted, str) or shifted.boundaries != plan.boundaries


@given(targets(), drafters(), OPTIONS)
def test_updated_configs_resolve_to_the_same_plan(target, drafter, options):
    plan = attempt(target, drafter, **options)
    assume(isinstance(plan, CapturePlan))
    updated = {**drafter, **config_updates(plan, drafter)}
    assert resolve(target, updated, **options) == plan
    # And every stock reader that gets as far as capturing takes it.
    if plan.boundaries and 0 not in plan.boundaries:
        for release in ("0.18.0", "0.22.0", "0.28.0", "0.33.0"):
            reading = stock_boundaries(release, target, updated)
            reachable = tuple(b for b in plan.boundaries if b < plan.num_layers or release >= "0.28.0")
            assert reading.v1.boundaries == reading.v2.boundaries == reachable
    assert NESTED_KEY not in updated
