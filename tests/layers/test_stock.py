# SPDX-License-Identifier: Apache-2.0
"""The table of what stock vLLM takes, against the source of every release.

The functions are the releases' own, compiled from their source: the ids' readers of both runners, the default getter,
the switch for auxiliary states, the speculators conversion, the target's capture loop, the width of ``fc``, and the
choice of the default runner. The objects they are given are plain holders of the attributes that they read. Layers
leave their own number in the stream, so that a captured state names its layer exactly.
"""

from __future__ import annotations

import ast
import copy
import functools
import re
import sys
import types
from itertools import islice
from types import SimpleNamespace

import pytest

from tests import releases
from tests.layers import corpus
from vllm_kimi_eagle3.layers import facts_of, stock, stock_boundaries
from vllm_kimi_eagle3.layers.plan import PlanError

V1 = "v1/worker/gpu_model_runner.py"
V2 = "v1/worker/gpu/model_runner.py"
V2_EAGLE = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
DEEPSEEK = "model_executor/models/deepseek_v2.py"
KEY = "eagle_aux_hidden_state_layer_ids"

CONFIGS = {
    **{name: corpus.drafter(name) for name in corpus.DRAFTERS},
    "nothing": {},
    "top": {KEY: [3, 4, 6]},
    "nested": {"eagle_config": {KEY: [1, 3, 4]}},
    "last": {KEY: [3, 4, 8]},
    "past the end": {KEY: [3, 4, 9]},
    "negative": {KEY: [-1, 3, 4]},
    "truthy number": {KEY: [True, 3, 4]},
    "texts": {KEY: ["2", "3"]},
    "empty top, nested": {KEY: [], "eagle_config": {KEY: [1, 3, 4]}},
    "empty nested": {"eagle_config": {KEY: []}},
    "eagle_config is a list": {"eagle_config": [1]},
    "eagle_config is empty": {"eagle_config": {}},
    "no aux, with ids": {"eagle_config": {"use_aux_hidden_state": False, KEY: [1, 3, 4]}},
    "no aux, top ids": {KEY: [1, 3, 4], "eagle_config": {"use_aux_hidden_state": 0}},
    "nested five": {"eagle_config": {KEY: [1, 2, 3, 4, 5]}},
    "top five": {KEY: [1, 2, 3, 4, 5]},
    "counted": {KEY: [1, 2, 3, 4, 5], "num_aux_hidden_states": 5},
    "dflash": {"dflash_config": {"target_layer_ids": [1, 3, 4]}},
    "top and dflash": {KEY: [3, 4, 6], "dflash_config": {"target_layer_ids": [1, 3, 4]}},
    "dflash null": {"dflash_config": {"target_layer_ids": None}},
    "dflash texts": {"dflash_config": {"target_layer_ids": ["1"]}},
    "dflash and eagle": {"dflash_config": {"target_layer_ids": [1, 3, 4]}, "eagle_config": {KEY: [2, 5, 6]}},
    "dflash and an unrelated eagle": {"dflash_config": {"target_layer_ids": [1, 3, 4]}, "eagle_config": {"x": 1}},
    "dflash layer_ids": {"dflash_config": {"layer_ids": [1, 3, 4]}, "eagle_config": {"layer_ids": [2, 5, 6]}},
    "eagle layer_ids": {"eagle_config": {"layer_ids": [2, 5, 6]}},
    "dspark": {"dspark_target_layer_ids": [1, 3, 4]},
    "dspark v4.1": {"model_type": "deepseek_v41", "dspark_target_layer_ids": [1, 3, 4]},
    "dspark is a number": {"dspark_target_layer_ids": 3},
    "target_layer_ids": {"target_layer_ids": [1, 3, 4]},
    "both dspark lists": {"dspark_target_layer_ids": [1, 3, 4], "target_layer_ids": [2, 5, 6]},
    "speculators of an MLA model": {
        "speculators_config": {},
        "speculators_model_type": "eagle3",
        KEY: [3, 4, 6],
        "transformer_layer_config": {"model_type": "deepseek_v3"},
    },
    "speculators of no model_type": {
        "speculators_config": {},
        "speculators_model_type": "eagle3",
        KEY: [3, 4, 6],
        "transformer_layer_config": {},
    },
    "speculators with a model_type": {
        "model_type": "llama",
        "speculators_config": {},
        "speculators_model_type": "eagle3",
        KEY: [3, 4, 6],
        "eagle_config": {KEY: [1, 3, 4]},
    },
    "speculators with a nested list": {
        "speculators_config": {},
        "speculators_model_type": "eagle3",
        "eagle_config": {KEY: [1, 3, 4]},
        "transformer_layer_config": {"model_type": "llama"},
    },
}


