# SPDX-License-Identifier: Apache-2.0
"""D24: on V1, one long request takes the drafter from everybody.

V1 runs the drafter only if the longest sequence of the batch, with its drafts, is within the drafter's own length:
``max_position_embeddings``, or the server's longest request if that is less. One request near or beyond that length,
and no request of the batch is drafted for; the rows of those steps never reach the drafter's cache, so that those
who stay are drafted for with holes, for good. Later releases verify tokens of id 0 in the drafts' place. Text stays
right.

The rule is lifted where the drafter's rotary embedding reaches as far as a request may (see D27). The scheduler drops
drafts that go further, and the drafter's own loop masks their positions: up to 0.17.1 each step's, later only the
first such step's, for it sets that position to 0 and goes on from there, into the request's first block. Here it is set
to the last position, behind which the next step is masked again. A length that the user gives the drafter
(``max_model_len`` of the speculative configuration) stands.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from vllm_kimi_eagle3.fixes import _proposer
from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

logger = logging.getLogger("vllm.kimi_eagle3")

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
TARGET = f"{_RUNNER}.initialize_kv_cache"
LIMIT = "effective_drafter_max_model_len"
_INIT = f"{_RUNNER}.__init__"
_RULES = (f"{_RUNNER}._input_fits_in_drafter", f"{_RUNNER}.sample_tokens")
STEP = "eagle_step_update_slot_mapping_and_metadata"
"""What the loop calls before each of its steps, from 0.18.0 on; under this name in the proposer's module."""
_KERNEL = "vllm.v1.spec_decode.utils:eagle_step_slot_mapping_metadata_kernel"
_MASKS = "tl.where(exceeds_max, PAD_ID, slot_id)"
_OLD_LOOP = "torch.where(exceeds_max_model_len, 0, positions)"
PADDING_SLOT_ID = -1
"""vLLM's own, in every release: rows of this slot are not written."""


def probe(tree: SourceTree) -> Verdict:
    """Whether the batch's longest sequence decides, and what becomes of positions beyond the longest request."""
    rule = next((target for target in _RULES if tree.has(target) and f"<= self.{LIMIT}" in tree.text(target)), None)
    if rule is None or f"self.{LIMIT} = draft_config.max_model_len" not in tree.text(_INIT):
        return Verdict(Need.REFUSED, f"{_RUNNER} decides whether to draft in a way that is not known")
    if f"self.{LIMIT} = " in tree.text(TARGET):
        return Verdict(Need.RETIRED, "the rule is lifted where the drafter reaches far enough: the source patch")
    if tree.parameters(TARGET)[:2] != ("self", "kv_cache_config"):
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}")
    loop = tree.text(_proposer.find_class(tree))
    if step_of(tree) is None:
        known = _OLD_LOOP in loop
    else:
        known = f"{STEP}(" in loop and "out_clamped_positions=" in loop and _MASKS in tree.text(_KERNEL)
    if not known:
        return Verdict(Need.REFUSED, f"{_proposer.CLASS} masks positions beyond the longest request in an unknown way")
    return Verdict(Need.APPLY, f"{rule} stops drafting for the whole batch")


def step_of(tree: SourceTree) -> str | None:
    """The name that the loop's module has for the step; None up to 0.17.1, whose loop does it itself."""
    module = _proposer.find_class(tree).partition(":")[0]
    return f"{module}:{STEP}" if STEP in tree.path(module).read_text(encoding="utf-8") else None


def rotary_reach(model: Any) -> int | None:
    """Positions that the shortest rotary embedding of a model knows; None if it has none of a known kind."""
    tables = (getattr(module, "cos_sin_cache", None) for module in model.modules())
    return min((len(table) for table in tables if table is not None), default=None)


@functools.cache  # the runner asks twice where it tries its graphs first
def _say(reach: int, longest: int) -> None:
    logger.warning(
        "vllm-kimi-eagle3: the drafter's rotary embedding knows %d positions, and a request may have %d: no request of"
        " a batch is drafted for while one is longer; serve with --max-model-len %d or less",
        reach,
        longest,
        reach,
    )


def lift(runner: Any) -> None:
    """Let the drafter of a V1 runner run for every batch, where its rotary embedding reaches as far as a request may.

    Args:
        runner: with its models loaded.
    """
    speculative, drafter = runner.speculative_config, getattr(runner, "drafter", None)
    # Another server's method, a pipeline's earlier stage, or a length that the user has given.
    if speculative is None or speculative.method != "eagle3" or drafter is None or speculative.max_model_len:
        return
    reach = rotary_reach(drafter.model)
    if reach is None:
        return
    if reach < runner.max_model_len:
        _say(reach, runner.max_model_len)
        return
    # --max-model-len -1 has told the runner alone how long a request may be.
    drafter.max_model_len = runner.max_model_len
    setattr(runner, LIMIT, runner.max_model_len + speculative.num_speculative_tokens)


def install(installer: Installer) -> None:
    """Decide once, when both models are loaded; and keep what is masked masked."""
    original: Any = installer.original(TARGET)

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        lift(self)
        return original(self, *args, **kwargs)

    installer.replace(TARGET, initialize_kv_cache)
    target = step_of(SourceTree.installed())
    if target is None:
        return
    step: Any = installer.original(target)

    def masked(
        *args: Any, out_clamped_positions: Any, out_slot_mapping: Any, max_model_len: int, **kwargs: Any
    ) -> None:
        out = {"out_clamped_positions": out_clamped_positions, "out_slot_mapping": out_slot_mapping}
        step(*args, max_model_len=max_model_len, **out, **kwargs)
        beyond = out_slot_mapping[: len(out_clamped_positions)] == PADDING_SLOT_ID
        out_clamped_positions.masked_fill_(beyond, max_model_len - 1)

    installer.replace(target, masked)


FIX = Fix(
    id="D24",
    name="draft-limit",
    targets=(TARGET, _INIT, *_RULES, *(f"{module}:{STEP}" for module in _proposer.MODULES)),
    phase=Phase.WORKER,
    why="on V1 no request is drafted for while one in the batch is longer than the drafter's length, or near it",
    upstream="none known; V2 has no such rule",
    retire="V1 is gone, or drafts for requests that fit whatever the others are",
    probe=probe,
    install=install,
)
