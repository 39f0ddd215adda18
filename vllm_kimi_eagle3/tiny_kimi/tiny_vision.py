# SPDX-License-Identifier: Apache-2.0
"""The image processor that a Kimi-K2.5 checkpoint brings for vLLM up to 0.31; later ones have one.

Copied into the checkpoints of the old schema, and loaded from there with ``--trust-remote-code``: it stands alone. It
cuts pictures into patches as Kimi's does, and makes them smaller only where they have too many.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

MERGE = 2


class TinyVisionProcessor(BaseImageProcessor):
    """Pictures and video chunks to patches; ``media_proc_cfg`` is Kimi's own."""

    def __init__(self, media_proc_cfg: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.media_proc_cfg: dict[str, Any] = media_proc_cfg or {}
        self.patch = int(self.media_proc_cfg.get("patch_size", 14))
        self.limit = int(self.media_proc_cfg.get("in_patch_limit", 256))
        self.num_frames_per_chunk = int(self.media_proc_cfg.get("temporal_merge_kernel_size", 4))

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """The size to shrink to, in pixels."""
        scale = min(1.0, math.sqrt(self.limit / (max(1, width // self.patch) * max(1, height // self.patch))))
        return max(1, int(width * scale)), max(1, int(height * scale))

    def media_tokens_calculator(self, media: dict[str, Any]) -> int:
        """How many tokens a picture or chunk takes: frames are averaged, two by two patches are one token."""
        image = media["image"] if media["type"] == "image" else media["video_chunk"][0]
        side = MERGE * self.patch
        return math.prod(-(-pixels // side) for pixels in self._size(*image.size))

    def _cut(self, image: Any, mean: Any, std: Any) -> np.ndarray[Any, Any]:
        """One frame, (rows, columns, 3, patch, patch)."""
        size, side = self._size(*image.size), MERGE * self.patch
        pixels = np.asarray((image if size == image.size else image.resize(size)).convert("RGB"))
        pixels = np.pad(pixels, ((0, -pixels.shape[0] % side), (0, -pixels.shape[1] % side), (0, 0)))
        rows, columns = pixels.shape[0] // self.patch, pixels.shape[1] // self.patch
        values = (pixels.astype(np.float32) / 255 - mean) / std
        return values.reshape(rows, self.patch, columns, self.patch, 3).transpose(0, 2, 4, 1, 3)

    def preprocess(self, images: Any, *_: Any, return_tensors: Any = None, **__: Any) -> BatchFeature:
        """``pixel_values`` (N, 3, patch, patch) and ``grid_thws`` (M, 3) of M pictures and chunks."""
        mean, std = (
            np.array(self.media_proc_cfg.get(key, [0.5] * 3), np.float32) for key in ("image_mean", "image_std")
        )
        patches: list[np.ndarray[Any, Any]] = []
        grids: list[list[int]] = []
        for media in images:
            frames: list[Any] = [media["image"]] if media["type"] == "image" else media["video_chunk"]
            cut = [self._cut(image, mean, std) for image in frames]
            patches += [part.reshape(-1, 3, self.patch, self.patch) for part in cut]
            grids.append([len(cut), *cut[0].shape[:2]])
        data = {"pixel_values": torch.from_numpy(np.concatenate(patches)), "grid_thws": torch.tensor(grids)}
        return BatchFeature(data=data, tensor_type=return_tensors)
