# SPDX-License-Identifier: Apache-2.0
"""The image processor that a Kimi-K2.5 checkpoint brings, as far as a server that gets no image asks for it.

Older vLLMs load the checkpoint's own, later ones have one; copied into the checkpoints of the old schema.
"""

from __future__ import annotations

from typing import Any

from transformers.image_processing_utils import BaseImageProcessor


class TinyVisionProcessor(BaseImageProcessor):
    """Counts one token a picture, and processes none."""

    num_frames_per_chunk = 1

    def __init__(self, media_proc_cfg: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def media_tokens_calculator(self, media: Any) -> int:
        """How many tokens a picture takes."""
        return 1
