# SPDX-License-Identifier: Apache-2.0
"""D22: at the end of every prefill chunk but the last, the drafter is given the prompt's last token as the next one.

A drafter's row holds the features of one token and the id of the next. Where a prompt is prefilled in chunks, the next
token of a chunk's last row is known, but from 0.19.0 on V1 looks it up at ``num_tokens_no_spec - 1``, the end of the
whole prompt. One row in the drafter's KV cache is wrong for each chunk, silently, for as long as the request lives.
The lookup is V1's own; here it is pointed at the right place for as long as the drafter is prepared.
"""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.patching.patcher import Installer
from vllm_kimi_eagle3.patching.source import SourceTree
from vllm_kimi_eagle3.patching.spec import Fix, Need, Phase, Verdict

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
TARGET = f"{_RUNNER}.propose_draft_token_ids"
_LOOKUPS = (
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.prepare_next_token_ids_padded",
    "vllm.v1.spec_decode.eagle:SpecDecodeBaseProposer.prepare_next_token_ids_padded",
)
_PREPARE = f"{_RUNNER}._prepare_inputs"
_ENDS = "input_batch.chunk_ends"
_WRONG = "num_tokens_no_spec"
_PARTIAL = "discard_request_mask"


def probe(tree: SourceTree) -> Verdict:
    """The fault: the fallback for requests that sampled nothing is looked up by the length of all known tokens."""
    lookup = next((target for target in _LOOKUPS if tree.has(target)), None)
    if lookup is None:
        return Verdict(Need.NOT_APPLICABLE, "this release has no padded drafter batches in the places known")
    if _WRONG not in tree.text(lookup):
        return Verdict(Need.RETIRED, f"{lookup} does not go by {_WRONG}")
    if all(_ENDS in tree.text(target) for target in (lookup, _PREPARE)):
        return Verdict(Need.RETIRED, "the end of each chunk is noted and looked up: the source patch")
    if tree.parameters(TARGET)[:2] != ("self", "scheduler_output"):
        return Verdict(Need.REFUSED, f"{TARGET} takes {tree.parameters(TARGET)}")
    if f"self.{_PARTIAL}" not in tree.text(f"{_RUNNER}.__init__"):
        return Verdict(Need.REFUSED, f"{_RUNNER} no longer marks partly prefilled requests in {_PARTIAL}")
    return Verdict(Need.APPLY, f"{lookup} takes the last of all known tokens")


def install(installer: Installer) -> None:
    """While drafts are proposed, let a partly prefilled request's known tokens end behind the chunk's next one."""
    original: Any = installer.original(TARGET)

    def propose_draft_token_ids(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        partial = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        if not partial:
            return original(self, scheduler_output, *args, **kwargs)
        known = batch.num_tokens_no_spec
        before = known[partial].copy()
        for i in partial:
            scheduled = scheduler_output.num_scheduled_tokens[batch.req_ids[i]]
            known[i] = batch.num_computed_tokens_cpu[i] + scheduled + 1
        try:
            return original(self, scheduler_output, *args, **kwargs)
        finally:
            known[partial] = before

    installer.replace(TARGET, propose_draft_token_ids)


FIX = Fix(
    id="D22",
    name="chunk-end-token",
    targets=(TARGET, *_LOOKUPS),
    phase=Phase.WORKER,
    why="one wrong row in the drafter's KV cache for each prefill chunk",
    upstream="none known for vLLM; sglang#26800 mended the same fault there",
    retire="the fallback token of a partly prefilled request is the one behind its chunk",
    probe=probe,
    install=install,
)
