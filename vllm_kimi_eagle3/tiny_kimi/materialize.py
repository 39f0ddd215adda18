# SPDX-License-Identifier: Apache-2.0
"""Write the runnable variants of the tiny pair from the committed files.

The weights are committed once: `checkpoint/` is the Kimi-K2.5 target, `drafter_gqa/` and `drafter_mla/` are the two
EAGLE-3 drafters. Everything else differs in configuration, or in the prefix of tensor names, and is written on demand:

    from vllm_kimi_eagle3.tiny_kimi.materialize import materialize
    pair = materialize("/tmp/pair")           # or: python -m vllm_kimi_eagle3.tiny_kimi.materialize /tmp/pair
    pair["kimi_k25"], pair["eagle3_gqa_nested"]

`VARIANTS` names all folders and says what each is. Only the standard library and safetensors are needed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# The layers whose outputs the drafters read, and the same streams counted as boundaries (the stream entering layer k).
OUTPUT_IDS = [3, 6, 8]
BOUNDARY_IDS = [4, 7, 9]
DRAFT_VOCAB = 96

VARIANTS: dict[str, str] = {
    "kimi_k25": "the target as Kimi-K2.5, config schema of vLLM 0.32 and later (image_token_id)",
    "kimi_k25_legacy": "the same weights, config schema of vLLM up to 0.31 (media_placeholder_token_id)",
    "deepseek_v3": "the text model alone, as DeepseekV3ForCausalLM",
    "eagle3_gqa_nested": "GQA drafter, ids nested in eagle_config under the output rule, as SpecForge writes them",
    "eagle3_gqa_boundary": "GQA drafter, ids at the top level under the boundary rule",
    "eagle3_mla_nested": "MLA drafter, ids nested in eagle_config under the output rule",
    "eagle3_mla_boundary": "MLA drafter, ids at the top level under the boundary rule",
    "eagle3_mla_nested_v3": "as eagle3_mla_nested, but model_type deepseek_v3, which stock vLLM takes for an MTP head",
}

PICTURE_OUTPUT_IDS = [1, 3, 5]
PICTURE_BOUNDARY_IDS = [2, 4, 6]
PICTURE_VARIANTS: dict[str, str] = {
    "pictures": "a smaller Kimi-K2.5 that knows what `scenes` draws, config schema of vLLM 0.32 and later",
    "pictures_legacy": "the same weights, config schema of vLLM up to 0.31",
    "pictures_gqa": "its GQA drafter, trained on the pictures' own embeddings",
    "pictures_mla": "its MLA drafter, likewise",
    "pictures_gqa_placeholder": "its GQA drafter, trained on the placeholder's embedding instead",
}

PROCESSOR: dict[str, Any] = {
    "image_processor_type": "TinyVisionProcessor",
    "auto_map": {"AutoImageProcessor": "tiny_vision.TinyVisionProcessor"},
}
"""Of the old schema: checkpoints bring their processor, because vLLM had none."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

_TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 268,
    "torch_dtype": "bfloat16",
}

