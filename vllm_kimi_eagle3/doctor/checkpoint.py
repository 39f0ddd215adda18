# SPDX-License-Identifier: Apache-2.0
"""Do this drafter's files fit this target, and does the drafter's config fit its own weights?

Reads two configs, the drafter's safetensors headers, and the values of two small index tables; never a weight. What
vLLM does with each of these comes from its ``llama_eagle3.py``, ``deepseek_eagle3.py`` and ``llm_base_proposer.py``.

It can't know whether the weights are trained well or on which layers; that takes a measurement.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from vllm_kimi_eagle3.doctor.findings import Finding, ok
from vllm_kimi_eagle3.doctor.tensors import integers
from vllm_kimi_eagle3.fixes.drafter_positions import fixed_reach
from vllm_kimi_eagle3.layers import CapturePlan, CheckpointHeaders, PlanError, alignment, read_headers, resolve
from vllm_kimi_eagle3.layers.files import inside, read_config
from vllm_kimi_eagle3.layers.headers import TensorInfo
from vllm_kimi_eagle3.layers.parse import Drafter, Target, describe, read_drafter, read_target

TARGET_ARCHITECTURES = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
MLA_DRAFTERS = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
KNOWN_DRAFTERS = (
    *MLA_DRAFTERS,
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3Qwen3ForCausalLM",
)
MAX_README = 64 << 10
_FLOATS = ("BF16", "F16", "F32", "F64")
_DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class Pair:
    """A target's config, a drafter's config and what is stored beside it."""

    target: Mapping[str, Any]
    drafter: Mapping[str, Any]
    folder: Path
    headers: CheckpointHeaders | None
    target_name: str = ""
    vllm: str | None = None
    """The release to judge by; None takes the newest known."""
    layer_rule: str | None = None

    @cached_property
    def target_facts(self) -> Target:
        """The target's few facts; raises PlanError."""
        return read_target(self.target)

    @cached_property
    def drafter_facts(self) -> Drafter:
        """The drafter's few facts; raises PlanError."""
        return read_drafter(self.drafter)

    @cached_property
    def body(self) -> Mapping[str, Any]:
        """The drafter's transformer config, wherever the layout keeps it."""
        nested = self.drafter.get("transformer_layer_config")
        return cast("Mapping[str, Any]", nested) if isinstance(nested, Mapping) else self.drafter

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The target's text config."""
        nested = self.target.get("text_config")
        return cast("Mapping[str, Any]", nested) if isinstance(nested, Mapping) else self.target

    @cached_property
    def mla(self) -> bool:
        """Whether the drafter's attention is MLA."""
        if any(name in MLA_DRAFTERS for name in self.drafter_facts.architectures):
            return True
        return self.headers is not None and any("kv_b_proj" in name for name in self.headers.tensors)

    def tensor(self, name: str) -> TensorInfo | None:
        """A stored tensor, whichever way the first layer is spelt."""
        if self.headers is None:
            return None
        return self.headers.find(name) or self.headers.find(name.replace("layers.0.", "midlayer.", 1))

    def flag(self, name: str) -> bool:
        """A switch as vLLM reads it: ``eagle_config`` first for ``norm_before_fc``, else the top level."""
        eagle = self.drafter.get("eagle_config")
        if name == "norm_before_fc" and isinstance(eagle, Mapping) and name in eagle:
            return bool(cast("Mapping[str, Any]", eagle)[name])
        return bool(self.drafter.get(name, False))

    def number(self, key: str, default: int = 0) -> int:
        """An integer of the drafter's transformer config; ``default`` when it is absent or no positive integer."""
        value = self.body.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def read_pair(target: Path, drafter: Path, *, vllm: str | None = None, layer_rule: str | None = None) -> Pair:
    """Read both folders.

    Raises:
        PlanError: a config is missing or unreadable, or the drafter's safetensors files are damaged.
    """
    folder = drafter if drafter.is_dir() else drafter.parent
    configs = read_config(target), read_config(drafter)
    return Pair(*configs, folder, read_headers(folder), target.resolve().name, vllm, layer_rule)


