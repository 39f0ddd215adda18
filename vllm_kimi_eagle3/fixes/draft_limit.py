# SPDX-License-Identifier: Apache-2.0
"""D24: on V1, one long request takes the drafter from everybody.

V1 runs the drafter only if the longest sequence of the batch, with its drafts, is within the drafter's own length:
``max_position_embeddings``, or the server's longest request if that is less. One request near or beyond that length,
and no request of the batch is drafted for; the rows of those steps never reach the drafter's cache, so that those
who stay are drafted for with holes, for good, and tokens of id 0 are verified in the drafts' place. Text stays right.

The rule is not needed for what it protects: positions beyond the server's longest request are masked in the drafter's
own loop, and the scheduler drops drafts that go there. So it is lifted where the drafter's rotary embedding reaches as
far as a request may (see D27). A length that the user gives the drafter (``max_model_len`` of the speculative
configuration) stands.
"""

from __future__ import annotations

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
_LOOPS = ("_update_positions_dependent_metadata", "propose")
_SERVERS_LENGTH = "self.max_model_len"


def probe(tree: SourceTree) -> Verdict:
    """Whether the batch's longest sequence decides, and whether the loop knows the server's longest request."""
    rule = next((target for target in _RULES if tree.has(target) and f"<= self.{LIMIT}" in tree.text(target)), None)
    if rule is None or f"self.{LIMIT} = draft_config.max_model_len" not in tree.text(_INIT):
        return Verdict(Need.REFUSED, f"{_RUNNER} decides whether to draft in a way that is not known")
    if f"self.{LIMIT} = " in tree.text(TARGET):
        return Verdict(Need.RETIRED, "the rule is lifted where the drafter reaches far enough: the source patch")
    if tree.parameters(TARGET)[:2] != ("self", "kv_cache_config"):
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}")
    loops = [target for method in _LOOPS for target in _proposer.places(method) if tree.has(target)]
    if not any(_SERVERS_LENGTH in tree.text(target) for target in loops):
        return Verdict(Need.REFUSED, f"no loop of {_proposer.CLASS} masks positions beyond {_SERVERS_LENGTH}")
    return Verdict(Need.APPLY, f"{rule} stops drafting for the whole batch")


def rotary_reach(model: Any) -> int | None:
    """Positions that the shortest rotary embedding of a model knows; None if it has none."""
    tables = (getattr(module, "cos_sin_cache", None) for module in model.modules())
    return min((len(table) for table in tables if table is not None), default=None)


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
    if reach is not None and reach < runner.max_model_len:
        logger.warning(
            "vllm-kimi-eagle3: the drafter's rotary embedding knows %d positions, and a request may have %d: no request"
            " of a batch is drafted for while one is longer; serve with --max-model-len %d or less",
            reach,
            runner.max_model_len,
            reach,
        )
        return
    setattr(runner, LIMIT, runner.max_model_len + speculative.num_speculative_tokens)


def install(installer: Installer) -> None:
    """Decide once, when both models are loaded."""
    original: Any = installer.original(TARGET)

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        lift(self)
        return original(self, *args, **kwargs)

    installer.replace(TARGET, initialize_kv_cache)


FIX = Fix(
    id="D24",
    name="draft-limit",
    targets=(TARGET, _INIT, *_RULES),
    phase=Phase.WORKER,
    why="on V1 no request is drafted for while one in the batch is longer than the drafter's length, or near it",
    upstream="none known; V2 has no such rule",
    retire="V1 is gone, or drafts for requests that fit whatever the others are",
    probe=probe,
    install=install,
)