_VISION: dict[str, Any] = {
    "model_type": "kimi_k25_vision",
    "patch_size": 14,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "merge_kernel_size": [2, 2],
}
_VISION_NEW = {"pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4, "hidden_act": "gelu_pytorch_tanh"}
_VISION_OLD = {
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "video_attn_type": "spatial_temporal",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
}

_KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 268,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


# The picture pair is smaller: what it has to know is less.
_PICTURES = {"hidden_size": 128, "num_hidden_layers": 7, "intermediate_size": 256, "q_lora_rank": 64}
_PICTURES_VISION = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_PICTURES_DRAFTER = {"hidden_size": 128, "q_lora_rank": 64}


def text_config(pictures: bool = False) -> dict[str, Any]:
    """The target's text config, complete as a DeepseekV3ForCausalLM config."""
    return _TEXT_CONFIG | (_PICTURES if pictures else {})


def kimi_config(legacy: bool = False, pictures: bool = False) -> dict[str, Any]:
    """The Kimi-K2.5 config, of the pair or of the picture pair.

    The new schema is that of Transformers' Kimi_K25Config, which vLLM reads from 0.32.0; the legacy one is that of the
    original checkpoint and of vLLM's own config class up to 0.31.0.
    """
    vision = _VISION | (_PICTURES_VISION if pictures else {})
    width = vision["hidden_size"]
    if legacy:
        extra = {
            "ignore_index": -100,
            "media_placeholder_token_id": 266,
            "use_unified_vision_chunk": True,
            "video_placeholder": "<|kimi_k25_video_placeholder|>",
        }
        vision |= _VISION_OLD | {"mm_hidden_size": width}
    else:
        extra = {
            "image_token_id": 266,
            "video_token_id": 267,
            "vision_start_token_id": 263,
            "vision_end_token_id": 265,
            "projection_hidden_size": width,
            "projection_layer_norm_eps": 1e-5,
            # vLLM's chat front end keys Kimi's single modality ("vision_chunk") on this in every release.
            "use_unified_vision_chunk": True,
        }
        vision |= _VISION_NEW
    return _KIMI | extra | {"text_config": text_config(pictures), "vision_config": vision}


def drafter_config(kind: str, rule: str, model_type: str | None = None, pictures: bool = False) -> dict[str, Any]:
    """A drafter's config.

    Args:
        kind: "gqa" (LlamaForCausalLMEagle3) or "mla" (Eagle3DeepseekV2ForCausalLM).
        rule: "nested" (output rule, as SpecForge writes it) or "boundary" (boundary rule, top level).
        model_type: default "llama" for GQA, and "kimi_k2" for MLA, which vLLM reads as a DeepSeek-V3 config.
        pictures: for the picture pair's target.
    """
    shared: dict[str, Any] = {
        "vocab_size": 320,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 268,
        "torch_dtype": "bfloat16",
    }
    if kind == "gqa":
        config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} | shared
        config |= {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 256 if pictures else 512,
            "mlp_bias": False,
            "pretraining_tp": 1,
        }
    elif kind == "mla":
        config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"} | shared
        config |= {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 128,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "intermediate_size": 192 if pictures else 384,
        }
    else:
        raise ValueError(f"drafter kind {kind!r}: expected 'gqa' or 'mla'")
    if model_type is not None:
        config["model_type"] = model_type
    if pictures:
        config |= {key: value for key, value in _PICTURES_DRAFTER.items() if key in config}
    outputs, boundaries = (PICTURE_OUTPUT_IDS, PICTURE_BOUNDARY_IDS) if pictures else (OUTPUT_IDS, BOUNDARY_IDS)
    if rule == "nested":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
    elif rule == "boundary":
        config["eagle_aux_hidden_state_layer_ids"] = boundaries
    else:
        raise ValueError(f"layer-id rule {rule!r}: expected 'nested' or 'boundary'")
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _place(source: Path, target: Path) -> None:
    """Hard-link, or copy where links don't reach."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def materialize(out_dir: str | os.PathLike[str], source: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """Write every variant under `out_dir` and return {variant: folder}.

    Args:
        out_dir: where to write; made if missing, existing variants are overwritten.
        source: the folder that holds `checkpoint/` and the drafters; default: this one.

    Raises:
        FileNotFoundError: when a committed weight file is missing.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    out, base = Path(out_dir), Path(source) if source is not None else HERE
    folders = {name: out / name for name in VARIANTS}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)

    checkpoint = base / "checkpoint"
    weights = checkpoint / "model.safetensors"
    for name in ("kimi_k25", "kimi_k25_legacy"):
        _write_target(folders[name], weights, kimi_config(legacy=name.endswith("legacy")), checkpoint)

    prefix = "language_model."
    with safe_open(weights, framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118, the file is no mapping
        text = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    save_file(text, folders["deepseek_v3"] / "model.safetensors", metadata={"format": "pt"})
    _write_json(folders["deepseek_v3"] / "config.json", text_config())
    for file_name in _TOKENIZER_FILES:
        shutil.copyfile(checkpoint / file_name, folders["deepseek_v3"] / file_name)

    for name, folder in folders.items():
        if name.startswith("eagle3_"):
            _, kind, rule, *v3 = name.split("_")
            _place(base / f"drafter_{kind}" / "model.safetensors", folder / "model.safetensors")
            _write_json(folder / "config.json", drafter_config(kind, rule, "deepseek_v3" if v3 else None))
    return folders


def materialize_pictures(
    out_dir: str | os.PathLike[str], source: str | os.PathLike[str] | None = None
) -> dict[str, Path]:
    """Write every variant of the picture pair under `out_dir`; arguments and errors as in `materialize`."""
    out, base = Path(out_dir), Path(source) if source is not None else HERE
    folders = {name: out / name for name in PICTURE_VARIANTS}
    for name, folder in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        if "_gqa" in name or "_mla" in name:
            kind = "mla" if name.endswith("mla") else "gqa"
            _place(base / "pictures" / f"{name.removeprefix('pictures_')}.safetensors", folder / "model.safetensors")
            _write_json(folder / "config.json", drafter_config(kind, "nested", pictures=True))
        else:
            config = kimi_config(legacy=name.endswith("legacy"), pictures=True)
            _write_target(folder, base / "pictures" / "target.safetensors", config, HERE / "checkpoint")
    return folders


def _write_target(folder: Path, weights: Path, config: dict[str, Any], checkpoint: Path) -> None:
    """A Kimi-K2.5 folder: weights, config, processor, tokenizer."""
    _place(weights, folder / "model.safetensors")
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    if "media_placeholder_token_id" in config:
        processor |= PROCESSOR
        shutil.copyfile(HERE / "tiny_vision.py", folder / "tiny_vision.py")
    _write_json(folder / "preprocessor_config.json", processor)
    _write_json(folder / "config.json", config)
    for file_name in _TOKENIZER_FILES:
        shutil.copyfile(checkpoint / file_name, folder / file_name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir")
    for variant, folder in materialize(parser.parse_args().out_dir).items():
        print(f"{folder}: {VARIANTS[variant]}")
