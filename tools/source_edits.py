# SPDX-License-Identifier: Apache-2.0
"""The remedies as edits of vLLM's source: one recipe a fix, in the order of the series.

A recipe names definitions, and in each the exact text that gives way to another; where releases differ, it holds one
variant for each wording. What it knows is text: whether the remedy is right is shown by ``tests/patches``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from vllm_kimi_eagle3.fixes import _proposer, draft_limit
from vllm_kimi_eagle3.fixes.target_whitelist import NAMES
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.source_patches.diff import lines_of

V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V1_READER = f"{V1_RUNNER}._get_eagle3_aux_layers_from_config"
V2_READER = "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils:get_eagle3_aux_layers_from_config"
V2_LOADER = "vllm.v1.worker.gpu.spec_decode.eagle.utils:load_eagle_model"
SPECULATIVE = "vllm.config.speculative:SpeculativeConfig"
DEEPSEEK = "vllm.model_executor.models.deepseek_v2"
KIMI = "vllm.model_executor.models.kimi_k25"


@dataclass(frozen=True)
class Place:
    """An edit of one definition, or of a whole module where the target names none.

    ``targets`` are the names that the definition has had; where none is there, the place is left out. A variant is a
    pair of texts, the first of which has to stand in the definition exactly once. ``before`` is put in front of it.
    """

    targets: tuple[str, ...]
    variants: tuple[tuple[str, str], ...] = ()
    before: str = ""
    when: Callable[[SourceTree], bool] = lambda tree: True

    def target(self, tree: SourceTree) -> str | None:
        """The target that this release has; None if the place is not for it."""
        there = (t for t in self.targets if (tree.has(t) if ":" in t else tree.has_module(t)))
        return next(there, None) if self.when(tree) else None

    def edit(self, text: str, target: str) -> str:
        """The edited module.

        Raises:
            LookupError: no variant fits.
        """
        lines = lines_of(text)
        first, last = _span(text, target)
        if self.before:
            return "".join([*lines[:first], self.before, *lines[first:]])
        scope = "".join(lines[first:last])
        for old, new in self.variants:
            if scope.count(old) == 1:
                return "".join([*lines[:first], scope.replace(old, new), *lines[last:]])
        raise LookupError(f"no variant fits {target}")


@dataclass(frozen=True)
class Names(Place):
    """D1's list of names is told by its members, as its probe tells it."""

    def edit(self, text: str, target: str) -> str:
        """The module with the names that are missing, one a line.

        Raises:
            LookupError: there is no such list.
        """
        first, last = _span(text, target)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.List) and first < node.lineno <= last and node.end_lineno is not None:
                names = [item.value for item in node.elts if isinstance(item, ast.Constant)]
                if {"llama", "qwen"} <= set(names):
                    lines = lines_of(text)
                    indent = " " * (len(lines[node.lineno - 1]) - len(lines[node.lineno - 1].lstrip()))
                    added = [name for name in NAMES if name not in names]
                    body = [f'{indent}    "{name}",\n' for name in [*names, *added]]
                    start = lines[node.lineno - 1][: node.col_offset]
                    lines[node.lineno - 1 : node.end_lineno] = [f"{start}[\n", *body, f"{indent}]\n"]
                    return "".join(lines)
        raise LookupError(f"{target} has no list of names")


@dataclass(frozen=True)
class Recipe:
    """One fix as edits; ``label`` is the fix's."""

    label: str
    file: str
    title: str
    description: str
    places: tuple[Place, ...]
    applied_upstream: str = "no"
    drop_when: str = ""

    def needed(self, tree: SourceTree, found: bool) -> bool:
        """Whether a release gets it; ``found`` is the probe's answer."""
        return found and any(place.target(tree) for place in self.places)


