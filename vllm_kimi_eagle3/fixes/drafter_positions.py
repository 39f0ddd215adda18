# SPDX-License-Identifier: Apache-2.0
"""D27: a drafter's rotary embedding ends before the server's longest request.

Drafter and target count positions alike, but up to 0.26.0 the drafter's table of rotary factors is as long as the
drafter's own ``max_position_embeddings``; many trainers write the length that they trained with. V2 reads beyond the
table: a device-side assertion where vLLM compiles, other memory's numbers where it does not. V1 stops drafting before
that, for everybody (D24). As 0.27.0 does, the configuration is raised to the server's longest request; as 0.33.0 does,
for those kinds of rotary embedding alone whose frequencies do not depend on it.

The other kinds, YaRN above all, end where their own numbers say, in every release. V2 of 0.33.0 lowers the server's
longest request to that; before, such a server is refused on V2. On V1, D24's remedy leaves it to vLLM's rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from vllm_kimi_eagle3.fixes._runners import on_v2
from vllm_kimi_eagle3.layers.plan import PlanError
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Context, Fix, Need, Phase, Verdict

TARGET = "vllm.config.speculative:SpeculativeConfig.__post_init__"
LIMITS = "vllm.config.vllm:VllmConfig._limit_max_model_len_to_draft"
KEY = "max_position_embeddings"
LENGTH_ONLY = ("default", "linear", "llama3")
"""Kinds of rotary embedding whose table alone depends on ``max_position_embeddings``, and not its frequencies."""
_RAISES = f"_maybe_override_draft_{KEY}("
_SETS = f".{KEY} = "
_LENGTH = "_maybe_override_draft_max_model_len("


def probe(tree: SourceTree) -> Verdict:
    """Whether the drafter's configuration is raised to the target's length."""
    text = tree.text(TARGET)
    if _RAISES in text or _SETS in text:
        return Verdict(Need.RETIRED, f"the drafter's {KEY} is raised to the target's length")
    if _LENGTH not in text:
        return Verdict(Need.REFUSED, f"{TARGET} decides on a drafter's length in a way that is not known")
    return Verdict(Need.APPLY, f"the drafter's rotary embedding ends at its own {KEY}")


def configure(context: Context) -> None:
    """Raise the drafter's ``max_position_embeddings``, from which its rotary embedding is built, to the server's."""
    speculative = context.vllm_config.speculative_config
    hf_config, longest = speculative.draft_model_config.hf_config, speculative.target_model_config.max_model_len
    own = getattr(hf_config, KEY, None)
    if isinstance(own, int) and own < longest and fixed_reach(vars(hf_config)) is None:
        setattr(hf_config, KEY, longest)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key)
        if isinstance(given, Mapping):
            yield cast("Mapping[str, Any]", given)


def fixed_reach(config: Mapping[str, Any]) -> int | None:
    """How many positions a drafter's rotary embedding knows, if it can't be made longer without other frequencies.

    Args:
        config: the drafter's own.

    Returns:
        None for kinds whose table is as long as it is asked to be, and where no number is given.
    """
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in LENGTH_ONLY:
            continue
        length, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if "yarn" in str(kind) and isinstance(length, int) and isinstance(factor, int | float):
            return int(length * factor)
        own = config.get(KEY)
        return own if isinstance(own, int) else None
    return None


def check(vllm_config: Any) -> None:
    """See that no request can leave the drafter's rotary embedding.

    Raises:
        PlanError: on V2 one could.
    """
    speculative = vllm_config.speculative_config
    longest = speculative.target_model_config.max_model_len
    reach = fixed_reach(vars(speculative.draft_model_config.hf_config))
    if reach is None or reach >= longest or not on_v2(vllm_config) or SourceTree.installed().has(LIMITS):
        return
    raise PlanError(
        f"the drafter's rotary embedding knows {reach} positions, but a request may have {longest}, beyond which vLLM's"
        f" V2 model runner reads other memory; serve with --max-model-len {reach} or less"
    )


FIX = Fix(
    id="D27",
    name="drafter-positions",
    targets=(TARGET,),
    phase=Phase.VLLM_CONFIG,
    why="requests longer than the drafter's max_position_embeddings end the engine or read other memory on V2",
    upstream="0.27.0 raises the drafter's configuration (vllm#48894), 0.33.0 where frequencies do not depend on it",
    retire="releases below 0.27.0 are no longer supported",
    probe=probe,
    configure=configure,
)
