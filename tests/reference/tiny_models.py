# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints. Norms and router biases are random too: at their initial values they would hide mistakes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "eos_token_id": None,
    "bos_token_id": None,
}
TARGETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-q-lora": {"q_lora_rank": None, "n_shared_experts": 2, "norm_topk_prob": False},
    "yarn-grouped": {"rope_parameters": YARN, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2},
    "all-sparse": {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
}


def make_hf(seed: int = 0, **changes: Any) -> DeepseekV3ForCausalLM:
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**BASE, **changes})).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.4 * torch.randn_like(p) if "norm" in name else 1.5 * torch.randn_like(p) / p.shape[-1] ** 0.5)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(0.3 * torch.randn_like(b))
    return model


def drafter_files(
    folder: Path, *, kind: str, seed: int = 0, width: int = 48, target_width: int = 48, features: int = 3, **config: Any
) -> Path:
    """Write a random drafter as SpecForge does. ``embed_tokens`` is left to be borrowed unless asked for."""
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return 1.5 * torch.randn(*shape, generator=gen) / shape[-1] ** 0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.4 * torch.randn(size, generator=gen)

    own_embeddings = config.pop("own_embeddings", False)
    draft_vocab = config.get("draft_vocab_size", 40)
    c: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if kind == "gqa" else "Eagle3DeepseekV2ForCausalLM"],
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rope_theta": 5000.0,
        **config,
    }
    w = {
        "fc.weight": rand(width, features * target_width),
        "norm.weight": norm(width),
        "lm_head.weight": rand(draft_vocab, width),
    }
    for i in range(c["num_hidden_layers"]):
        p, wide = ("midlayer" if i == 0 else f"layers.{i}"), (2 * width if i == 0 else width)
        a = f"{p}.self_attn"
        if kind == "gqa":
            dim = c.get("head_dim") or width // 4
            w |= {
                f"{a}.q_proj.weight": rand(4 * dim, wide),
                f"{a}.k_proj.weight": rand(2 * dim, wide),
                f"{a}.v_proj.weight": rand(2 * dim, wide),
                f"{a}.o_proj.weight": rand(width, 4 * dim),
            }
            if c.get("attention_bias"):
                w |= {f"{a}.{x}_proj.bias": rand(n * dim) for x, n in (("q", 4), ("k", 2), ("v", 2))}
        else:
            sizes = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
            c = {**sizes, "v_head_dim": 10, **c}
            heads, rank, rope = c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
            w |= {
                f"{a}.q_a_proj.weight": rand(20, wide),
                f"{a}.q_a_layernorm.weight": norm(20),
                f"{a}.q_b_proj.weight": rand(heads * (c["qk_nope_head_dim"] + rope), 20),
                f"{a}.kv_a_proj_with_mqa.weight": rand(rank + rope, wide),
                f"{a}.kv_a_layernorm.weight": norm(rank),
                f"{a}.kv_b_proj.weight": rand(heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank),
                f"{a}.o_proj.weight": rand(width, heads * c["v_head_dim"]),
            }
        for n in ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if i == 0 else [])):
            w[f"{p}.{n}.weight"] = norm(width)
        w |= {f"{p}.mlp.{n}_proj.weight": rand(64, width) for n in ("gate", "up")}
        w[f"{p}.mlp.down_proj.weight"] = rand(width, 64)
    if draft_vocab != c["vocab_size"]:
        ids = torch.randperm(c["vocab_size"], generator=gen)[:draft_vocab].sort().values
        w["d2t"] = ids - torch.arange(draft_vocab)
        w["t2d"] = torch.zeros(c["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    if own_embeddings:
        w["embed_tokens.weight"] = rand(c["vocab_size"], width)
    if c.get("fc_norm"):
        w |= {f"fc_norm.{i}.weight": norm(target_width) for i in range(features)}
    if c.get("norm_before_fc"):
        w["input_norm.weight"] = norm(features * target_width)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c))
    save_file(w, folder / "model.safetensors")
    return folder


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape, f"{tuple(got.shape)} against {tuple(want.shape)}"
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())
