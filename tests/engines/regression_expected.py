# SPDX-License-Identifier: Apache-2.0
"""How the installed suite, without its slow tests, ends on each release's CPU engine, where it does not pass.

By release and state of vLLM: ``stock`` and ``off`` as ``VLLM_KIMI_EAGLE3`` has them. With the overlay, and with the
source patches, nothing fails. The skips are the same in every state.
"""

from __future__ import annotations

from vllm_kimi_eagle3.regression.settings import SITUATIONS


def defects(*names: str) -> frozenset[str]:
    """Tests of defects, by their ids."""
    return frozenset(f"test_defect[{name}]" for name in names)


# One wrong row a chunk stays in the drafter's cache (D22): what is proposed behind it may differ as well.
_CHUNKS = frozenset(
    f"test_alignment[chunked-{name}]"
    for name in (
        "verify, all accepted",
        "across a block boundary",
        "batch",
        "batch of prefill and verify",
        "chunked prefill",
        "prefix-cache hit",
    )
) | {"test_nothing_else_differs[chunked]"}

# Up to 0.17.1 no server of ours is configured at all (D1), so nothing that stands on its configuration can be right.
_REFUSED = defects(
    "D1-target-whitelist-deepseek",
    "D1-target-whitelist-kimi",
    "D6-nested-ids-V1",
    "D6-nested-ids-V2",
    "D7-output-rule-V1",
    "D7-output-rule-V2",
    "D8-cache-key",
    "D2-eagle3-interface",
    "D3-aux-capture-deepseek",
    "D3-aux-capture-kimi",
    "D23-embeddings",
    "D4-image-attribute",
    "D5-k25-language-model",
    "D12-shared-lm-head",
    "D16-float16-scale",
    "D27-drafter-positions",
)

FAILS: dict[str, dict[str, frozenset[str]]] = {
    "0.17.1": {"stock": _REFUSED, "off": _REFUSED | defects("C2-rotary-embedding")},
    "0.32.0": {
        "stock": _CHUNKS
        | defects(
            "D18-mla-drafter",
            "D6-nested-ids-V2",
            "D7-output-rule-V1",
            "D7-output-rule-V2",
            "D7-output-rule-engine",
            "D23-embeddings",
            "D5-k25-language-model",  # V1's loading ends before, with D11's error
            "D11-image-placeholder",
            "D15-draft-backend",
            "D16-float16-scale",
            "D17-float16-clone",
            "D22-chunk-end-token",
            "D24-draft-limit",
        ),
    },
}

_NEED_A_GPU = defects("D10-draft-block-size", "D15-draft-backend-engine")
_NEED_SPECULATION = frozenset(
    [
        *(f"test_alignment[{engine}-{name}]" for engine, names in SITUATIONS.items() for name in names),
        *(f"test_nothing_else_differs[{engine}]" for engine in SITUATIONS),
        "test_text[eager]",
        *(f"test_control_other_boundaries_are_seen[{b}]" for b in ("3-6-8", "5-8-10", "2-5-7", "4-6-9")),
        "test_control_rows_of_another_position_are_seen",
    ]
)
SKIPS: dict[str, frozenset[str]] = {
    "0.17.1": _NEED_A_GPU
    | frozenset(name for name in _NEED_SPECULATION if "compiled" not in name)
    | defects(
        "D18-mla-drafter",
        "D7-output-rule-engine",
        "D11-image-placeholder",
        "D15-draft-backend",
        "D22-chunk-end-token",
        "D24-draft-limit",
        "D25-drafter-rope",
        "C3-block-size",
        "C5-sampling-expansion",
        "C6-draft-step-kernel",
    ),
    "0.32.0": _NEED_A_GPU,
}