class Stream:
    """A residual stream that knows which layer wrote it last."""

    shape = (1,)

    def __init__(self, layer: int):
        self.layer = layer

    def __add__(self, other: Stream) -> Stream:
        return Stream(self.layer + other.layer)


class Refused(Exception):
    pass


def load(release: str, drafter: dict) -> SimpleNamespace:
    """The config object that the release makes of a drafter's ``config.json``."""
    config = copy.deepcopy(drafter)
    # As ``HFConfigParser.parse`` decides it in every release.
    if config.get("model_type") is None and config.get("speculators_config") is not None:
        layer = config.get("transformer_layer_config", {})
        path = "transformers_utils/configs/speculators/algos.py"
        try:
            releases.function(release, path, "update_eagle3")(config, layer)
        except ValueError as error:
            raise Refused from error
        config = layer
    return SimpleNamespace(**config)


def spec_config(hf_config: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(method="eagle3", draft_model_config=SimpleNamespace(hf_config=hf_config))


def wants_aux(release: str, runner: str, hf_config: SimpleNamespace) -> bool:
    if runner == "V1":
        path = "v1/spec_decode/llm_base_proposer.py"
        if not (releases.tree(release) / "vllm" / path).is_file():
            path = "v1/spec_decode/eagle.py"
        owner = "SpecDecodeBaseProposer"
        ask = releases.function(release, path, "_get_eagle3_use_aux_hidden_state_from_config", owner)
        return ask(SimpleNamespace(method="eagle3", draft_model_config=spec_config(hf_config).draft_model_config))
    ask = v2_switch(release)
    return True if ask is None else ask(spec_config(hf_config))


@functools.cache
def v2_switch(release: str):
    """The V2 runner's question whether the drafter takes auxiliary states; None where it doesn't ask."""
    try:
        return releases.function(release, V2_EAGLE, "requires_aux_hidden_states")
    except LookupError:
        # Before that function the runner switched it on for the method, whatever the config said.
        init = releases.definition(release, V2, "__init__", "GPUModelRunner")
        assert "self.use_aux_hidden_state_outputs = True" in ast.unparse(init)
        return None


def ids_of(release: str, runner: str, hf_config: SimpleNamespace, layers: int) -> tuple:
    if runner == "V1":
        name = "_get_eagle3_aux_layers_from_config"
        read = releases.function(release, V1, name, "GPUModelRunner")
        ids = read(SimpleNamespace(speculative_config=spec_config(hf_config)))
    else:
        ids = releases.function(release, V2_EAGLE, "get_eagle3_aux_layers_from_config")(spec_config(hf_config))
    if ids:
        return ids
    name = "get_eagle3_default_aux_hidden_state_layers"
    model = SimpleNamespace(model=SimpleNamespace(layers=[None] * layers))
    return releases.function(release, "model_executor/models/interfaces.py", name, "SupportsEagle3")(model)


@functools.cache
def target_loop(release: str):
    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    forward = releases.definition(release, DEEPSEEK, "forward", "DeepseekV2Model")
    return releases.build(release, DEEPSEEK, forward, {"get_pp_group": lambda: stage, "islice": islice})


def capture(release: str, ids: tuple, layers: int) -> tuple[int, ...]:
    """Run the release's own target loop, and name each captured state by the boundary that it is."""
    forward = target_loop(release)
    model = SimpleNamespace(
        config=SimpleNamespace(),
        embed_input_ids=lambda ids: Stream(-1),
        layers=[lambda p, h, r, s, number=number: (Stream(number), Stream(0)) for number in range(layers)],
        start_layer=0,
        end_layer=layers,
        norm=lambda hidden, residual: (hidden, residual),
        aux_hidden_state_layers=ids,
    )
    result = forward(model, Stream(0), Stream(0), None)
    # Layer i's output is boundary i + 1.
    return tuple(state.layer + 1 for state in result[1]) if isinstance(result, tuple) else ()


def real_boundaries(release: str, runner: str, drafter: dict, layers: int) -> tuple[int, ...] | None:
    """None where the release refuses or crashes."""
    try:
        hf_config = load(release, drafter)
        if not wants_aux(release, runner, hf_config):
            return ()
        return capture(release, ids_of(release, runner, hf_config, layers), layers)
    except (Refused, TypeError, AttributeError):
        return None


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("release", [release for release in releases.RELEASES if not facts_of(release).refused])
def test_both_runners_of_every_release(release, name):
    for target in ("deepseek-v2-dense-8", "kimi-k2.5"):
        config = corpus.target(target)
        layers = config.get("text_config", config)["num_hidden_layers"]
        reading = stock_boundaries(release, config, CONFIGS[name])
        for runner in ("V1", "V2"):
            real = real_boundaries(release, runner, CONFIGS[name], layers)
            assert reading.runner(runner).boundaries == real, (runner, target)
            if real is None:
                assert reading.runner(runner).problem
            if real:
                # Negative control: one layer off would not pass.
                assert reading.runner(runner).boundaries != tuple(boundary + 1 for boundary in real)


@pytest.mark.parametrize("release", releases.RELEASES)
def test_refusal_is_the_releases_own(release):
    """``_verify_args`` holds a list of target types up to 0.21; a substring of the target's type must be in it."""
    verify = releases.definition(release, "config/speculative.py", "_verify_args", "SpeculativeConfig")
    lists = [node for node in ast.walk(verify) if isinstance(node, ast.List)]
    lists = [[item.value for item in node.elts if isinstance(item, ast.Constant)] for node in lists]
    (names,) = [names for names in lists if "llama" in names] or [None]
    refused = names is not None and not any(name in "kimi_k2" for name in names)
    assert facts_of(release).refused == refused
    reading = stock_boundaries(release, corpus.target("kimi-k2.5"), {})
    assert (reading.v1.boundaries is None) == refused


class Quiet:
    """An attribute of a default configuration: absent, false, empty, and equal to nothing else."""

    def __getattr__(self, name: str) -> Quiet:
        if name.startswith("__"):
            raise AttributeError(name)
        return Quiet()

    def __call__(self, *args: object, **kwargs: object) -> Quiet:
        return Quiet()

    def __bool__(self) -> bool:
        return False

    def __gt__(self, other: object) -> bool:
        return False

    def __contains__(self, other: object) -> bool:
        return False


def runs_v2(release: str, target: dict, monkeypatch: pytest.MonkeyPatch) -> bool:
    path = "config/vllm.py"
    try:
        methods = {"use_v2_model_runner": releases.definition(release, path, "use_v2_model_runner", "VllmConfig")}
    except LookupError:
        # Up to 0.21 the worker asks the environment alone.
        assert 'os.getenv("VLLM_USE_V2_MODEL_RUNNER", "0")' in releases.source(release, "envs.py")
        return False
    pending = ["use_v2_model_runner"]
    while pending:
        for name in re.findall(r"self\.(_\w+)\(", ast.unparse(methods[pending.pop()])):
            if name not in methods:
                methods[name] = releases.definition(release, path, name, "VllmConfig")
                pending.append(name)
    module = releases.module_ast(release, path).body
    constants = [n for n in module if isinstance(n, ast.Assign) and "MODEL_RUNNER" in ast.unparse(n.targets[0])]
    constants += [n for n in module if getattr(n, "name", "") == "default_v2_model_runner_architectures"]
    # What `get_args` finds in the release: the speculative methods that V2 knows as EAGLE.
    known = {"get_args": lambda kind: ("eagle", "eagle3"), "lru_cache": lambda function: function}
    namespace = {
        **{name: Quiet() for name in ("logger", "current_platform", "CompilationMode", "EagleModelTypes")},
        **{name: Quiet() for name in ("NgramGPUTypes", "envs")},
        **known,
        "HAS_TRITON": True,
    }
    namespace["envs"] = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=None)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = Quiet()
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    exec(compile(ast.Module(constants, []), path, "exec"), namespace)
    text = target.get("text_config", target)

    class Model(Quiet):
        architectures = target["architectures"]
        is_moe = text.get("n_routed_experts", 0) > 0
        is_quantized = False
        runner_type = "generate"

    class Speculative(Quiet):
        method = "eagle3"
        draft_model_config = None

    class Attention(Quiet):
        hisparse_config = None

    class Config(Quiet):
        model_config = Model()
        speculative_config = Speculative()
        attention_config = Attention()
        watermark_config = None
        ec_transfer_config = None

    for name, node in methods.items():
        setattr(Config, name, releases.build(release, path, node, namespace))
    return Config().use_v2_model_runner()