def check_pair(pair: Pair) -> list[Finding]:
    """Every check of the pair, in the order in which a server would trip over them."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(pair)
        except PlanError as error:
            # A check that can't read what it needs says so itself, and the others still run.
            findings.append(Finding(check.__name__.replace("_", "-"), "error", str(error)))
    return findings


# ---------------------------------------------------------------------------------------------------------------------
# The checks: each yields at least one finding


def target_served(pair: Pair) -> Iterator[Finding]:
    """Is the target one that the overlay serves?"""
    names = pair.target_facts.architectures
    if any(name in TARGET_ARCHITECTURES for name in names):
        yield ok("target-served", f"the target is a {names[0]} of {pair.target_facts.num_layers} layers")
        return
    yield Finding(
        "target-served",
        "warning",
        f"the target's architectures are {describe(names)}, not one of {', '.join(TARGET_ARCHITECTURES)}",
        "the overlay leaves other targets as stock vLLM has them",
        "nothing, if that is meant; else give the folder of the right target",
    )


def model_type(pair: Pair) -> Iterator[Finding]:
    """Will vLLM recognise the drafter as an EAGLE-3 drafter?"""
    facts = pair.drafter_facts
    if not any(name in KNOWN_DRAFTERS for name in facts.architectures):
        yield Finding(
            "model-type",
            "error",
            f"the drafter's architectures are {describe(facts.architectures)}, none of which is an EAGLE-3 drafter",
            "vLLM picks the drafter's class by that name, and would refuse it or run another model",
            f"set architectures to one of LlamaForCausalLMEagle3 (ordinary attention) and {MLA_DRAFTERS[0]} (MLA)",
        )
        return
    by_tensors = pair.headers is not None and any("kv_b_proj" in name for name in pair.headers.tensors)
    by_name = any(name in MLA_DRAFTERS for name in facts.architectures)
    if pair.headers is not None and by_tensors != by_name:
        yield Finding(
            "model-type",
            "error",
            f"the drafter calls itself {facts.architectures[0]}, but its weights are of"
            f" {'MLA' if by_tensors else 'ordinary'} attention",
            "vLLM builds the class that the config names, and the weights don't fit it",
            f"set architectures to {MLA_DRAFTERS[0] if by_tensors else 'LlamaForCausalLMEagle3'}",
        )
        return
    kind = pair.body.get("model_type")
    if by_name and kind in ("deepseek_v3", "deepseek_v32"):
        yield Finding(
            "model-type",
            "info",
            f"the drafter is MLA with model_type {kind}",
            "stock vLLM from 0.18 on takes that for DeepSeek's MTP head and refuses Eagle3DeepSeekMTPModel (D18)",
            "keep the overlay on, which mends it; or set the drafter's model_type to kimi_k2",
        )
        return
    speculators = pair.drafter.get("speculators_config") is not None
    if kind is None and not speculators:
        yield Finding(
            "model-type",
            "error",
            "the drafter's config has no model_type",
            "Transformers can't choose a config class, so vLLM does not start",
            f"set model_type to {'kimi_k2' if by_name else 'llama'}",
        )
        return
    yield ok("model-type", f"{facts.architectures[0]}, model_type {describe(kind)}")


def layers(pair: Pair) -> Iterator[Finding]:
    """Can the layers be resolved, and is the answer certain?"""
    try:
        plan = plan_of(pair)
    except PlanError as error:
        yield Finding("layers", "error", str(error), "the server would refuse to start", "as the sentence says")
        return
    if plan.decided_by == "ambiguous":
        yield Finding(
            "layers",
            "warning",
            f"it is not certain which layers the drafter reads: {plan.line()}",
            "one layer off costs acceptance and nothing says so at run time",
            "run `vllm-kimi-eagle3 calibrate --target DIR --drafter DIR`, or set layer_rule if you know",
        )
    else:
        yield ok("layers", plan.line())
    for warning in plan.warnings:
        if plan.decided_by != "ambiguous" or "is ambiguous" not in warning:
            yield Finding("layers", "warning", warning)


def fc_width(pair: Pair) -> Iterator[Finding]:
    """Does ``fc`` take what is captured, and give what the drafter works in?"""
    info = pair.tensor("fc.weight")
    if not pair.drafter_facts.use_aux_hidden_state:
        yield ok("fc-width", "the drafter takes no auxiliary hidden states")
        return
    if pair.headers is None:
        yield _unread("fc-width", "the width of fc")
        return
    if info is None:
        yield Finding(
            "fc-width",
            "error",
            "the checkpoint has no fc.weight",
            "vLLM would leave fc as it was initialised, and every draft would be noise",
            "get the whole checkpoint; a drafter without fc says eagle_config.use_aux_hidden_state false",
        )
        return
    if info.dtype not in _FLOATS or len(info.shape) != 2:
        yield Finding("fc-width", "info", f"fc.weight is {info.dtype} {list(info.shape)}, whose width can't be read")
        return
    rows, columns = info.shape
    width, hidden = pair.target_facts.hidden_size, pair.drafter_facts.hidden_size
    if columns % width:
        yield Finding(
            "fc-width",
            "error",
            f"fc.weight takes {columns} features, no whole number of {width}-wide states of this target",
            "the first request would crash with a shape error",
            "take a drafter that was trained for this target",
        )
    elif hidden is not None and rows != hidden:
        yield Finding(
            "fc-width",
            "error",
            f"fc.weight gives {rows} features, but the drafter's hidden_size is {hidden}",
            "loading the weights would fail",
            "correct the drafter's hidden_size, or get the config that belongs to these weights",
        )
    else:
        yield ok("fc-width", f"fc takes {columns // width} states of {width} features and gives {rows}")


def draft_vocabulary(pair: Pair) -> Iterator[Finding]:
    """Do the vocabularies' sizes fit: config, ``lm_head``, ``d2t``, target?"""
    full, own = pair.target_facts.vocab_size, pair.number("vocab_size") or None
    small = pair.drafter_facts.draft_vocab_size or own
    if full is None:
        yield Finding("draft-vocabulary", "info", "the target's config has no vocab_size, so nothing was compared")
        return
    if own is not None and own != full and own != small:
        yield Finding(
            "draft-vocabulary",
            "error",
            f"the drafter's vocab_size is {own}, the target's {full}",
            "the two number their tokens differently, so drafts are wrong tokens",
            "take a drafter that was trained for this target",
        )
        return
    if small is None:
        yield Finding("draft-vocabulary", "info", "the drafter's config has neither draft_vocab_size nor vocab_size")
        return
    if small > full:
        yield Finding(
            "draft-vocabulary",
            "error",
            f"the drafter's draft_vocab_size is {small}, more than the target's vocab_size {full}",
            "drafts would name tokens that do not exist",
            "correct draft_vocab_size, or take a drafter that was trained for this target",
        )
        return
    d2t = pair.tensor("d2t")
    if d2t is not None and d2t.shape != (small,):
        yield Finding(
            "draft-vocabulary",
            "error",
            f"d2t has shape {list(d2t.shape)}, but draft_vocab_size is {small}",
            "loading the weights would fail, or drafts would be mapped by part of a table",
            "set draft_vocab_size to the number of d2t's entries, or get the config that belongs to these weights",
        )
        return
    if pair.headers is not None and d2t is None and small < full:
        yield Finding(
            "draft-vocabulary",
            "error",
            f"draft_vocab_size is {small} of {full}, but the checkpoint has no d2t table",
            "vLLM would take the drafter's ids for the target's first ids, and accept next to nothing",
            "export d2t with the checkpoint; training with a reduced vocabulary always makes one",
        )
        return
    yield ok("draft-vocabulary", f"{small} of the target's {full} tokens can be drafted")


