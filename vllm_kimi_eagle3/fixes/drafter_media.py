# SPDX-License-Identifier: Apache-2.0
"""D21: what a drafter sees where a prompt has a picture is nobody's choice.

A drafter's row holds the embedding of the next token. Where that is a picture's, the target has put the vision tower's
embedding in its place; both EAGLE-3 drafters of vLLM drop it and embed the placeholder's id, in every release. Trainers
differ: most feed the placeholder too (SpecForge, speculators, AngelSlim, TorchSpec's vLLM engine), ModelOpt's online
training feeds the picture's embedding, and TorchSpec's SGLang engine clamps that server's picture ids, which makes them
the vocabulary's last token. So the choice is the user's, and vLLM's own behaviour is the default.

The drafter's ``embed_input_ids`` is given to those drafter objects whose server asks for it. It goes by the mask that
the runner hands over with the embeddings, not by an id: a placeholder that somebody typed is a token like any other.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Mapping
from typing import Any

from vllm_kimi_eagle3.fixes import _proposer
from vllm_kimi_eagle3.fixes._runners import on_v2
from vllm_kimi_eagle3.fixes.eagle3_interface import KIMI_K25
from vllm_kimi_eagle3.layers.parse import describe
from vllm_kimi_eagle3.layers.plan import PlanError
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, Verdict, with_eagle3_on_k25

CHOICES = {
    "placeholder": "the placeholder's embedding, as vLLM has it",
    "embedding": "the picture's own embedding",
    "last-token": "the embedding of the vocabulary's last token",
}
"""What a drafter may see at the places of a picture."""
DEFAULT = "placeholder"
KEY = "drafter_media"
VARIABLE = "VLLM_KIMI_EAGLE3_DRAFTER_MEDIA"

DRAFTERS = (
    "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM",
    "vllm.model_executor.models.deepseek_eagle3:Eagle3DeepseekV2ForCausalLM",
)
_GATHER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._gather_mm_embeddings"
_MARK = "supports_multimodal_embeddings"
"""The attribute by which newer releases ask a drafter whether it takes embeddings."""
_SPECULATORS = (
    "vllm.v1.worker.gpu.spec_decode.speculator",
    "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator",
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator",
)
_RECORD = "kimi_eagle3"


def chosen(vllm_config: Any) -> str:
    """What the user asked for, in the server's configuration or else in the environment; the default otherwise.

    Raises:
        PlanError: it is none of ``CHOICES``.
    """
    choice = _recorded(vllm_config)
    if choice is None:
        choice = (os.environ.get(VARIABLE) or "").strip() or DEFAULT
    if not isinstance(choice, str) or choice not in CHOICES:
        raise PlanError(f"{KEY} is {describe(choice)}, but one of {', '.join(CHOICES)} was expected")
    return choice


def _recorded(vllm_config: Any) -> Any:
    """What stands in a server's configuration, or None."""
    additional: Any = getattr(vllm_config, "additional_config", None)
    record: Any = additional.get(_RECORD) if isinstance(additional, Mapping) else None
    return record.get(KEY) if isinstance(record, Mapping) else None


def check(vllm_config: Any, choice: str) -> None:
    """Whether a server can do what was chosen.

    Raises:
        PlanError: its drafter would not be given the embeddings, or not in their places.
    """
    if choice == DEFAULT:
        return
    why, speculative = None, vllm_config.speculative_config
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        why = "with pipeline parallelism the drafter's stage has no embeddings of pictures"
    elif getattr(speculative, "disable_padded_drafter_batch", False):
        why = "with disable_padded_drafter_batch the drafter's rows are not where the pictures are said to be"
    elif getattr(speculative, "parallel_drafting", False):
        why = "with parallel_drafting the drafter has more rows than the pictures' places are said for"
    elif getattr(speculative.target_model_config, "enable_prompt_embeds", False):
        why = "with enable_prompt_embeds a prompt's own embeddings are said to be pictures'"
    elif choice == "embedding" and len(widths := _widths(speculative)) == 2:
        why = f"the drafter's width, {widths[1]}, is not the target's, {widths[0]}"
    elif on_v2(vllm_config) and not v2_passes_media(SourceTree.installed()):
        why = "this vLLM's V2 model runner gives an EAGLE-3 drafter no embeddings of pictures"
    if why is not None:
        raise PlanError(f"{KEY} is {choice}, but {why}; leave it at {DEFAULT}")


def _widths(speculative: Any) -> list[int]:
    """The hidden sizes of target and drafter; one where they are the same."""
    both = (speculative.target_model_config, speculative.draft_model_config)
    return list(dict.fromkeys(int(config.get_hidden_size()) for config in both))


