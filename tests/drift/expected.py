# SPDX-License-Identifier: Apache-2.0
"""What every fix's probe must say on every release: from that release on, until the next one named."""

from __future__ import annotations

from tests import releases
from vllm_kimi_eagle3.patching.spec import Need

A, R, N = Need.APPLY, Need.RETIRED, Need.NOT_APPLICABLE


def number(release: str) -> tuple[int, ...]:
    """A release as something that sorts."""
    return tuple(int(part) for part in release.split("."))


RELEASES = tuple(sorted({*releases.RELEASES, "0.20.1", "0.25.0", "0.27.0"}, key=number))
"""Every release on the index from 0.15.0 on."""

EXPECTED: dict[str, dict[str, Need]] = {
    "D1 target-whitelist": {"0.15.0": A, "0.18.0": R},
    "D18 mla-drafter-refusal": {"0.15.0": A, "0.18.0": R},
    "D18 mtp-rewrite": {"0.15.0": N, "0.18.0": A},
    "D6 nested-layer-ids": {"0.15.0": A},
    "D7 layer-rule": {"0.15.0": A},
    "D8 cache-key": {"0.15.0": A},
    "D2 eagle3-interface": {"0.15.0": A, "0.18.0": R},
    "D3 aux-capture": {"0.15.0": A, "0.18.0": R},
    "D4 image-attribute": {"0.15.0": A, "0.18.0": R},
    "D5 k25-language-model": {"0.15.0": A, "0.16.0": R},
    "D10 draft-block-size": {"0.15.0": N, "0.17.0": A, "0.18.0": R, "0.20.0": N},
    "D11 image-placeholder": {"0.15.0": R, "0.32.0": A},
    "D12 shared-lm-head": {"0.15.0": N, "0.17.0": A, "0.26.0": R},
    "D13 use-aux-flag": {"0.15.0": N, "0.17.0": A, "0.33.0": R},
    "D15 draft-attention-backend": {"0.15.0": A},
    "D16 float16-scale": {"0.15.0": A},
    "D17 float16-clone": {"0.15.0": R, "0.25.0": A},
    "D22 chunk-end-token": {"0.15.0": R, "0.19.0": A},
    "D23 embeddings": {"0.15.0": R, "0.18.0": A},
    "D21 drafter-media": {"0.15.0": A},
    "D25 drafter-rope": {"0.15.0": N, "0.18.0": A, "0.28.0": R},
    "D27 drafter-positions": {"0.15.0": A, "0.27.0": R},
    "D24 draft-limit": {"0.15.0": A},
    "D26 sharded-step": {"0.15.0": N, "0.25.0": A},
    "D19 triton-mla-decode": {"0.15.0": A, "0.31.0": R},
    "C1 cpu-kernel-rebinding": {"0.15.0": N, "0.31.0": A},
    "C2 cpu-rotary-embedding": {"0.15.0": A},
    "C3 cpu-attention-block-size": {"0.15.0": N, "0.28.0": R, "0.29.0": A},
    "C5 cpu-sampling-expansion": {"0.15.0": N, "0.20.0": A},
    "C6 cpu-draft-step-kernel": {"0.15.0": N, "0.30.0": A, "0.31.0": R},
}


def expected(label: str, release: str) -> Need:
    """The state that the table gives a fix on a release."""
    since = [first for first in EXPECTED[label] if number(first) <= number(release)]
    return EXPECTED[label][max(since, key=number)]