def d2t(pair: Pair) -> Iterator[Finding]:
    """Does the table map draft ids to distinct ids of the target? Entry i is an offset: target id = i + d2t[i]."""
    full = pair.target_facts.vocab_size
    if pair.tensor("d2t") is None or full is None:
        yield ok("d2t-range", "no d2t table, so there is nothing to map")
        return
    table = integers(pair.folder, "d2t")
    assert table is not None
    mapped = [index + offset for index, offset in enumerate(table)]
    outside = [index for index, token in enumerate(mapped) if not 0 <= token < full]
    absolute = _looks_absolute(table, full)
    advice = (
        "the entries are distinct ids themselves, so they look like target ids instead of offsets: subtract each"
        " entry's index"
        if absolute
        else "export the table again, or take the one that belongs to this target's tokenizer"
    )
    if outside:
        yield Finding(
            "d2t-range",
            "error",
            f"d2t maps draft id {outside[0]} to token {mapped[outside[0]]} (and {len(outside) - 1} more ids out of"
            f" range), but the target's tokens are 0 to {full - 1}",
            "such drafts index beyond the target's embedding: wrong tokens or a crash on the device",
            advice,
        )
    else:
        yield ok("d2t-range", f"d2t maps {len(mapped)} ids into 0 to {full - 1}")
    distinct = len(set(mapped))
    if distinct < len(mapped):
        yield Finding(
            "d2t-unique",
            "error",
            f"d2t maps {len(mapped)} draft ids to {distinct} different tokens",
            "two draft ids for one token can't come from training: the table is damaged or not one of offsets",
            advice,
        )
    else:
        yield ok("d2t-unique", "d2t maps every draft id to a token of its own")
        yield from _in_order(mapped)
    if not outside and pair.tensor("t2d") is not None:
        yield from _compare_t2d(pair, mapped)