def v2_passes_media(tree: SourceTree) -> bool:
    """Whether V2 asks the drafter if it takes embeddings: before 0.28 it asks the drafter's configuration."""
    return any(tree.has_module(module) and _MARK in tree.path(module).read_text() for module in _SPECULATORS)


def with_choice(context: Context) -> bool:
    """Servers of Kimi-K2.5 whose user asks for another than vLLM's own behaviour."""
    if not with_eagle3_on_k25(context) or context.vllm_config is None:
        return False
    try:
        return chosen(context.vllm_config) != DEFAULT
    except PlanError:
        return False  # said when the server is configured


def probe(tree: SourceTree) -> Verdict:
    """The drafters drop what their method for embeddings is given, and the runner has something to give."""
    if not tree.has(KIMI_K25):
        return Verdict(Need.NOT_APPLICABLE, "this release has no Kimi-K2.5")
    for drafter in (name for name in DRAFTERS if tree.has_module(name.partition(":")[0])):
        embed = f"{drafter}.embed_input_ids"
        if tree.parameters(embed) != ("self", "input_ids", "multimodal_embeddings", "is_multimodal"):
            return Verdict(Need.REFUSED, f"{embed} takes {tree.parameters(embed)}")
        if "return self.model.embed_input_ids(input_ids)" not in tree.text(embed):
            return Verdict(Need.REFUSED, f"{embed} embeds in a way that is not known")
    if "shift_computed_tokens" not in tree.parameters(_GATHER):
        return Verdict(Need.REFUSED, f"{_GATHER} takes {tree.parameters(_GATHER)}")
    places = (*_proposer.places("propose"), *_proposer.places("build_model_inputs_first_pass"))
    if not any(tree.has(place) and "multimodal_embeddings=" in tree.text(place) for place in places):
        return Verdict(Need.REFUSED, "the proposer hands no embeddings to its drafter")
    return Verdict(Need.APPLY, "the drafters drop the embeddings of pictures")


def embed_input_ids(self: Any, input_ids: Any, multimodal_embeddings: Any = None, is_multimodal: Any = None) -> Any:
    """The method that a drafter is given; its choice lies in its ``kimi_eagle3_media``.

    Args:
        self: the drafter.
        input_ids: (T,).
        multimodal_embeddings: the pictures' embeddings, a sequence of (n, H); None or empty without pictures.
        is_multimodal: (T,), which of the ids are theirs.

    Returns:
        (T, H).
    """
    import torch

    if is_multimodal is None or multimodal_embeddings is None or not len(multimodal_embeddings):
        return self.model.embed_input_ids(input_ids)
    mask = is_multimodal.to(input_ids.device, non_blocking=True)
    if self.kimi_eagle3_media == "last-token":
        return self.model.embed_input_ids(input_ids.masked_fill(mask, self.config.vocab_size - 1))
    embeds = self.model.embed_input_ids(input_ids)
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in multimodal_embeddings])
    # Some releases hand over a mask on the CPU; elsewhere, to count would be to wait for the GPU.
    if is_multimodal.device.type == "cpu" and int(is_multimodal.sum()) != len(rows):
        raise ValueError(
            f"vllm-kimi-eagle3: {len(rows)} embeddings of pictures for {int(is_multimodal.sum())} places in the"
            f" drafter's rows; please report it, and leave {KEY} at {DEFAULT} until then"
        )
    return embeds.masked_scatter(mask[:, None], rows.to(embeds.dtype))


def install(installer: Installer) -> None:
    """Look at each drafter once it is made: only those of a server that asks for it are changed."""
    for name in DRAFTERS:
        if not SourceTree.installed().has_module(name.partition(":")[0]):
            continue  # before 0.18.0 there is no MLA drafter
        target = f"{name}.__init__"
        original = installer.original(target)

        def __init__(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            vllm_config = kwargs.get("vllm_config")
            choice = _recorded(vllm_config)
            if choice is not None and choice != DEFAULT:
                self.kimi_eagle3_media = choice
                self.embed_input_ids = types.MethodType(embed_input_ids, self)
                setattr(self, _MARK, True)

        functools.update_wrapper(__init__, original)
        installer.replace(target, __init__)


FIX = Fix(
    id="D21",
    name="drafter-media",
    targets=tuple(f"{name}.__init__" for name in DRAFTERS),
    phase=Phase.WORKER,
    why="a drafter trained on pictures' embeddings is given the placeholder's",
    upstream="vllm#36097 discusses embeddings for drafters; nothing merged for EAGLE-3",
    retire="the drafters take multimodal embeddings and the user can say whether they should",
    probe=probe,
    wanted=with_choice,
    install=install,
)
