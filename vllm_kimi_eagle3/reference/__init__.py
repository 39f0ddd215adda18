# SPDX-License-Identifier: Apache-2.0
"""An independent oracle: DeepSeek-V3 / Kimi-K2.x targets, EAGLE-3 drafters and their greedy loop, in plain torch.

Everything that the engine tests compare with lives here, written for reading and not for speed. Nothing below imports
vLLM or Transformers. Importing this package imports torch; importing ``vllm_kimi_eagle3`` alone does not.

Boundaries: boundary k of an L-layer target is the residual stream that enters layer k, for k in 0..L; boundary 0 is
the embedding, boundary L the stream before the final norm. vLLM counts its aux hidden states this way.

    target = Target.load("target-folder")                    # float32 unless told otherwise
    drafter = Drafter.load("drafter-folder", target)         # borrows embeddings or lm_head it does not carry
    out = target.forward([1, 2, 3])                          # out.boundaries: (L + 1, T, H); out.logits: (T, V)
    trace = speculate(target, drafter, [1, 2, 3], boundaries=(2, 30, 58), k=3, max_new_tokens=64)
    trace.output_ids, trace.drafted, trace.accepted, trace.acceptance_length, trace.steps[1].drafter_rows

What it knows: bf16/float16/float32 weights, GQA and MLA drafters with the switches that vLLM 0.32 reads, vLLM's
counters for one request on the V1 runner without async scheduling, pictures and video chunks as Kimi-K2.5 embeds
them. What it does not: quantised weights, sampling, parallel or tree drafting, MTP.
"""

from vllm_kimi_eagle3.reference.checkpoint import Checkpoint, load_checkpoint
from vllm_kimi_eagle3.reference.drafter import Drafter, DrafterSession, Proposal
from vllm_kimi_eagle3.reference.ops import Cache
from vllm_kimi_eagle3.reference.speculate import SpeculationTrace, Step, fc_rows, greedy, speculate
from vllm_kimi_eagle3.reference.target import Borrowed, Target, TargetOutput
from vllm_kimi_eagle3.reference.vision import Vision, patchify

__all__ = [
    "Borrowed",
    "Cache",
    "Checkpoint",
    "Drafter",
    "DrafterSession",
    "Proposal",
    "SpeculationTrace",
    "Step",
    "Target",
    "TargetOutput",
    "Vision",
    "fc_rows",
    "greedy",
    "load_checkpoint",
    "patchify",
    "speculate",
]