def _in_order(mapped: list[int]) -> Iterator[Finding]:
    """Do tokens ascend with draft ids? The trainers known here (SpecForge, speculators, TorchSpec) sort them.

    vLLM maps by the table whatever its order, so another order is no error by itself: a trainer may have sorted
    otherwise, by frequency for one, and lm_head's rows with it. Weights can't tell; a measurement can.
    """
    back = [index for index in range(1, len(mapped)) if mapped[index] <= mapped[index - 1]]
    if not back:
        yield ok("d2t-order", "tokens ascend with draft ids, as trainers write them")
        return
    at = back[0]
    yield Finding(
        "d2t-order",
        "warning",
        f"d2t maps draft ids to tokens out of order: {mapped[at - 1]} for id {at - 1}, then {mapped[at]} for id {at},"
        f" and at {len(back) - 1} more places",
        "the trainers known here write tokens in ascending order; if lm_head's rows are in that order and the table is"
        " not, every draft is a wrong token",
        "run `vllm-kimi-eagle3 calibrate --target DIR --drafter DIR`, which says whether another mapping would predict"
        " better",
    )


def _compare_t2d(pair: Pair, mapped: list[int]) -> Iterator[Finding]:
    mask = integers(pair.folder, "t2d")
    assert mask is not None
    marked = {token for token, present in enumerate(mask) if present}
    if len(mask) != pair.target_facts.vocab_size or marked != set(mapped):
        yield Finding(
            "t2d",
            "warning",
            f"t2d marks {len(marked)} of {len(mask)} tokens, and they are not the {len(set(mapped))} that d2t names",
            "vLLM reads d2t alone, but both were written by the same training: one of them is of another run",
            "export both again from the same run",
        )
    else:
        yield ok("t2d", "t2d marks the same tokens as d2t names")


def _looks_absolute(table: array[int], full: int) -> bool:
    return len(set(table)) == len(table) > 1 and all(0 <= token < full for token in table)


def embed_tokens(pair: Pair) -> Iterator[Finding]:
    """Where do the drafter's embeddings come from, and do they fit?"""
    yield from _vocabulary_matrix(pair, "embed_tokens", pair.number("vocab_size") or pair.target_facts.vocab_size)


def lm_head(pair: Pair) -> Iterator[Finding]:
    """Where does the drafter's output matrix come from, and does it fit?"""
    small, full = pair.drafter_facts.draft_vocab_size, pair.target_facts.vocab_size
    if pair.headers is not None and pair.tensor("lm_head.weight") is None and small not in (None, full):
        yield Finding(
            "lm-head",
            "error",
            f"the checkpoint has no lm_head.weight, and its draft vocabulary ({small}) is not the target's ({full})",
            "the target's lm_head can't stand in for one of another size, so drafts would be noise",
            "get the whole checkpoint",
        )
        return
    yield from _vocabulary_matrix(pair, "lm_head", small or pair.number("vocab_size") or full)


def _vocabulary_matrix(pair: Pair, name: str, rows: int | None) -> Iterator[Finding]:
    check, hidden = name.replace("_", "-"), pair.drafter_facts.hidden_size
    if pair.headers is None:
        yield _unread(check, f"whether {name} is there")
        return
    info = pair.tensor(f"{name}.weight")
    if info is None:
        if hidden not in (None, pair.target_facts.hidden_size):
            yield Finding(
                check,
                "error",
                f"the checkpoint has no {name}.weight, and the target's is {pair.target_facts.hidden_size} wide while"
                f" the drafter's hidden_size is {hidden}",
                "the target's can't be borrowed, so the drafter would run on a random one",
                "get the whole checkpoint",
            )
        else:
            yield ok(check, f"no {name}.weight: the drafter borrows the target's")
        return
    wrong_rows = rows is not None and info.shape[:1] != (rows,) and (len(info.shape) != 2 or info.shape[0] < rows)
    if len(info.shape) != 2 or wrong_rows or (hidden is not None and info.shape[1] != hidden):
        yield Finding(
            check,
            "error",
            f"{name}.weight has shape {list(info.shape)}, but [{rows}, {hidden}] was expected from the config",
            "loading the weights would fail, or part of the vocabulary would be noise",
            "get the config that belongs to these weights",
        )
        return
    yield ok(check, f"{name}.weight is the drafter's own, {list(info.shape)}")


