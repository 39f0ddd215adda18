# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints that every release can load: two targets and the drafters that borrow from them.

The weights of the two targets are the same, under other names. Dimensions are those that the CPU engine's MLA kernel
is compiled for; releases without it don't mind.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from vllm_kimi_eagle3.tiny_kimi.materialize import HERE, PROCESSOR

VOCAB = 320
LAYERS = 8
WIDTH = 128
IDS = (3, 5, 6)
"""What the drafters list under ``eagle_config``; as boundaries, by their alignment below."""

TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mm_hidden_size": 32,
    "patch_size": 14,
}


def target_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """A DeepSeek-V3 checkpoint. Norms and router biases are random too: at their usual values they hide mistakes."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    c = TEXT
    heads, nope, rope, value = 4, c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    weights = {"model.embed_tokens.weight": matrix(VOCAB, WIDTH), "lm_head.weight": matrix(VOCAB, WIDTH)}
    weights["model.norm.weight"] = norm(WIDTH)

    def mlp(name: str, size: int) -> None:
        weights.update({f"{name}.{part}_proj.weight": matrix(size, WIDTH) for part in ("gate", "up")})
        weights[f"{name}.down_proj.weight"] = matrix(WIDTH, size)

    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        weights |= {
            f"{layer}.input_layernorm.weight": norm(WIDTH),
            f"{layer}.post_attention_layernorm.weight": norm(WIDTH),
            f"{attention}.q_a_proj.weight": matrix(c["q_lora_rank"], WIDTH),
            f"{attention}.q_a_layernorm.weight": norm(c["q_lora_rank"]),
            f"{attention}.q_b_proj.weight": matrix(heads * (nope + rope), c["q_lora_rank"]),
            f"{attention}.kv_a_proj_with_mqa.weight": matrix(c["kv_lora_rank"] + rope, WIDTH),
            f"{attention}.kv_a_layernorm.weight": norm(c["kv_lora_rank"]),
            f"{attention}.kv_b_proj.weight": matrix(heads * (nope + value), c["kv_lora_rank"]),
            f"{attention}.o_proj.weight": matrix(WIDTH, heads * value),
        }
        if i < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        experts = c["n_routed_experts"]
        weights[f"{layer}.mlp.gate.weight"] = matrix(experts, WIDTH)
        weights[f"{layer}.mlp.gate.e_score_correction_bias"] = 0.1 * torch.randn(experts, generator=generator)
        mlp(f"{layer}.mlp.shared_experts", c["moe_intermediate_size"])
        for expert in range(experts):
            mlp(f"{layer}.mlp.experts.{expert}", c["moe_intermediate_size"])
    return weights


def deepseek_v3(folder: Path) -> Path:
    """The target as ``DeepseekV3ForCausalLM``."""
    _write(folder, TEXT, target_weights())
    return folder


def kimi_k25(folder: Path) -> Path:
    """The same target as ``KimiK25ForConditionalGeneration``, in the schema of vLLM up to 0.31; no picture tower."""
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": TEXT,
        "vision_config": VISION,
        "media_placeholder_token_id": 266,
        "image_token_id": 266,
        "use_unified_vision_chunk": True,
        "torch_dtype": "float32",
    }
    _write(folder, config, {f"language_model.{name}": weight for name, weight in target_weights().items()})
    # What Kimi's processor asks for while the server starts, even one that serves text only.
    processor = {
        **PROCESSOR,
        # Later releases bring a processor of their own, and read only this.
        "media_proc_cfg": {
            "patch_size": 14,
            "merge_kernel_size": 2,
            "temporal_merge_kernel_size": 1,
            "in_patch_limit": 64,
            "patch_limit_on_one_side": 16,
            "in_patch_limit_each_frame": 64,
            "in_patch_limit_video": 64,
            "fixed_output_tokens": None,
            "sample_fps": 2.0,
            "timestamp_mode": "hh:mm:ss.fff",
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    shutil.copyfile(HERE / "tiny_vision.py", folder / "tiny_vision.py")
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def drafter(folder: Path, **eagle_config: Any) -> Path:
    """A Llama drafter that borrows embeddings and lm_head, with :data:`IDS` as SpecForge writes them."""
    generator = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(IDS), "use_aux_hidden_state": True, **eagle_config},
    }
    layer = "midlayer"
    weights = {
        "norm.weight": torch.ones(WIDTH),
        f"{layer}.self_attn.q_proj.weight": matrix(WIDTH, 2 * WIDTH),
        f"{layer}.self_attn.k_proj.weight": matrix(64, 2 * WIDTH),
        f"{layer}.self_attn.v_proj.weight": matrix(64, 2 * WIDTH),
        f"{layer}.self_attn.o_proj.weight": matrix(WIDTH, WIDTH),
        f"{layer}.mlp.gate_proj.weight": matrix(192, WIDTH),
        f"{layer}.mlp.up_proj.weight": matrix(192, WIDTH),
        f"{layer}.mlp.down_proj.weight": matrix(WIDTH, 192),
        **{f"{layer}.{n}.weight": torch.ones(WIDTH) for n in ("input_layernorm", "hidden_norm")},
        f"{layer}.post_attention_layernorm.weight": torch.ones(WIDTH),
    }
    if config["eagle_config"]["use_aux_hidden_state"]:
        weights["fc.weight"] = matrix(WIDTH, 3 * WIDTH)
    _write(folder, config, weights)
    return folder


def mla_drafter(folder: Path) -> Path:
    """The configuration of an MLA drafter; vLLM refuses it, or not, before it reads weights."""
    config = {**TEXT, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "num_hidden_layers": 1}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(IDS)}
    _write(folder, config, {})
    return folder


def llama(folder: Path) -> Path:
    """A plain Llama: none of our targets."""
    generator = torch.Generator().manual_seed(3)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 192,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }
    shapes = {"model.embed_tokens": (VOCAB, WIDTH), "lm_head": (VOCAB, WIDTH)}
    norms = ["model.norm"]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{n}_proj": (WIDTH, WIDTH) for n in "qo"}
        shapes |= {f"{layer}.self_attn.{n}_proj": (64, WIDTH) for n in "kv"}
        shapes |= {f"{layer}.mlp.{n}_proj": (192, WIDTH) for n in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (WIDTH, 192)
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    weights = {f"{n}.weight": torch.randn(*s, generator=generator) / s[-1] ** 0.5 for n, s in shapes.items()}
    _write(folder, config, weights | {f"{n}.weight": torch.ones(WIDTH) for n in norms})
    return folder


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
