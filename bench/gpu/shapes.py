# SPDX-License-Identifier: Apache-2.0
"""The pairs that ``throughput.py`` measures: configurations for random weights, and what fits a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_kimi_eagle3.tiny_kimi.materialize import drafter_config, text_config

BLOCK = 64
"""Tokens a block of the cache has at most, for every backend that is used here."""
ROOM = 1536
"""Tokens that a request may write beyond its prompt."""
STEPS = {1: 400, 4: 160, 16: 80}
"""Measured steps of ``share`` by concurrency: synthetic acceptance is a draw, and few requests need more of them."""
RESERVED = 12e9
"""Bytes for activations, workspaces, graphs and CUDA itself, beside weights and cache."""


LEAST_LAYERS = 7
"""With fewer, two of the three layers that the drafter reads would be one."""


class Unfit(ValueError):
    """No pair of that size can be measured; one sentence."""


@dataclass
class Shape:
    """A pair's configurations, and the cells to measure."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    contexts: list[int]
    concurrency: list[int]
    steps: dict[int, int]
    about: str

    def weight_bytes(self) -> tuple[int, int]:
        """bf16 bytes of everything but the decoder's MoE layers, and of one such layer."""
        t, d = self.target, self.drafter
        hidden, heads = t["hidden_size"], t["num_attention_heads"]
        attention = (
            hidden * t["q_lora_rank"]
            + t["q_lora_rank"] * heads * (t["qk_nope_head_dim"] + t["qk_rope_head_dim"])
            + hidden * (t["kv_lora_rank"] + t["qk_rope_head_dim"])
            # twice: vLLM keeps the projection, and its two halves apart for decode
            + 2 * t["kv_lora_rank"] * heads * (t["qk_nope_head_dim"] + t["v_head_dim"])
            + heads * t["v_head_dim"] * hidden
        )
        experts = (t["n_routed_experts"] + t["n_shared_experts"]) * 3 * hidden * t["moe_intermediate_size"]
        rest = 2 * t["vocab_size"] * hidden + attention + 3 * hidden * t["intermediate_size"]
        width = d["head_dim"] * (2 * d["num_attention_heads"] + 2 * d["num_key_value_heads"])
        rest += hidden * (3 * hidden + 2 * width + 3 * d["intermediate_size"] + d["draft_vocab_size"])
        return 2 * rest, 2 * (attention + experts + hidden * t["n_routed_experts"])

    def cache_bytes(self, layers: int) -> int:
        """bf16 bytes of the cache that the largest cell needs, with some blocks over."""
        t, d = self.target, self.drafter
        token = 2 * (t["kv_lora_rank"] + t["qk_rope_head_dim"]) * layers
        token += 4 * d["num_key_value_heads"] * d["head_dim"]
        tokens = max(self.concurrency) * (max(self.contexts) + ROOM + 2 * BLOCK) + 64 * BLOCK
        return token * tokens


def shape_of(mode: str, tiny: bool) -> Shape:
    """The pair of a mode; ``tiny`` is a small one for the CPU."""
    if tiny:
        target = text_config() | {"num_hidden_layers": 8}
        drafter = drafter_config("gqa", "boundary")
        concurrency = {"context": [1], "share": [1, 2], "cost": [1, 2]}[mode]
        shape = Shape(target, drafter, [64, 128], concurrency, {1: 12, 2: 8}, "tiny, on the CPU, float32")
    elif mode == "share":
        target = text_config() | {
            "vocab_size": 163840 // 8,
            "hidden_size": 7168,
            "intermediate_size": 18432 // 8,
            "moe_intermediate_size": 2048 // 8,
            "num_attention_heads": 64 // 8,
            "num_key_value_heads": 64 // 8,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.827,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "rope_theta": 50000.0,
        }
        drafter = drafter_config("gqa", "boundary") | {
            "num_attention_heads": 64 // 8,
            "num_key_value_heads": 64 // 8,
            "head_dim": 128,
            "intermediate_size": 12288 // 8,
            "draft_vocab_size": 32000 // 8,
        }
        about = (
            "a rank's share of Kimi-K2.5 at tensor parallel 8: 8 of 64 heads, an eighth of every expert's, of the "
            "first (dense) layer's and of the shared expert's width, an eighth of the vocabulary; the drafter is "
            "AQ-MedAI's kimi-k25 shape, cut alike: 8 of 64 heads, 1536 of 12288, 4000 of 32000 draft tokens"
        )
        shape = Shape(target, drafter, [2000, 30000], [1, 4, 16], STEPS, about)
    else:
        target = text_config() | {
            "vocab_size": 32768,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 512,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        }
        drafter = drafter_config("gqa", "boundary") | {
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 5632,
            "draft_vocab_size": 16384,
        }
        about = "16 layers, hidden 2048, 16 heads, a modest MoE (16 experts of width 512, 4 a token, 1 shared)"
        contexts, concurrency = ([512], [1, 8, 64]) if mode == "cost" else ([512, 8000, 30000], [1])
        shape = Shape(target, drafter, contexts, concurrency, {1: 100}, about)
    shape.drafter |= {"vocab_size": shape.target["vocab_size"], "hidden_size": shape.target["hidden_size"]}
    return shape


def fit(shape: Shape, layers: int | None = None, free: int | None = None) -> None:
    """Settle the number of layers, of positions, and the layers that the drafter reads.

    Args:
        shape: is changed.
        layers: how many; None for the shape's own number.
        free: bytes of the GPU's; given, as many layers are taken as fit beside the cache of the largest cell.

    Raises:
        Unfit: that is less than ``LEAST_LAYERS``.
    """
    if layers is not None:
        if layers < LEAST_LAYERS:
            raise Unfit(f"--layers is {layers}, but {LEAST_LAYERS} or more were expected")
        shape.target["num_hidden_layers"] = layers
    elif free is not None:
        rest, layer = shape.weight_bytes()
        layer += shape.cache_bytes(1) - shape.cache_bytes(0)
        layers = int((free - RESERVED - rest - shape.cache_bytes(0)) // layer) + 1  # and the dense one, in the rest
        shape.target["num_hidden_layers"] = min(61, layers)
        if layers < LEAST_LAYERS:
            raise Unfit(
                f"{free / 1e9:.0f} GB are free, too little for {LEAST_LAYERS} layers; lower --contexts or --concurrency"
            )
    length = max(shape.contexts) + ROOM
    count = shape.target["num_hidden_layers"]
    for config in (shape.target, shape.drafter):
        config["max_position_embeddings"] = length
    shape.drafter["eagle_aux_hidden_state_layer_ids"] = [2, count // 2, count - 3]