def norms(pair: Pair) -> Iterator[Finding]:
    """Do the norm switches in the config and the norms among the tensors agree?"""
    if pair.headers is None:
        yield _unread("norms", "the norms")
        return
    stored = pair.headers.tensors
    single = any(re.search(r"(^|\.)input_norm\.weight$", name) for name in stored)
    several = [name for name in stored if re.search(r"(^|\.)fc_norm\.\d+\.weight$", name)]
    good = True
    for flag, there, tensors in (
        ("norm_before_fc", single, "input_norm.weight"),
        ("fc_norm", bool(several), "fc_norm.N.weight"),
    ):
        if pair.flag(flag) == there:
            continue
        good = False
        if there:
            problem, why = f"stores {tensors}, but the config does not set {flag}", "vLLM would drop that norm"
        else:
            problem, why = f"has no {tensors}, but the config sets {flag}", "vLLM would run an untrained norm"
        yield Finding(
            "norms",
            "error",
            f"the checkpoint {problem}",
            f"{why}, and the drafter would see features at a scale it was not trained on",
            f"set {flag} to {str(there).lower()}, as the weights say",
        )
    if pair.mla and pair.flag("norm_before_fc"):
        good = False
        yield Finding(
            "norms",
            "error",
            "norm_before_fc is set on an MLA drafter, whose class in vLLM has no such norm",
            "the norm would be dropped in silence",
            "use fc_norm, or a drafter with ordinary attention",
        )
    if several and pair.drafter_facts.use_aux_hidden_state and len(several) != _states(pair):
        good = False
        yield Finding(
            "norms",
            "error",
            f"the checkpoint has {len(several)} fc_norm weights, but fc takes {_states(pair)} states",
            "the features would be cut in pieces of the wrong width",
            "get the config and weights of one and the same training",
        )
    if good:
        yield ok("norms", "norm switches and stored norms agree")


def _states(pair: Pair) -> int | None:
    info = pair.tensor("fc.weight")
    return None if info is None or len(info.shape) != 2 else info.shape[1] // pair.target_facts.hidden_size


_LAYER = r"(?:midlayer|layers\.\d+)"
_KNOWN_TENSORS = re.compile(
    rf"^(?:model\.)?(?:fc\.(?:weight|bias)|d2t|t2d|mask_hidden|embed_tokens\.weight|lm_head\.weight|norm\.weight"
    rf"|input_norm\.weight|fc_norm\.\d+\.weight"
    rf"|{_LAYER}\.(?:hidden_norm|input_layernorm|post_attention_layernorm)\.weight"
    rf"|{_LAYER}\.mlp\.(?:gate_proj|up_proj|down_proj|gate_up_proj)\.(?:weight|bias)"
    rf"|{_LAYER}\.self_attn\.(?:q_proj|k_proj|v_proj|o_proj|qkv_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)"
    rf"\.(?:weight|bias)"
    rf"|{_LAYER}\.self_attn\.(?:q_norm|k_norm|q_a_layernorm|kv_a_layernorm)\.weight"
    rf"|{_LAYER}\.self_attn\.rotary_emb\.inv_freq)$"
)
_QUANTISED = re.compile(r"\.(?:weight_scale|weight_scale_inv|weight_packed|weight_shape|qweight|qzeros|scales|g_idx)$")


def tensors(pair: Pair) -> Iterator[Finding]:
    """Are all weights there, and nothing that no drafter has?"""
    if pair.headers is None:
        yield _unread("tensors", "the weights")
        return
    quantised = [name for name in pair.headers.tensors if _QUANTISED.search(name)]
    unknown = [name for name in pair.headers.tensors if not _KNOWN_TENSORS.match(name) and not _QUANTISED.search(name)]
    if unknown:
        yield Finding(
            "tensors",
            "error",
            f"the checkpoint stores {len(unknown)} tensor{'s' * (len(unknown) > 1)} that no EAGLE-3 drafter of vLLM"
            f" has, such as {describe(sorted(unknown)[0])}",
            "loading would fail, or part of what was trained would be left out",
            "check that this folder is an EAGLE-3 drafter in the names that SpecForge or speculators write",
        )
    prefixed = [name for name in pair.headers.tensors if name.startswith("model.") and not _QUANTISED.search(name)]
    if prefixed:
        yield Finding(
            "tensors",
            "warning",
            f"{len(prefixed)} tensors are named with a leading `model.`, such as {describe(prefixed[0])}",
            "vLLM adds that prefix itself to a drafter's tensors, and does not find them with two",
            "rename them without it",
        )
    missing = [] if quantised else [name for name in _required(pair) if pair.tensor(name) is None]
    if missing:
        yield Finding(
            "tensors",
            "error",
            f"the checkpoint has no {', '.join(missing[:4])}{', …' * (len(missing) > 4)}",
            "vLLM leaves what is not in the file as it was initialised, and the drafts are noise",
            "get the whole checkpoint",
        )
    wrong = [] if quantised else list(_wrong_shapes(pair))
    for name, found, expected in wrong[:3]:
        yield Finding(
            "tensors",
            "error",
            f"{name} has shape {list(found)}, but the config gives {list(expected)}",
            "loading the weights would fail",
            "get the config that belongs to these weights",
        )
    if quantised:
        yield Finding("tensors", "info", "the drafter's weights are quantised, so their shapes were not compared")
    elif not (unknown or prefixed or missing or wrong):
        yield ok("tensors", f"all {len(pair.headers.tensors)} tensors are known, none is missing")


