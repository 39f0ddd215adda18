# SPDX-License-Identifier: Apache-2.0
"""Pictures as Kimi-K2.5 embeds them: a vision tower over patches (MoonViT) and a projector to the target's width.

Sources: the Kimi-VL report (arXiv:2504.07491), vLLM 0.32's kimi_k25_vit.py and Transformers' modeling_kimi_k25.py. A
picture is cut into patches of 14 by 14 pixels, every patch attends to every other, two by two neighbours become one
token. A video chunk is several frames of one size: they attend to each other, and their tokens are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kimi_eagle3.reference.checkpoint import load_vision_checkpoint
from vllm_kimi_eagle3.reference.ops import Weights, linear

_EPS = 1e-5
_THETA = 10000.0
_MERGE = 2


def patchify(frames: Tensor, *, patch: int = 14, mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Grid]:
    """Pixels to patches; pictures are not resized here, only padded as the processor pads them.

    Args:
        frames: (T, height, width, 3) bytes; one frame for a picture.
        patch: a patch's side in pixels.
        mean: of red, green and blue, for values in 0..1.
        std: likewise.

    Returns:
        (T * h * w, 3, patch, patch) float32 in the order frame, row, column, and (T, h, w).
    """
    _, height, width, _ = frames.shape
    side = _MERGE * patch
    # Padding is black before normalisation.
    frames = F.pad(frames, (0, 0, 0, -width % side, 0, -height % side))
    pixels = (frames.float() / 255 - torch.tensor(mean)) / torch.tensor(std)
    grid = (pixels.shape[0], pixels.shape[1] // patch, pixels.shape[2] // patch)
    pixels = pixels.unflatten(1, (-1, patch)).unflatten(3, (-1, patch))  # T, h, patch, w, patch, 3
    return pixels.permute(0, 1, 3, 5, 2, 4).flatten(0, 2), grid


Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


class Vision:
    """The vision tower and the projector.

    Args:
        config: Kimi-K2.5's config.json, in either schema.
        weights: tensors by their names in the checkpoint.
    """

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self.config: Mapping[str, Any] = config["vision_config"]
        self.weights = weights
        self.blocks = int(self.config["num_hidden_layers"])
        self.heads = int(self.config["num_attention_heads"])

    @classmethod
    def load(cls, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Vision:
        """Read a Kimi-K2.5 checkpoint folder; see ``load_vision_checkpoint`` for the errors."""
        checkpoint = load_vision_checkpoint(folder, dtype=dtype)
        return cls(checkpoint.config, checkpoint.weights)

    def forward(self, patches: Tensor, grid: Grid) -> Tensor:
        """One picture or chunk, or several of one size.

        Args:
            patches: (..., T * h * w, 3, patch, patch) as ``patchify`` orders them.
            grid: (T, h, w); h and w even.

        Returns:
            (..., h * w / 4, H): what stands in for the placeholders' embeddings.
        """
        w = self.weights
        x = F.linear(patches.flatten(-3), w["vision_tower.patch_embed.proj.weight"].flatten(1))
        x = x + w["vision_tower.patch_embed.proj.bias"] + self._positions(grid)
        for i in range(self.blocks):
            name = f"vision_tower.encoder.blocks.{i}"
            x = x + self._attention(name, layer_norm(w, f"{name}.norm0", x), grid)
            inner = linear(w, f"{name}.mlp.fc0", layer_norm(w, f"{name}.norm1", x))
            x = x + linear(w, f"{name}.mlp.fc1", F.gelu(inner, approximate="tanh"))
        x = layer_norm(w, "vision_tower.encoder.final_layernorm", x)
        return self._project(x, grid)

    def _positions(self, grid: Grid) -> Tensor:
        """(T * h * w, width): the learned table stretched over the picture, and sines over the frames of a chunk."""
        frames, rows, columns = grid
        table = self.weights["vision_tower.patch_embed.pos_emb.weight"]
        if table.shape[:2] != (rows, columns):
            stretched = F.interpolate(table.permute(2, 0, 1)[None], size=(rows, columns), mode="bicubic")
            table = stretched[0].permute(1, 2, 0)
        places = table.flatten(0, 1)
        if frames == 1:
            return places
        half = table.shape[-1] // 2
        angle = torch.arange(frames, device=table.device)[:, None] * _THETA ** -(
            torch.arange(half, device=table.device) / half
        )
        moments = torch.cat([angle.sin(), angle.cos()], dim=-1).to(table.dtype)
        return (places + moments[:, None]).flatten(0, 1)

    def _attention(self, name: str, x: Tensor, grid: Grid) -> Tensor:
        """Every patch attends to every patch; half of a head's pairs turn with the column, half with the row."""
        q, k, v = linear(self.weights, f"{name}.wqkv", x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        frames, rows, columns = grid
        quarter = q.shape[-1] // 4
        freq = _THETA ** -(torch.arange(quarter, device=x.device) / quarter)
        place = torch.arange(rows * columns, device=x.device).repeat(frames)[:, None]
        angle = torch.stack([place % columns * freq, place // columns * freq], dim=-1).flatten(1)[:, None]
        q, k, v = (t.transpose(-3, -2) for t in (_turn(q, angle), _turn(k, angle), v))
        heads = F.scaled_dot_product_attention(q, k, v).transpose(-3, -2)
        return linear(self.weights, f"{name}.wo", heads.flatten(-2))

    def _project(self, x: Tensor, grid: Grid) -> Tensor:
        """Frames averaged, two by two neighbours side by side, two layers to the target's width."""
        frames, rows, columns = grid
        x = x.unflatten(-2, (frames, rows // _MERGE, _MERGE, columns // _MERGE, _MERGE)).mean(-6)
        x = layer_norm(self.weights, "mm_projector.pre_norm", x.transpose(-4, -3))
        inner = F.gelu(linear(self.weights, "mm_projector.proj.0", x.flatten(-3)))
        return linear(self.weights, "mm_projector.proj.2", inner).flatten(-3, -2)


def layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    """LayerNorm with weight and bias."""
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], _EPS)


def _turn(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate neighbouring pairs of (..., heads, d) by (..., 1, d / 2) radians."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    return turned.flatten(-2).to(x.dtype)