@pytest.mark.parametrize("release", releases.RELEASES)
@pytest.mark.parametrize("target", [*corpus.TARGETS, "deepseek-v2 with experts"])
def test_default_runner(release, target, monkeypatch):
    if target == "deepseek-v2 with experts":
        config = {**corpus.target("deepseek-v2-dense-8"), "n_routed_experts": 8}
    else:
        config = corpus.target(target)
    expected = "V2" if runs_v2(release, config, monkeypatch) else "V1"
    assert stock_boundaries(release, config, {}).default == expected


@pytest.mark.parametrize("release", releases.RELEASES)
@pytest.mark.parametrize("drafter", ["nothing", "nested five", "top five", "counted", "top", "empty nested"])
def test_width_of_fc(release, drafter):
    """The real drafter class is built with layers that only note their sizes."""
    widths = []

    class Module:
        def __init__(self, *args: object, **kwargs: object):
            if "input_size" in kwargs and kwargs.get("prefix") == "fc":
                widths.append(kwargs["input_size"])

    class Linear(Module):
        pass

    path = "model_executor/models/llama_eagle3.py"
    names = ("LlamaDecoderLayer", "VocabParallelEmbedding", "RMSNorm", "ReplicatedLinear", "ParallelLMHead")
    namespace = {name: Linear for name in names}
    namespace |= {"get_draft_quant_config": Quiet(), "get_current_vllm_config": Quiet()}
    namespace["maybe_prefix"] = lambda prefix, name: name
    namespace["nn"] = SimpleNamespace(Module=Module, ModuleList=Linear)
    namespace |= {"torch": Quiet(), "WeightsMapper": Quiet()}
    model = releases.build(release, path, releases.definition(release, path, "LlamaModel"), namespace)
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    config = SimpleNamespace(**sizes, **CONFIGS[drafter])
    model(vllm_config=SimpleNamespace(speculative_config=spec_config(config), model_config=Quiet()))
    (width,) = widths
    reading = stock_boundaries(release, corpus.target("deepseek-v2-dense-8"), CONFIGS[drafter])
    for name in ("V1", "V2"):
        runner = reading.runner(name)
        if runner.boundaries is not None:
            fails = runner.problem is not None and "fails at the first request" in runner.problem
            assert fails == (len(runner.boundaries) * 64 != width), name