def _required(pair: Pair) -> list[str]:
    one = "layers.0."
    names = ["norm.weight", f"{one}hidden_norm.weight", f"{one}input_layernorm.weight"]
    names += [f"{one}post_attention_layernorm.weight", f"{one}mlp.down_proj.weight", f"{one}self_attn.o_proj.weight"]
    if pair.mla:
        names += [f"{one}self_attn.{part}.weight" for part in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")]
    elif pair.tensor(f"{one}self_attn.qkv_proj.weight") is None:
        names += [f"{one}self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj")]
    if pair.tensor(f"{one}mlp.gate_up_proj.weight") is None:
        names += [f"{one}mlp.gate_proj.weight", f"{one}mlp.up_proj.weight"]
    return names


def _wrong_shapes(pair: Pair) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    hidden, heads = pair.number("hidden_size"), pair.number("num_attention_heads")
    inner = pair.number("intermediate_size")
    if not (hidden and heads and inner):
        return
    one = "layers.0."
    expected: dict[str, tuple[int, ...]] = {
        "norm.weight": (hidden,),
        f"{one}hidden_norm.weight": (hidden,),
        f"{one}input_layernorm.weight": (hidden,),
        f"{one}post_attention_layernorm.weight": (hidden,),
        f"{one}mlp.gate_proj.weight": (inner, hidden),
        f"{one}mlp.up_proj.weight": (inner, hidden),
        f"{one}mlp.down_proj.weight": (hidden, inner),
    }
    # The first layer's attention reads embedding and features side by side.
    if pair.mla:
        rank, rope = pair.number("kv_lora_rank"), pair.number("qk_rope_head_dim")
        nope, value = pair.number("qk_nope_head_dim"), pair.number("v_head_dim")
        if rank and rope and nope and value:
            expected[f"{one}self_attn.kv_a_proj_with_mqa.weight"] = (rank + rope, 2 * hidden)
            expected[f"{one}self_attn.kv_b_proj.weight"] = (heads * (nope + value), rank)
            expected[f"{one}self_attn.o_proj.weight"] = (hidden, heads * value)
    else:
        dim = pair.number("head_dim") or hidden // heads
        groups = pair.number("num_key_value_heads") or heads
        expected[f"{one}self_attn.q_proj.weight"] = (heads * dim, 2 * hidden)
        expected[f"{one}self_attn.k_proj.weight"] = (groups * dim, 2 * hidden)
        expected[f"{one}self_attn.v_proj.weight"] = (groups * dim, 2 * hidden)
        expected[f"{one}self_attn.o_proj.weight"] = (hidden, heads * dim)
    for name, shape in expected.items():
        info = pair.tensor(name)
        if info is not None and info.shape != shape:
            yield name, info.shape, shape


