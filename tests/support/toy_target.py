# SPDX-License-Identifier: Apache-2.0
"""A target whose layers sign their output: layer k writes dimension k + 1 of the residual stream, and nothing else.

So boundary b has dimensions 1..b set and no other up to L, whatever the tokens are, and a capture that is one layer
off shows exactly, not within a tolerance.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def sign_layers(checkpoint: Path, folder: Path) -> Path:
    """Copy a DeepSeek-V3 or Kimi-K2.5 checkpoint to ``folder``, with its language model's weights made signatures.

    The embedding sets dimension 0 of every token, and random small numbers behind dimension L. Attention writes
    nothing. Each MLP and expert reads dimension 0, which is positive, and writes a positive number to its layer's.
    """
    shutil.copytree(checkpoint, folder)
    config = json.loads((checkpoint / "config.json").read_text())
    layers = int(config.get("text_config", config)["num_hidden_layers"])
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, weight in weights.items():
        plain = name.removeprefix("language_model.")
        if not plain.startswith(("model.", "lm_head.")):
            continue  # the vision tower stays
        if plain.endswith("embed_tokens.weight"):
            new = torch.zeros_like(weight)
            new[:, 0] = 1
            new[:, layers + 1 :] = 0.1 * torch.rand(new[:, layers + 1 :].shape, generator=generator)
        elif "norm" in plain:
            new = torch.ones_like(weight)
        elif plain.endswith((".o_proj.weight", ".gate.weight", "e_score_correction_bias")):
            new = torch.zeros_like(weight)
        elif plain.endswith((".gate_proj.weight", ".up_proj.weight")):
            new = torch.zeros_like(weight)
            new[:, 0] = 1
        elif plain.endswith(".down_proj.weight"):
            new = torch.zeros_like(weight)
            new[int(plain.split(".layers.")[1].split(".")[0]) + 1] = 0.01
        else:
            continue
        weights[name] = new
    (folder / "model.safetensors").unlink()  # it may be a link to the original
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