def test_the_measured_case_of_d6():
    """On 0.33.0, one H200, 8 layers, nested ids [1, 3, 4]: V1 logged (1, 3, 4), V2 logged (2, 4, 5)."""
    reading = stock_boundaries("0.33.0", corpus.target("deepseek-v2-dense-8"), CONFIGS["nested"])
    assert reading.to_json()["V1"] == [1, 3, 4]
    assert reading.to_json()["V2"] == [2, 4, 5]
    assert reading.default == "V2"


def test_every_release_is_in_the_table_and_others_are_told_apart():
    assert releases.RELEASES[-1] == stock.NEWEST
    target = corpus.target("kimi-k2")
    for release in releases.RELEASES:
        assert stock_boundaries(release, target, {}).warnings == ()
    newer = stock_boundaries("1.2.0", target, {})
    assert "newer" in newer.warnings[0]
    assert newer.v1 == stock_boundaries(stock.NEWEST, target, {}).v1
    for alike in ("v0.26.0", "0.26.0.dev12+g1234abc", "0.26.0rc1", "0.26.1+cpu"):
        assert facts_of(alike) == facts_of("0.26.0")
    for bad in ("0.14.1", "", "latest", "0", "0.1.dev1", "99999999.1", "٣.٤"):
        with pytest.raises(PlanError):
            facts_of(bad)


def test_what_goes_wrong_is_named_with_what_was_read():
    target = corpus.target("deepseek-v2-dense-8")

    def problem(drafter: dict, release: str = "0.33.0") -> str:
        return stock_boundaries(release, target, drafter).v1.problem or ""

    assert "ascending states for ids [6, 4, 2]:" in problem({KEY: [6, 4, 2]})
    assert "fails" in problem({KEY: [2, 4, 4]})
    assert problem({"eagle_config": [1]}) == "crashes: eagle_config is [1]"
    assert problem({KEY: 7, "dflash_config": {"target_layer_ids": 7}}) == ""
    assert problem({"dflash_config": {"target_layer_ids": 7}}) == "crashes on the drafter's layer ids"
    refused = problem(CONFIGS["speculators of an MLA model"])
    assert refused == "refuses a speculators drafter of model_type 'deepseek_v3'"


def test_a_refusal_is_told_as_any_other_reading():
    old = stock_boundaries("0.15.0", corpus.target("kimi-k2"), {}).to_json()
    assert (old["V1"], old["V2"], old["problems"]) == (None, None, {"V1": stock.REFUSED, "V2": stock.REFUSED})
    newer = stock_boundaries("1.2.0", corpus.target("kimi-k2"), CONFIGS["speculators of an MLA model"])
    assert newer.v1.boundaries is None and "newer" in newer.warnings[0]


def test_what_loading_leaves_of_a_speculators_config():
    speculators = {"speculators_config": {}, "eagle_config": {KEY: [1]}, "num_aux_hidden_states": 4}
    assert stock.loaded({**speculators, KEY: [3], "transformer_layer_config": {"x": 1}}) == {KEY: [3], "x": 1}
    for layer in (None, [1], "text"):
        assert stock.loaded({**speculators, KEY: [3], "transformer_layer_config": layer}) == {KEY: [3]}
    for ordinary in ({"num_aux_hidden_states": 4}, {**speculators, "model_type": "llama"}):
        assert stock.loaded(ordinary) is ordinary