def dtype(pair: Pair) -> Iterator[Finding]:
    """In what precision are both, and is that one in which features are what they were in training?"""
    said = _dtype_name(pair.text) or _dtype_name(pair.target)
    own = _dtype_name(pair.body) or _dtype_name(pair.drafter)
    stored = sorted({info.dtype for info in pair.headers.tensors.values()} & set(_FLOATS)) if pair.headers else []
    if said == "float16":
        yield Finding(
            "dtype",
            "warning",
            "the target's config asks for float16",
            "vLLM's guard against float16 overflow scales this target's residual stream, and the drafter's features"
            " with it (D16); trainers used bfloat16",
            "serve with --dtype bfloat16",
        )
        return
    if len(stored) > 1 and {"F16", "BF16"} <= set(stored):
        yield Finding(
            "dtype",
            "warning",
            f"the drafter's weights are stored in {', '.join(stored)} side by side",
            "two files of different exports may have been mixed",
            "check that all files are of one export",
        )
        return
    if own is not None and stored and own not in {_DTYPE_NAMES.get(code) for code in stored}:
        names = ", ".join(_DTYPE_NAMES.get(code, code) for code in stored)
        yield Finding(
            "dtype",
            "info",
            f"the drafter's config says {own}, its weights are {names}",
            "vLLM converts them to the target's precision while loading",
        )
        return
    yield ok("dtype", f"target {said or 'unsaid'}, drafter {own or 'unsaid'}")