def _span(text: str, target: str) -> tuple[int, int]:
    """The lines of a definition, decorators included: the first, and the one behind the last."""
    qualname = target.partition(":")[2]
    scope: ast.AST = ast.parse(text)
    first, last = 0, len(text.splitlines())
    for name in filter(None, qualname.split(".")):
        found = [
            node
            for node in getattr(scope, "body", [])
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        if not found:
            raise LookupError(f"{target} is not there")
        scope = found[-1]
        first = min([found[-1].lineno, *(d.lineno for d in found[-1].decorator_list)]) - 1
        last = found[-1].end_lineno or last
    return first, last


def _bare_k25(tree: SourceTree) -> bool:
    """Whether Kimi-K2.5 holds the decoder itself, as 0.15 has it."""
    return tree.has_module(KIMI) and "self.language_model = DeepseekV2Model(" in tree.path(KIMI).read_text("utf-8")


def _whole_k25(tree: SourceTree) -> bool:
    return tree.has_module(KIMI) and not _bare_k25(tree)


# ---------------------------------------------------------------------------------------------------------------------
# D6, D7, D8: which layers

_KEY = "eagle_aux_hidden_state_layer_ids"
_V1_NESTED = f"""\
        layer_ids = getattr(hf_config, "{_KEY}", None)
        if not layer_ids:
            # Most trainers nest the ids.
            eagle_config = getattr(hf_config, "eagle_config", None)
            if eagle_config and isinstance(eagle_config, dict):
                layer_ids = eagle_config.get("{_KEY}")
"""
_V2_NESTED = "".join(line[4:] for line in _V1_NESTED.splitlines(keepends=True))
_GETATTR = f'layer_ids = getattr(hf_config, "{_KEY}", None)\n'
_HASATTR = f"""\
        if not hasattr(hf_config, "{_KEY}"):
            return None

        layer_ids = hf_config.{_KEY}
"""
_HASATTR_V2 = f"""\
    if not hasattr(hf_config, "{_KEY}"):
        return None
    layer_ids = hf_config.{_KEY}
"""


def _v1_deaf(tree: SourceTree) -> bool:
    return f".get('{_KEY}'" not in tree.text(V1_READER)


NESTED = Recipe(
    label="D6 nested-layer-ids",
    file="nested-layer-ids",
    title="read the nested EAGLE-3 layer ids",
    description="The ids under eagle_config are read right after the top-level ones, as boundaries, before any other"
    " drafter's keys.",
    places=(
        Place((V1_READER,), ((_HASATTR, _V1_NESTED), (f"        {_GETATTR}", _V1_NESTED)), when=_v1_deaf),
        Place((V2_READER,), ((_HASATTR_V2, _V2_NESTED), (f"    {_GETATTR}", _V2_NESTED))),
    ),
    applied_upstream="in part: V1 reads them from 0.22.0",
)

_RULE_METHOD = '''\
    def eagle3_layer_rule(self) -> str:
        """How the drafter's nested layer ids count: "boundary", where id k is the
        stream that enters layer k, or "output", where it is the output of layer k
        and so one boundary further. A checkpoint may say it as
        eagle_config.layer_rule; VLLM_KIMI_EAGLE3_LAYER_RULE goes first. Top-level
        ids are boundaries, always.
        """
        import os

        hf_config = getattr(self.draft_model_config, "hf_config", None)
        eagle_config = getattr(hf_config, "eagle_config", None) or {}
        rule = os.environ.get("VLLM_KIMI_EAGLE3_LAYER_RULE") or eagle_config.get(
            "layer_rule", "boundary"
        )
        if rule not in ("boundary", "output"):
            raise ValueError(
                f"The rule of the EAGLE-3 layer ids is {rule!r}, but boundary or "
                "output was expected"
            )
        return rule

'''


def _shifted(indent: int, owner: str) -> tuple[str, str]:
    pad = " " * indent
    old = f'{pad}layer_ids = eagle_config.get("{_KEY}")\n'
    return old, (
        f'{old}{pad}if layer_ids and {owner}.eagle3_layer_rule() == "output":\n'
        f"{pad}    layer_ids = [i + 1 for i in layer_ids]\n"
    )


RULE = Recipe(
    label="D7 layer-rule",
    file="layer-rule",
    title="let a drafter say how its layer ids count",
    description='Nested ids are shifted by one where the checkpoint has eagle_config.layer_rule = "output" or the'
    " environment VLLM_KIMI_EAGLE3_LAYER_RULE=output says so. Nothing is guessed: without either they stay boundaries."
    " The overlay also knows measured records and known producers; this patch does not.",
    places=(
        Place((f"{SPECULATIVE}.hf_config_override",), before=_RULE_METHOD),
        Place((V1_READER,), (_shifted(16, "self.speculative_config"),)),
        Place((V2_READER,), (_shifted(12, "spec_config"),)),
    ),
)

_HASH = "        hash_str = safe_hash(str(factors).encode(), usedforsecurity=False).hexdigest()\n"
CACHE_KEY = Recipe(
    label="D8 cache-key",
    file="cache-key",
    title="hash the EAGLE-3 layers and their rule",
    description="Top-level ids, the whole eagle_config and the rule in force become factors of the compile-cache key,"
    " so that a change of any of them compiles anew.",
    places=(
        Place(
            (f"{SPECULATIVE}.compute_hash",),
            (
                (
                    _HASH,
                    "        # The layers to capture, wherever the drafter names them, are in the graph.\n"
                    '        if self.method == "eagle3" and self.draft_model_config is not None:\n'
                    "            hf_config = self.draft_model_config.hf_config\n"
                    f'            factors.append(getattr(hf_config, "{_KEY}", None))\n'
                    '            factors.append(getattr(hf_config, "eagle_config", None))\n'
                    "            factors.append(self.eagle3_layer_rule())\n\n" + _HASH,
                ),
            ),
        ),
    ),
    drop_when="vLLM hashes the drafter's whole configuration (0.26.0 does) and layer-rule is dropped",
)

# ---------------------------------------------------------------------------------------------------------------------
# D1 to D5: up to 0.17.1

WHITELIST = Recipe(
    label="D1 target-whitelist",
    file="target-whitelist",
    title="allow EAGLE-3 on DeepSeek and Kimi targets",
    description="The four model types that 0.18.0 added join the list.",
    places=(Names((f"{SPECULATIVE}._verify_args",)),),
    applied_upstream="0.18.0",
)

_INTERFACE = """\
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.aux_hidden_state_layers = tuple(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        num_layers = len(self.model.layers)
        return (2, num_layers // 2, num_layers - 3)

"""
_K25_INTERFACE = """\
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.language_model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.language_model.get_eagle3_aux_hidden_state_layers()

"""
INTERFACE = Recipe(
    label="D2 eagle3-interface",
    file="eagle3-interface",
    title="let DeepSeek and Kimi targets implement SupportsEagle3",
    description="Both classes get the protocol as a base, its setter and its getter.",
    places=(
        Place(
            (DEEPSEEK,),
            (
                (
                    "from .interfaces import MixtureOfExperts, SupportsEagle, SupportsLoRA, SupportsPP\n",
                    "from .interfaces import (\n    MixtureOfExperts,\n    SupportsEagle,\n    SupportsEagle3,\n"
                    "    SupportsLoRA,\n    SupportsPP,\n)\n",
                ),
            ),
        ),
        Place(
            (f"{DEEPSEEK}:DeepseekV2ForCausalLM",),
            (
                (
                    "    nn.Module, SupportsPP, DeepseekV2MixtureOfExperts, SupportsLoRA, SupportsEagle\n",
                    "    nn.Module,\n    SupportsPP,\n    DeepseekV2MixtureOfExperts,\n    SupportsLoRA,\n"
                    "    SupportsEagle,\n    SupportsEagle3,\n",
                ),
            ),
        ),
        Place((f"{DEEPSEEK}:DeepseekV2ForCausalLM.forward",), before=_INTERFACE),
        Place(
            (KIMI,),
            (
                (
                    "from vllm.model_executor.models.interfaces import SupportsMultiModal, SupportsPP\n",
                    "from vllm.model_executor.models.interfaces import (\n    SupportsEagle3,\n"
                    "    SupportsMultiModal,\n    SupportsPP,\n)\n",
                ),
                (
                    "from vllm.model_executor.models.interfaces import (\n    SupportsMultiModal,\n",
                    "from vllm.model_executor.models.interfaces import (\n    SupportsEagle3,\n"
                    "    SupportsMultiModal,\n",
                ),
            ),
        ),
        Place(
            (f"{KIMI}:KimiK25ForConditionalGeneration",),
            (
                (
                    "(nn.Module, SupportsMultiModal, SupportsPP):\n",
                    "(\n    nn.Module, SupportsMultiModal, SupportsPP, SupportsEagle3\n):\n",
                ),
                (
                    "    nn.Module, SupportsMultiModal, SupportsPP, SupportsQuant\n",
                    "    nn.Module, SupportsMultiModal, SupportsPP, SupportsQuant, SupportsEagle3\n",
                ),
            ),
        ),
        Place(
            (f"{KIMI}:KimiK25ForConditionalGeneration.forward",),
            before=_INTERFACE.replace("self.model.", "self.language_model."),
            when=_bare_k25,
        ),
        Place((f"{KIMI}:KimiK25ForConditionalGeneration.forward",), before=_K25_INTERFACE, when=_whole_k25),
    ),
    applied_upstream="0.18.0",
)

_STREAM = "hidden_states.clone() if residual is None else hidden_states + residual"
CAPTURE = Recipe(
    label="D3 aux-capture",
    file="aux-capture",
    title="let the DeepSeek decoder show its residual stream",
    description="Hidden states plus residual are kept where they enter a layer asked for, and before the final norm.",
    places=(
        Place(
            (f"{DEEPSEEK}:DeepseekV2Model.__init__",),
            (
                (
                    "        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(\n"
                    '            ["hidden_states", "residual"], config.hidden_size\n        )\n',
                    "        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(\n"
                    '            ["hidden_states", "residual"], config.hidden_size\n        )\n'
                    "        self.aux_hidden_state_layers: tuple[int, ...] = ()\n",
                ),
            ),
        ),
        Place(
            (f"{DEEPSEEK}:DeepseekV2Model.forward",),
            (
                (
                    "        for layer in islice(self.layers, self.start_layer, self.end_layer):\n",
                    "        aux_hidden_states: list[torch.Tensor] = []\n        for idx, layer in enumerate(\n"
                    "            islice(self.layers, self.start_layer, self.end_layer),\n"
                    "            start=self.start_layer,\n        ):\n"
                    "            if idx in self.aux_hidden_state_layers:\n"
                    f"                aux_hidden_states.append(\n                    {_STREAM}\n                )\n",
                ),
            ),
        ),
        Place(
            (f"{DEEPSEEK}:DeepseekV2Model.forward",),
            (
                (
                    "        hidden_states, _ = self.norm(hidden_states, residual)\n",
                    "        if self.end_layer in self.aux_hidden_state_layers:\n"
                    "            aux_hidden_states.append(hidden_states + residual)\n\n"
                    "        hidden_states, _ = self.norm(hidden_states, residual)\n"
                    "        if len(aux_hidden_states) > 0:\n            return hidden_states, aux_hidden_states\n",
                ),
            ),
        ),
    ),
    applied_upstream="0.18.0",
)

_NEXT_LAYER = "            hidden_states, residual = layer("
EMBEDDINGS = Recipe(
    label="D23 embeddings",
    file="embeddings",
    title="let the DeepSeek decoder show its embeddings",
    description="Before layer 0 there is no residual; a copy is kept, since the layers add to their input in place.",
    places=(
        Place(
            (f"{DEEPSEEK}:DeepseekV2Model.forward",),
            (
                (
                    f"                aux_hidden_states.append(hidden_states + residual)\n{_NEXT_LAYER}",
                    f"                aux_hidden_states.append(\n                    {_STREAM}\n                )\n"
                    f"{_NEXT_LAYER}",
                ),
                (
                    "                aux_hidden_state = hidden_states + residual\n",
                    "                aux_hidden_state = (\n                    hidden_states.clone()\n"
                    "                    if residual is None\n                    else hidden_states + residual\n"
                    "                )\n",
                ),
            ),
        ),
    ),
)

_LOAD_MODEL = _proposer.places("load_model")
_ASKED = """\
            else:
                self.model.config.image_token_index = (
                    target_model.config.image_token_index
                )
"""
IMAGE = Recipe(
    label="D4 image-attribute",
    file="image-attribute",
    title="know Kimi-K2.5's image placeholder",
    description="The proposer takes it under the name that Kimi-K2.5's configuration has.",
    places=(
        Place(
            _LOAD_MODEL,
            (
                (
                    _ASKED,
                    "            elif (\n                self.get_model_name(target_model)\n"
                    '                == "KimiK25ForConditionalGeneration"\n            ):\n'
                    "                self.model.config.image_token_index = (\n"
                    "                    target_model.config.media_placeholder_token_id\n                )\n" + _ASKED,
                ),
            ),
        ),
    ),
    applied_upstream="0.18.0",
)

PARTS = Recipe(
    label="D5 k25-language-model",
    file="k25-language-model",
    title="find the parts of Kimi-K2.5's bare decoder",
    description="Where the language model is the decoder itself, its parts are shown as a causal model has them.",
    places=(
        Place(
            _LOAD_MODEL,
            (
                (
                    "            target_language_model = target_model.get_language_model()\n",
                    "            target_language_model = target_model.get_language_model()\n"
                    '            if not hasattr(target_language_model, "model"):\n'
                    "                # Kimi-K2.5 wraps the decoder itself, with the lm_head beside it.\n"
                    "                target_language_model = SimpleNamespace(\n"
                    "                    model=target_language_model, lm_head=target_model.lm_head\n"
                    "                )\n",
                ),
            ),
        ),
        Place(
            ("vllm.v1.spec_decode.eagle",),
            (
                (
                    "from importlib.util import find_spec\n",
                    "from importlib.util import find_spec\nfrom types import SimpleNamespace\n",
                ),
                (
                    "from dataclasses import replace\n",
                    "from dataclasses import replace\nfrom types import SimpleNamespace\n",
                ),
            ),
        ),
    ),
    applied_upstream="0.16.0",
)

# ---------------------------------------------------------------------------------------------------------------------
# The runners and the proposer

_PROPOSER = "vllm.v1.spec_decode.eagle:SpecDecodeBaseProposer"
BLOCK_SIZE = Recipe(
    label="D10 draft-block-size",
    file="draft-block-size",
    title="count the drafter's slots in the kernel's blocks",
    description="Both places take the block size from the metadata builder, which knows the kernel's.",
    places=tuple(
        Place(
            (f"{_PROPOSER}.{method}",),
            (
                (
                    "            block_size = self.draft_attn_groups[0].kv_cache_spec.block_size\n",
                    "            builder = self.draft_attn_groups[0].get_metadata_builder()\n"
                    "            block_size = builder.kv_cache_spec.block_size\n",
                ),
            ),
        )
        for method in ("propose", "set_inputs_first_pass")
    ),
    applied_upstream="0.18.0",
)

PLACEHOLDER = Recipe(
    label="D11 image-placeholder",
    file="image-placeholder",
    title="read the image placeholder of Kimi-K2.5's new schema",
    description="The proposer takes image_token_id, and the old name where a configuration still has only that.",
    places=(
        Place(
            _LOAD_MODEL,
            (
                (
                    "                self.model.config.image_token_index = (\n"
                    "                    target_model.config.media_placeholder_token_id\n                )\n",
                    "                self.model.config.image_token_index = (\n"
                    "                    target_model.config.image_token_id\n"
                    '                    if hasattr(target_model.config, "image_token_id")\n'
                    "                    else target_model.config.media_placeholder_token_id\n                )\n",
                ),
            ),
        ),
    ),
)

_HEAD_FUNCTION = '''\
def get_target_lm_head(target_model: nn.Module) -> nn.Module | None:
    """The target's lm_head; a multimodal wrapper may keep it on its language model."""
    if hasattr(target_model, "get_language_model"):
        lm_head = getattr(target_model.get_language_model(), "lm_head", None)
        if lm_head is not None:
            return lm_head
    return getattr(target_model, "lm_head", None)


'''
_OLD_SHARE = """\
    if share_lm_head and hasattr(target_model, "lm_head"):
        if hasattr(eagle_model, "lm_head"):
            del eagle_model.lm_head
        eagle_model.lm_head = target_model.lm_head
"""
LM_HEAD = Recipe(
    label="D12 shared-lm-head",
    file="shared-lm-head",
    title="find the lm_head of a multimodal target on V2",
    description="The language model is asked first, as V1 does and V2 from 0.26.0 on.",
    places=(
        Place((V2_LOADER,), before=_HEAD_FUNCTION),
        Place(
            (V2_LOADER,),
            (
                (
                    '    target_lm_head = getattr(target_model, "lm_head", None)\n',
                    "    target_lm_head = get_target_lm_head(target_model)\n",
                ),
                (
                    _OLD_SHARE,
                    "    target_lm_head = get_target_lm_head(target_model)\n"
                    "    if share_lm_head and target_lm_head is not None:\n"
                    '        if hasattr(eagle_model, "lm_head"):\n            del eagle_model.lm_head\n'
                    "        eagle_model.lm_head = target_lm_head\n",
                ),
            ),
        ),
        Place(
            (V2_LOADER,),
            (
                (
                    "                    sh.head = target_model.lm_head\n",
                    "                    sh.head = target_lm_head\n",
                ),
            ),
            when=lambda tree: "sh.head = target_model.lm_head" in tree.text(V2_LOADER),
        ),
    ),
    applied_upstream="0.26.0",
)

USE_AUX = Recipe(
    label="D13 use-aux-flag",
    file="use-aux-flag",
    title="ask the drafter whether it wants auxiliary states on V2",
    description="The flag follows eagle_config.use_aux_hidden_state, as V1 has it and V2 from 0.33.0 on.",
    places=(
        Place(
            ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__",),
            (
                (
                    "                self.use_aux_hidden_state_outputs = True\n",
                    "                draft_config = self.speculative_config.draft_model_config\n"
                    '                hf_config = getattr(draft_config, "hf_config", None)\n'
                    '                eagle_config = getattr(hf_config, "eagle_config", None) or {}\n'
                    "                self.use_aux_hidden_state_outputs = eagle_config.get(\n"
                    '                    "use_aux_hidden_state", True\n                )\n',
                ),
            ),
        ),
    ),
    applied_upstream="0.33.0",
)

_BACKEND_METHOD = '''\
    def with_draft_attention_backend(self, vllm_config: Any) -> Any:
        """The configuration to build the drafter under: a backend that is forced on
        the target does not bind a drafter with another kind of attention.
        """
        import copy

        if (
            vllm_config.attention_config.backend is None
            or getattr(self, "attention_backend", None) is not None
            or self.target_model_config.use_mla == self.draft_model_config.use_mla
        ):
            return vllm_config
        vllm_config = copy.copy(vllm_config)
        vllm_config.attention_config = copy.copy(vllm_config.attention_config)
        vllm_config.attention_config.backend = None
        return vllm_config

'''
_TAG = 'with set_model_tag("eagle_head"):\n'


def _v1_forces(tree: SourceTree) -> bool:
    from vllm_kimi_eagle3.fixes.draft_attention_backend import V2_MODULE, faulty

    return any(module != V2_MODULE for module in faulty(tree))


BACKEND = Recipe(
    label="D15 draft-attention-backend",
    file="draft-attention-backend",
    title="do not force the target's attention backend on the drafter",
    description="The drafter is built under a copy of the configuration whose backend is automatic, where the target's"
    " was forced, the drafter's was not, and one of the two has MLA and the other has not.",
    places=(
        Place((f"{SPECULATIVE}.hf_config_override",), before=_BACKEND_METHOD),
        Place(
            (*_proposer.places("_get_model"), *_LOAD_MODEL),
            (
                (
                    "                vllm_config=self.vllm_config,\n"
                    "                model_config=self.speculative_config.draft_model_config,\n",
                    "                vllm_config=self.speculative_config.with_draft_attention_backend(\n"
                    "                    self.vllm_config\n                ),\n"
                    "                model_config=self.speculative_config.draft_model_config,\n",
                ),
                (
                    "                vllm_config=self.vllm_config, model_config=draft_model_config\n",
                    "                vllm_config=self.speculative_config.with_draft_attention_backend(\n"
                    "                    self.vllm_config\n                ),\n"
                    "                model_config=draft_model_config,\n",
                ),
                (
                    f"        {_TAG}",
                    "        draft_vllm_config = self.speculative_config.with_draft_attention_backend(\n"
                    f"            draft_vllm_config\n        )\n        {_TAG}",
                ),
            ),
            when=_v1_forces,
        ),
        Place(
            (V2_LOADER,),
            (
                (
                    f"    {_TAG}",
                    f"    vllm_config = speculative_config.with_draft_attention_backend(vllm_config)\n    {_TAG}",
                ),
            ),
        ),
    ),
    applied_upstream="in part: V1 separates the two from 0.21.0",
)

# ---------------------------------------------------------------------------------------------------------------------
# float16, MLA drafters, chunked prefill

SCALE = Recipe(
    label="D16 float16-scale",
    file="float16-scale",
    title="show captured states at their true size in float16",
    description="They are multiplied by what the overflow guard divided the stream by, and held within float16's range:"
    " one infinity would make the drafter's whole row NaN.",
    places=(
        Place(
            (f"{DEEPSEEK}:DeepseekV2Model.forward",),
            (
                (
                    "        if len(aux_hidden_states) > 0:\n            return hidden_states, aux_hidden_states\n",
                    "        if len(aux_hidden_states) > 0:\n"
                    "            if hidden_states.dtype == torch.float16:\n"
                    "                # The layers divided the stream by this factor (see DecoderLayer).\n"
                    '                factor = getattr(self.config, "routed_scaling_factor", 1.0)\n'
                    "                largest = torch.finfo(torch.float16).max\n"
                    "                aux_hidden_states = [\n"
                    "                    (state.float() * factor).clamp(-largest, largest).to(state.dtype)\n"
                    "                    for state in aux_hidden_states\n                ]\n"
                    "            return hidden_states, aux_hidden_states\n",
                ),
            ),
        ),
    ),
)

CLONE = Recipe(
    label="D17 float16-clone",
    file="float16-clone",
    title="do not scale the caller's embeddings in place",
    description="The first layer clones its input again before it becomes the residual that the guard scales.",
    places=(
        Place(
            (f"{DEEPSEEK}:DeepseekV2DecoderLayer.forward",),
            (
                (
                    "            residual = hidden_states\n",
                    "            residual = hidden_states.clone()\n",
                ),
            ),
        ),
    ),
)

ROPE = Recipe(
    label="D25 drafter-rope",
    file="drafter-rope",
    title="keep an MLA drafter's rotary embedding",
    description="The configuration's own rope parameters are used, copied because the attention renames their type.",
    places=(
        Place(
            ("vllm.model_executor.models.deepseek_eagle3:DeepseekV2Eagle3DecoderLayer.__init__",),
            (
                (
                    "        if rope_scaling:\n            rope_params = rope_scaling.copy()\n"
                    '            rope_params["rope_type"] = "deepseek_yarn"\n        else:\n'
                    '            rope_params = {"rope_type": "default"}\n'
                    "        config.rope_parameters = rope_params\n",
                    "        config.rope_parameters = dict(config.rope_parameters)\n",
                ),
            ),
        ),
        Place(
            ("vllm.model_executor.models.deepseek_eagle3:DeepseekV2Eagle3DecoderLayer.__init__",),
            (('        rope_scaling = getattr(config, "rope_scaling", None)\n', ""),),
        ),
    ),
    applied_upstream="0.28.0",
)

SHARDED = Recipe(
    label="D26 sharded-step",
    file="sharded-step",
    title="do not take a rank's shard for a whole step of one token",
    description="Layers and capture tell a shard by its having fewer rows than there are tokens. A layer that leaves a"
    " shard ends a step of one token with the whole row.",
    places=(
        Place(
            (f"{DEEPSEEK}:DeepseekV2DecoderLayer.forward",),
            (
                (
                    "        return hidden_states, residual\n",
                    "        # A shard of one row would be taken for the whole.\n"
                    "        if self.use_sequence_parallel_moe and full_num_tokens == 1:\n"
                    "            states = torch.stack([hidden_states, residual], dim=1)\n"
                    "            states = tensor_model_parallel_all_gather(states, 0)[:1]\n"
                    "            hidden_states, residual = states.unbind(dim=1)\n\n"
                    "        return hidden_states, residual\n",
                ),
            ),
        ),
    ),
)

_FIRST = "        initial_architecture = hf_config.architectures[0]\n"
MTP = Recipe(
    label="D18 mtp-rewrite",
    file="mtp-rewrite",
    title="do not take an MLA EAGLE-3 drafter for an MTP head",
    description="A configuration that is an EAGLE-3 drafter's is left as it is.",
    places=(
        Place(
            (f"{SPECULATIVE}.hf_config_override",),
            (
                (
                    _FIRST,
                    _FIRST + "        # An EAGLE-3 drafter with MLA carries DeepSeek's model type and is no MTP head.\n"
                    "        if hf_config.model_type in (\n"
                    '            "deepseek_v2",\n            "deepseek_v3",\n            "deepseek_v32",\n'
                    '            "kimi_k2",\n        ) and (\n'
                    '            hasattr(hf_config, "eagle_config")\n'
                    f'            or hasattr(hf_config, "{_KEY}")\n'
                    "            or any(\n"
                    '                name.startswith("Eagle3") or name.endswith("Eagle3")\n'
                    "                for name in hf_config.architectures\n            )\n        ):\n"
                    "            return hf_config\n",
                ),
            ),
        ),
    ),
)

_COPY = "        self.discard_request_mask.copy_to_gpu(num_reqs)\n"
_NO_SPEC = "        self.num_tokens_no_spec = self.num_tokens_no_spec_cpu_tensor.numpy()\n"
_LIST = "        seq_lens_list = (gpu_input_batch.num_tokens_no_spec[:num_reqs] - 1).tolist()\n"
_ONE = "            ].get_token_id(gpu_input_batch.num_tokens_no_spec[i] - 1)\n"
CHUNK_END = Recipe(
    label="D22 chunk-end-token",
    file="chunk-end-token",
    title="give the drafter the token behind each prefill chunk",
    description="The runner notes where the chunk of each partly prefilled request ends; the fallback token is looked"
    " up there, and not at the end of the whole prompt.",
    places=(
        Place(
            ("vllm.v1.worker.gpu_input_batch:InputBatch.__init__",),
            (
                (
                    _NO_SPEC,
                    _NO_SPEC + "        # Where this step's chunk ends, by request, if it ends inside the prompt.\n"
                    "        self.chunk_ends: dict[int, int] = {}\n",
                ),
            ),
        ),
        Place(
            (f"{V1_RUNNER}._prepare_inputs",),
            (
                (
                    _COPY,
                    _COPY + "        partial = self.discard_request_mask.np[:num_reqs].nonzero()[0].tolist()\n"
                    "        self.input_batch.chunk_ends = {\n"
                    "            i: int(self.optimistic_seq_lens_cpu[i]) for i in partial\n        }\n",
                ),
            ),
        ),
        Place(
            _proposer.places("prepare_next_token_ids_padded"),
            (
                (
                    _LIST,
                    _LIST + "        for i, end in gpu_input_batch.chunk_ends.items():\n"
                    "            seq_lens_list[i] = end\n",
                ),
                (
                    _ONE,
                    "            ].get_token_id(\n                gpu_input_batch.chunk_ends.get(\n"
                    "                    i, gpu_input_batch.num_tokens_no_spec[i] - 1\n                )\n"
                    "            )\n",
                ),
            ),
        ),
    ),
)

_ATTACHED = "        self.kv_cache_config = kv_cache_config\n"
_SLOTS = "common_attn_metadata.slot_mapping = self._slot_mapping_buffer[:batch_size]\n"


def _masked(indent: str) -> tuple[str, str]:
    lines = (
        "# A position of 0 would be 1 in the next step, inside the request.\n",
        "out_pos.masked_fill_(\n",
        "    common_attn_metadata.slot_mapping == PADDING_SLOT_ID,\n",
        "    self.max_model_len - 1,\n",
        ")\n",
    )
    return indent + _SLOTS, indent + _SLOTS + "".join(indent + line for line in lines)


DRAFT_LIMIT = Recipe(
    label="D24 draft-limit",
    file="draft-limit",
    title="do not take the drafter from everybody for one long request",
    description="V1 drafts for a batch only while its longest sequence is within the drafter's length. That rule is"
    " lifted where the drafter's rotary embedding reaches as far as a request may, and what the drafter's loop masks"
    " beyond the longest request stays masked.",
    places=(
        Place(
            (f"{V1_RUNNER}.initialize_kv_cache",),
            (
                (
                    _ATTACHED,
                    _ATTACHED + "        # One long request need not take the drafter from the others, where its\n"
                    "        # rotary tables reach as far as a request may.\n"
                    "        spec_config = self.speculative_config\n"
                    '        drafter = getattr(self, "drafter", None)\n'
                    "        if (\n"
                    "            spec_config is not None\n"
                    '            and spec_config.method == "eagle3"\n'
                    "            and spec_config.max_model_len is None\n"
                    "            and drafter is not None\n"
                    "        ):\n"
                    "            tables = [\n"
                    "                module.cos_sin_cache\n"
                    "                for module in drafter.model.modules()\n"
                    '                if getattr(module, "cos_sin_cache", None) is not None\n'
                    "            ]\n"
                    "            if tables and min(map(len, tables)) >= self.max_model_len:\n"
                    "                drafter.max_model_len = self.max_model_len\n"
                    "                self.effective_drafter_max_model_len = (\n"
                    "                    self.max_model_len + spec_config.num_speculative_tokens\n"
                    "                )\n",
                ),
            ),
        ),
        Place(
            (*_proposer.places("_update_positions_dependent_metadata"), *_proposer.places("propose")),
            (_masked(" " * 12), _masked(" " * 8)),
            when=lambda tree: draft_limit.step_of(tree) is not None,
        ),
    ),
)

_DRAFT_LENGTH = "                self.draft_model_config.max_model_len = (\n"
POSITIONS = Recipe(
    label="D27 drafter-positions",
    file="drafter-positions",
    title="let an EAGLE-3 drafter's rotary embedding reach as far as a request may",
    description="The drafter's max_position_embeddings, which sizes its table, is raised to the target's longest"
    " request, whose positions it is given, where its frequencies stay.",
    places=(
        Place(
            (f"{SPECULATIVE}.__post_init__",),
            (
                (
                    _DRAFT_LENGTH,
                    '                if self.method == "eagle3":\n'
                    "                    # Its rotary table is sized by this; positions are the target's.\n"
                    "                    draft_hf_config = self.draft_model_config.hf_config\n"
                    "                    longest = self.target_model_config.max_model_len\n"
                    '                    own = getattr(draft_hf_config, "max_position_embeddings", None)\n'
                    '                    rope = getattr(draft_hf_config, "rope_parameters", None) or {}\n'
                    "                    if (\n"
                    "                        own is not None\n"
                    "                        and own < longest\n"
                    "                        # Kinds whose frequencies do not depend on it.\n"
                    '                        and rope.get("rope_type", "default")\n'
                    '                        in ("default", "linear", "llama3")\n'
                    "                    ):\n"
                    "                        draft_hf_config.max_position_embeddings = longest\n\n" + _DRAFT_LENGTH,
                ),
            ),
        ),
    ),
    applied_upstream="0.27.0",
)

# ---------------------------------------------------------------------------------------------------------------------
# The CPU engine

REBINDING = Recipe(
    label="C1 cpu-kernel-rebinding",
    file="cpu-kernel-rebinding",
    title="do not trust every __dict__ while kernels are rebound",
    description="Objects whose __dict__ is no mapping are passed over.",
    places=(
        Place(
            ("vllm.triton_utils.dispatcher:_rebind_kernels",),
            (
                (
                    '                wrapper = lookup(vars(value).get("kernel"))\n',
                    "                fields = vars(value)\n"
                    '                if hasattr(fields, "get"):  # an extension may have something else there\n'
                    '                    wrapper = lookup(fields.get("kernel"))\n',
                ),
            ),
        ),
    ),
)

_ROTARY = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu"
ROTARY = Recipe(
    label="C2 cpu-rotary-embedding",
    file="cpu-rotary-embedding",
    title="flatten heads for the CPU rotary kernel",
    description="The kernel is right for (tokens, heads times dim), so it is given that; the result has the old shape.",
    places=(
        Place(
            (_ROTARY,),
            (
                (
                    "        # ops.rotary_embedding() is an in-place operation\n",
                    "        flat_query, flat_key = query, key\n"
                    "        if query.dim() == 3:\n"
                    "            # The kernel takes a wrong stride from (tokens, heads, dim).\n"
                    "            flat_query = query.flatten(1).contiguous()\n"
                    "            flat_key = None if key is None else key.flatten(1).contiguous()\n\n"
                    "        # ops.rotary_embedding() is an in-place operation\n",
                ),
            ),
        ),
        Place(
            (_ROTARY,),
            (
                (
                    "            positions,\n            query,\n            key,\n",
                    "            positions,\n            flat_query,\n            flat_key,\n",
                ),
            ),
        ),
        Place(
            (_ROTARY,),
            (
                (
                    "        return query, key\n",
                    "        return (\n            flat_query.view(query.shape),\n"
                    "            None if key is None else flat_key.view(key.shape),\n        )\n",
                ),
            ),
        ),
    ),
)

BLOCKS = Recipe(
    label="C3 cpu-attention-block-size",
    file="cpu-attention-block-size",
    title="declare that CPU attention takes blocks of 16",
    description="Its kernels do (vec16), and CPU MLA takes nothing else, so that the two can share a KV group.",
    places=(
        Place(
            ("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_kernel_block_sizes",),
            (("        return [MultipleOf(32)]\n", "        return [MultipleOf(16)]\n"),),
        ),
    ),
)

_KERNEL = """\
    torch.ops._C.expand_kernel_impl(
        _ensure_int64(output),
        _ensure_int64(input_val),
        _ensure_int64(cu_num_tokens),
        replace_from,
        replace_to,
    )
"""
EXPANSION = Recipe(
    label="C5 cpu-sampling-expansion",
    file="cpu-sampling-expansion",
    title="expand sampling parameters into the tensor that was given",
    description="In torch, because the kernel's integers hold no temperatures.",
    places=(
        Place(
            ("vllm.utils.cpu_triton_utils:_expand_kernel_impl",),
            (
                (
                    _KERNEL,
                    "    # Not by the kernel: it would write integers, into a converted copy.\n"
                    "    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))\n"
                    "    values = input_val.masked_fill(input_val == replace_from, replace_to)\n"
                    "    values = values.repeat_interleave(counts.to(torch.int64))\n"
                    "    output[: values.shape[0]] = values\n",
                ),
            ),
        ),
    ),
)

_POINTED = """\
        spec_decode_utils.eagle_step_slot_mapping_metadata_kernel = (
            cpu_tl.eagle_step_slot_mapping_metadata_kernel
        )
        vllm.v1.sample.rejection_sampler.rejection_greedy_sample_kernel = (
            cpu_tl.rejection_greedy_sample_kernel
        )
        vllm.v1.sample.rejection_sampler.rejection_random_sample_kernel = (
            cpu_tl.rejection_random_sample_kernel
        )
        vllm.v1.sample.rejection_sampler.expand_kernel = cpu_tl.expand_kernel
        vllm.v1.sample.rejection_sampler.sample_recovered_tokens_kernel = (
            cpu_tl.sample_recovered_tokens_kernel
        )
"""
_POINTED_RIGHT = """\
        spec_decode_utils._eagle_step_slot_mapping_metadata.kernel = (
            cpu_tl.eagle_step_slot_mapping_metadata_kernel
        )
        vllm.v1.sample.rejection_sampler._rejection_greedy_sample.kernel = (
            cpu_tl.rejection_greedy_sample_kernel
        )
        vllm.v1.sample.rejection_sampler._rejection_random_sample.kernel = (
            cpu_tl.rejection_random_sample_kernel
        )
        vllm.v1.sample.rejection_sampler._expand.kernel = cpu_tl.expand_kernel
        vllm.v1.sample.rejection_sampler._sample_recovered_tokens.kernel = (
            cpu_tl.sample_recovered_tokens_kernel
        )
"""
_EXPANDED = "    values = {0}.masked_fill({0} == replace_from, replace_to)\n"
DISPATCHERS = Recipe(
    label="C6 cpu-draft-step-kernel",
    file="cpu-draft-step-kernel",
    title="give the dispatchers of speculation their C++ kernels",
    description="The dispatchers bind arguments by name, so two of the wrappers' parameters get theirs.",
    places=(
        Place(
            ("vllm.v1.worker.cpu_model_runner:CPUModelRunner._postprocess_triton",),
            ((_POINTED, _POINTED_RIGHT),),
        ),
        Place(
            ("vllm.utils.cpu_triton_utils:_eagle_step_slot_mapping_metadata_kernel_impl",),
            (("    stride,\n    seq_lens,\n", "    block_table_stride,\n    seq_lens,\n"),),
        ),
        Place(
            ("vllm.utils.cpu_triton_utils:_expand_kernel_impl",),
            (("    input_val,\n    cu_num_tokens,\n", "    input,\n    cu_num_tokens,\n"),),
        ),
        Place(
            ("vllm.utils.cpu_triton_utils:_expand_kernel_impl",),
            ((_EXPANDED.format("input_val"), _EXPANDED.format("input")),),
        ),
    ),
)

# ---------------------------------------------------------------------------------------------------------------------
# D19, D9: TRITON_MLA

TRITON = "vllm.v1.attention.backends.mla.triton_mla"
_TRITON_BACKEND = f"{TRITON}:TritonMLABackend"
_TRITON_BUILDER = f"{TRITON}:TritonMLAMetadataBuilder"
_ROWS_FUNCTIONS = """\
# Rows of decode that take the decode path whatever max_num_seqs is: vLLM's largest
# CUDA graph by default.
_MIN_DECODE_ROWS = 512


def _serves_rows(vllm_config, kv_cache_spec) -> bool:
    # Whether multi-token decode is expressed as rows for this group of layers.
    parallel_config = vllm_config.parallel_config
    return (
        vllm_config.speculative_config is not None
        and parallel_config.decode_context_parallel_size == 1
        and getattr(parallel_config, "prefill_context_parallel_size", 1) == 1
        and not getattr(kv_cache_spec, "non_causal_multi_token_decode", False)
    )


def _graph_rows(vllm_config, query_len: int) -> int:
    # The most rows that a CUDA graph may have; 0 without graphs.
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes
    largest = max(sizes or [0])
    return -(-largest // query_len) * query_len


def _most_rows(vllm_config, query_len: int) -> int:
    # The kernel's scratch memory is proportional to this, so a larger batch takes the
    # prefill path.
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    return min(
        max_num_seqs * query_len,
        max(max_num_seqs, _MIN_DECODE_ROWS, _graph_rows(vllm_config, query_len)),
    )


def _num_decode_rows(common_attn_metadata, query_len: int) -> int:
    if common_attn_metadata.max_query_len <= query_len:
        return common_attn_metadata.num_actual_tokens
    query_start_loc = common_attn_metadata.query_start_loc_cpu
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    return int(query_lens[query_lens <= query_len].sum())


def _write_decode_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    row_seq_lens: torch.Tensor,
    row_block_table: torch.Tensor,
) -> None:
    # Each query row's own extent and block table, without a copy to the host. Rows of
    # graph padding see the first position of the first request: an extent of 0 would
    # give NaN.
    rows = torch.arange(
        row_seq_lens.shape[0],
        dtype=query_start_loc.dtype,
        device=query_start_loc.device,
    )
    ends = query_start_loc[1:]
    request = torch.searchsorted(ends, rows, right=True)
    real = request < ends.shape[0]
    request = torch.where(real, request, 0)
    length = seq_lens.index_select(0, request)
    own = length - (ends.index_select(0, request) - 1 - rows)
    row_seq_lens.copy_(torch.where(real, own, length.clamp(max=1)).clamp(min=0))
    torch.index_select(block_table, 0, request, out=row_block_table)


"""
_ROWS_HEAD = '''\
class TritonMLARowsMetadataBuilder({base}):
    """Several query tokens a request as rows of decode, in buffers of fixed address."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec) -> AttentionCGSupport:
        if _serves_rows(vllm_config, kv_cache_spec):
            return AttentionCGSupport.UNIFORM_BATCH
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if support is AttentionCGSupport.UNIFORM_BATCH and not getattr(
            kv_cache_spec, "non_causal_multi_token_decode", False
        ):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return support

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        if _serves_rows(vllm_config, kv_cache_spec):
            self.query_len_support = QueryLenSupport.VARLEN
        self._row_buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {{}}
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @property
    def _as_rows(self) -> bool:
        return self.query_len_support is QueryLenSupport.VARLEN

'''
_ROWS_RESERVE = """\
    def _reserve_attn_logits_workspace(self) -> None:
        super()._reserve_attn_logits_workspace()
        if not self._as_rows or not is_workspace_manager_initialized():
            return
        rows = _most_rows(self.vllm_config, self.reorder_batch_threshold)
        max_splits = _compute_num_kv_splits(
            self.model_config.max_model_len,
            current_platform.num_compute_units(),
        )
        lse_dim = self.mla_dims.kv_lora_rank + 1
        current_workspace_manager().get_simultaneous(
            ((rows, self.num_heads, max_splits, lse_dim), torch.float32),
        )

"""
_ROWS_TAIL = """\
    def build_for_cudagraph_capture(self, common_attn_metadata):
        query_len = self.reorder_batch_threshold
        rows = common_attn_metadata.num_actual_tokens
        held = _graph_rows(self.vllm_config, query_len)
        if self._as_rows and common_attn_metadata.max_query_len > 1 and rows > held:
            raise RuntimeError(
                f"a CUDA graph of {rows} query tokens is to be captured, and "
                f"TRITON_MLA's buffers hold {held}: its replays would read stale "
                "memory; name that size in cudagraph_capture_sizes"
            )
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        query_len = self.reorder_batch_threshold
        if not self._as_rows or _num_decode_rows(
            common_attn_metadata, query_len
        ) <= _most_rows(self.vllm_config, query_len):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        self.reorder_batch_threshold = 1
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        finally:
            self.reorder_batch_threshold = query_len

    def _build_decode(self, **decode):
        start = decode["query_start_loc_cpu"]
        # Draft steps raise the lengths of single tokens in place.
        if self._as_rows and int((start[1:] - start[:-1]).max()) > 1:
            seq_lens = decode["seq_lens_device"]
            block_table = decode["block_table_tensor"]
            row_seq_lens, row_block_table = self._rows(
                decode["num_decode_tokens"], seq_lens, block_table
            )
            _write_decode_rows(
                decode["query_start_loc_device"],
                seq_lens,
                block_table,
                row_seq_lens,
                row_block_table,
            )
            decode["seq_lens_device"] = row_seq_lens
            decode["block_table_tensor"] = row_block_table
        return super()._build_decode(**decode)

    def _rows(
        self, rows: int, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # What a graph may replay has to lie in the same memory at every step.
        width = block_table.shape[1]
        held = _graph_rows(self.vllm_config, self.reorder_batch_threshold)
        if rows > held:
            return seq_lens.new_empty(rows), block_table.new_empty(rows, width)
        if width not in self._row_buffers:
            with torch.inference_mode(False):
                self._row_buffers[width] = (
                    torch.zeros(held, dtype=seq_lens.dtype, device=seq_lens.device),
                    torch.zeros(
                        held, width, dtype=block_table.dtype, device=block_table.device
                    ),
                )
        row_seq_lens, row_block_table = self._row_buffers[width]
        return row_seq_lens[:rows], row_block_table[:rows]


"""


def _rows_class(own_builder: bool, reserves: bool) -> str:
    """The functions and the builder, over TRITON_MLA's own or the common one."""
    base = "TritonMLAMetadataBuilder" if own_builder else "MLACommonMetadataBuilder"
    head = _ROWS_HEAD.format(base=base if own_builder else f"{base}[MLACommonMetadata]")
    return _ROWS_FUNCTIONS + head + (_ROWS_RESERVE if reserves else "") + _ROWS_TAIL


def _reserves(tree: SourceTree) -> bool:
    return tree.has(f"{_TRITON_BUILDER}._reserve_attn_logits_workspace")


_NEW_BUILDER = """\
    @staticmethod
    def get_builder_cls() -> type["TritonMLARowsMetadataBuilder"]:
        return TritonMLARowsMetadataBuilder

"""
_COMMON_IMPORT = "    MLACommonMetadata,\n"
_OWN_IMPORT = "    MLACommonMetadataBuilder,\n)\n"
ROWS = Recipe(
    label="D19 triton-mla-decode",
    file="triton-mla-decode",
    title="verify draft tokens as rows of decode on TRITON_MLA",
    description="The kernel runs one program a row of q. A request's tokens become rows with an extent and a block"
    " table each, written once a step into buffers that captured graphs read again; uniform batches may be captured."
    " Context parallelism, non-causal blocks and servers without speculation are left as they are.",
    places=(
        Place(
            (_TRITON_BACKEND,),
            before=_rows_class(own_builder=False, reserves=False),
            when=lambda tree: not tree.has(_TRITON_BUILDER),
        ),
        Place(
            (_TRITON_BACKEND,),
            before=_rows_class(own_builder=True, reserves=False),
            when=lambda tree: tree.has(_TRITON_BUILDER) and not _reserves(tree),
        ),
        Place((_TRITON_BACKEND,), before=_rows_class(own_builder=True, reserves=True), when=_reserves),
        Place(
            (f"{_TRITON_BACKEND}.get_builder_cls",),
            (
                (
                    'type["TritonMLAMetadataBuilder"]:\n        return TritonMLAMetadataBuilder\n',
                    'type["TritonMLARowsMetadataBuilder"]:\n        return TritonMLARowsMetadataBuilder\n',
                ),
            ),
        ),
        Place(
            (f"{_TRITON_BACKEND}.get_impl_cls",),
            before=_NEW_BUILDER,
            when=lambda tree: not tree.has(f"{_TRITON_BACKEND}.get_builder_cls"),
        ),
        Place(
            (TRITON,),
            (
                (_OWN_IMPORT, "    MLACommonMetadataBuilder,\n    QueryLenSupport,\n)\n"),
                (
                    f"{_COMMON_IMPORT})\n",
                    f"{_COMMON_IMPORT}    MLACommonMetadataBuilder,\n    QueryLenSupport,\n)\n",
                ),
            ),
        ),
        Place(
            (TRITON,),
            (("    AttentionLayer,\n", "    AttentionCGSupport,\n    AttentionLayer,\n"),),
            when=lambda tree: not tree.has(_TRITON_BUILDER),
        ),
    ),
    applied_upstream="0.31.0, in the layers' forward",
)

RECIPES: tuple[Recipe, ...] = (
    WHITELIST,
    INTERFACE,
    CAPTURE,
    EMBEDDINGS,
    IMAGE,
    PARTS,
    NESTED,
    RULE,
    CACHE_KEY,
    BLOCK_SIZE,
    PLACEHOLDER,
    LM_HEAD,
    USE_AUX,
    BACKEND,
    SCALE,
    CLONE,
    MTP,
    ROPE,
    SHARDED,
    CHUNK_END,
    POSITIONS,
    DRAFT_LIMIT,
    ROWS,
    REBINDING,
    ROTARY,
    BLOCKS,
    EXPANSION,
    DISPATCHERS,
)