def _dtype_name(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    return value.removeprefix("torch.") if isinstance(value, str) else None


def max_length(pair: Pair) -> Iterator[Finding]:
    """Does the drafter reach as far as the target?"""
    own, full = pair.number("max_position_embeddings"), pair.text.get("max_position_embeddings")
    if not own or not isinstance(full, int) or isinstance(full, bool):
        yield Finding(
            "max-length", "info", "one of the configs has no max_position_embeddings, so nothing was compared"
        )
    elif (reach := fixed_reach(pair.body)) is not None and reach < full:
        yield Finding(
            "max-length",
            "warning",
            f"the drafter's rotary embedding knows {reach} positions, the target's {full}",
            "V2 of 0.33.0 serves no longer requests, and the overlay refuses older ones, which would read other memory;"
            " V1 drafts for no request of a batch while one is longer",
            f"serve with --max-model-len {reach} or less",
        )
    elif own < full:
        yield Finding(
            "max-length",
            "warning",
            f"the drafter's max_position_embeddings is {own}, the target's {full}",
            f"beyond {own} tokens it may draft badly, for it may not have been trained there; without the overlay, V1"
            " drafts for no request of a batch while one is longer (D24), and V2 below 0.27.0 ends or reads other"
            " memory (D27)",
            f"serve with --max-model-len {own} or less, or take a drafter that was trained for longer text",
        )
    else:
        yield ok("max-length", f"the drafter reaches {own} tokens, the target {full}")


# ---------------------------------------------------------------------------------------------------------------------
# For which target was it trained, by its own word?

_FAMILIES: tuple[tuple[str, str], ...] = (
    (r"kimi[-_ .]?k2[-_.](\d)(?!\d)", "Kimi-K2.{0}"),
    (r"kimi[-_ .]?k2(5|6)(?!\d)", "Kimi-K2.{0}"),
    (r"kimi[-_ .]?k2(?![-_.]?\d(?!\d))", "Kimi-K2"),
    (r"deepseek[-_ ]?(?:v3|r1)", "DeepSeek-V3"),
    (r"deepseek[-_ ]?v(\d)", "DeepSeek-V{0}"),
    (r"qwen", "Qwen"),
    (r"gpt[-_]?oss", "gpt-oss"),
    (r"llama[-_ ]?[234]", "Llama"),
    (r"minimax", "MiniMax"),
    (r"glm", "GLM"),
)


def families(text: str) -> set[str]:
    """The model families that a name mentions, such as ``{"Kimi-K2.5"}``."""
    return {
        name.format(*match.groups())
        for pattern, name in _FAMILIES
        for match in re.finditer(rf"(?<![a-z]){pattern}", text.lower())
    }


def target_families(pair: Pair) -> set[str]:
    """What the target may be, by its config, narrowed by its folder's name when that agrees."""
    facts = pair.target_facts
    if "KimiK25ForConditionalGeneration" in facts.architectures:
        possible = {"Kimi-K2.5", "Kimi-K2.6"}
    elif facts.vocab_size == 163_840 or facts.model_type == "kimi_k2":
        possible = {"Kimi-K2"}
    elif "DeepseekV3ForCausalLM" in facts.architectures and facts.vocab_size == 129_280:
        possible = {"DeepSeek-V3"}
    else:
        return families(pair.target_name)
    named = families(" ".join((pair.target_name, str(pair.target.get("_name_or_path", "")))))
    return (possible & named) or possible


def trained_for(pair: Pair) -> Iterator[Finding]:
    """Was the drafter trained for another target, by its own metadata?"""
    claims = list(_claims(pair))
    possible = target_families(pair)
    for where, text in claims:
        named = families(text)
        if named and possible and not named & possible:
            yield Finding(
                "trained-for",
                "warning",
                f"{where} says {describe(text)}, which is {' and '.join(sorted(named))}; the target is"
                f" {' or '.join(sorted(possible))}",
                "a drafter for another target starts, runs and is rejected most of the time; the text stays right",
                "take a drafter that was trained for this target, and compare both with `vllm-kimi-eagle3 bench`",
            )
            return
    verifier = _verifier(pair)
    architectures = verifier.get("architectures")
    if isinstance(architectures, list) and pair.target_facts.architectures:
        names = [name for name in cast("list[object]", architectures) if isinstance(name, str)]
        if names and not set(names) & set(pair.target_facts.architectures):
            yield Finding(
                "trained-for",
                "warning",
                f"speculators_config.verifier.architectures is {describe(names)}, the target's"
                f" {describe(pair.target_facts.architectures)}",
                "the drafter was trained on another model's hidden states",
                "take a drafter that was trained for this target",
            )
            return
    fitting = next((text for _, text in claims if families(text) & possible), None)
    yield ok("trained-for", f"trained for {fitting[:80]}" if fitting else "the drafter's files name no other target")


def _verifier(pair: Pair) -> Mapping[str, Any]:
    config = pair.drafter.get("speculators_config")
    verifier = cast("Mapping[str, Any]", config).get("verifier") if isinstance(config, Mapping) else None
    return cast("Mapping[str, Any]", verifier) if isinstance(verifier, Mapping) else {}


def _claims(pair: Pair) -> Iterator[tuple[str, str]]:
    """Where the drafter's files name a target, and the name; the most trustworthy first."""
    name = _verifier(pair).get("name_or_path")
    if isinstance(name, str):
        yield "speculators_config.verifier.name_or_path", name
    eagle = pair.drafter.get("eagle_config")
    for key in ("target_model", "target_model_name_or_path", "base_model", "base_model_name_or_path"):
        for where, holder in (("the drafter's config", pair.drafter), ("its eagle_config", eagle)):
            value = cast("Mapping[str, Any]", holder).get(key) if isinstance(holder, Mapping) else None
            if isinstance(value, str):
                yield f"{key} of {where}", value
    for model in _base_models(pair.folder):
        yield "base_model of the drafter's README.md", model
    # What the Hugging Face cache calls the folder, or else the folder's own name.
    resolved = pair.folder.resolve()
    cached = resolved.parents[1].name if resolved.parent.name == "snapshots" else resolved.name
    yield "the drafter's folder", cached.removeprefix("models--").replace("--", "/")


def _base_models(folder: Path) -> list[str]:
    """``base_model`` of a model card's front matter, as one value or a list."""
    path = folder / "README.md"
    try:
        if not path.is_file():
            return []
        with inside(folder, path).open("rb") as file:
            text = file.read(MAX_README).decode("utf-8", "replace")
    except (OSError, PlanError):
        return []
    if not text.startswith("---"):
        return []
    front = text.split("\n---", 1)[0]
    match = re.search(r"^base_model:[ \t]*(.*(?:\n[ \t]*- .*)*)", front, re.M)
    if match is None:
        return []
    return [part.strip(" \t'\"-[]") for part in re.split(r"[\n,]", match[1]) if part.strip(" \t'\"-[]")]


# ---------------------------------------------------------------------------------------------------------------------


def _unread(check: str, what: str) -> Finding:
    return Finding(
        check,
        "info",
        f"{what} can't be checked: no safetensors file lies beside the drafter's config",
        "",
        "give the folder that holds the weights, too",
    )


def plan_of(pair: Pair) -> CapturePlan:
    """The capture plan, with the measured record when there is one. Raises PlanError."""
    from vllm_kimi_eagle3.layers import facts_of

    options: dict[str, Any] = {}
    if pair.vllm is not None:
        facts = facts_of(pair.vllm)
        options = {
            "last_boundary_capturable": facts.last_boundary or facts.refused,
            "fixed_fc_states": None if facts.fc_counts else 3,
        }
    record = alignment.load(alignment.content_key(pair.target, pair.drafter, pair.headers))
    return resolve(
        pair.target, pair.drafter, headers=pair.headers, alignment=record, layer_rule=pair.layer_rule, **options
    )


CHECKS: tuple[Callable[[Pair], Iterator[Finding]], ...] = (
    target_served,
    model_type,
    layers,
    fc_width,
    draft_vocabulary,
    d2t,
    embed_tokens,
    lm_head,
    norms,
    tensors,
    dtype,
    max_length,
    trained_for,
)
