# SPDX-License-Identifier: Apache-2.0
"""The drafter against Transformers' own attention, rotary, MLP and norm modules, wired by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import YARN, drafter_files, relative_error
from torch import nn
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from vllm_kimi_eagle3.reference import Cache, Drafter, Target, load_checkpoint

TOLERANCE = 2e-5
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "gqa": {"kind": "gqa"},
    "gqa norm_before_residual": {"kind": "gqa", "norm_before_residual": True},
    "gqa norm_output": {"kind": "gqa", "norm_output": True},
    "gqa fc_norm": {"kind": "gqa", "fc_norm": True},
    "gqa norm_before_fc": {"kind": "gqa", "norm_before_fc": True},
    "gqa norm_before_fc in eagle_config": {"kind": "gqa", "norm_before_fc": True, "nested": True},
    "gqa two layers": {"kind": "gqa", "num_hidden_layers": 2, "norm_before_residual": True},
    "gqa wide heads, bias": {"kind": "gqa", "head_dim": 16, "attention_bias": True},
    "gqa yarn": {"kind": "gqa", "rope_scaling": {**YARN, "rope_theta": 5000.0}},
    "gqa yarn, attention_factor": {"kind": "gqa", "rope_scaling": {**YARN, "attention_factor": 1.3}},
    "gqa llama3": {"kind": "gqa", "rope_scaling": LLAMA3},
    "gqa whole vocabulary, 4 features, other width": {
        "kind": "gqa",
        "draft_vocab_size": 96,
        "features": 4,
        "width": 32,
        "own_embeddings": True,
    },
    "mla": {"kind": "mla"},
    "mla all switches": {"kind": "mla", "norm_before_residual": True, "norm_output": True, "fc_norm": True},
    "mla yarn": {"kind": "mla", "rope_scaling": YARN},
}


class Wired(nn.Module):
    """An EAGLE-3 drafter out of Transformers' modules, batch of one, no cache."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor], mla: bool) -> None:
        super().__init__()
        rope = config.get("rope_scaling") or {"rope_type": "default", "rope_theta": config["rope_theta"]}
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
        lora = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        common: dict[str, Any] = {n: config[n] for n in names}
        common |= {"max_position_embeddings": 128, "rope_parameters": rope, "num_hidden_layers": 2}
        if mla:
            hf: Any = DeepseekV3Config(**{**common, "num_key_value_heads": 4}, **{n: config[n] for n in lora})
        else:
            hf = LlamaConfig(
                **common, head_dim=config.get("head_dim"), attention_bias=config.get("attention_bias", False)
            )
        hf._attn_implementation, hf.mlp_bias = "eager", False
        self.config, self.w, self.layers = config, weights, nn.ModuleList()
        self.rotary = (DeepseekV3RotaryEmbedding if mla else LlamaRotaryEmbedding)(hf)
        h = config["hidden_size"]
        for i in range(config["num_hidden_layers"]):
            attn: Any = (DeepseekV3Attention if mla else LlamaAttention)(hf, layer_idx=i)
            attn.o_proj = nn.Linear(attn.o_proj.in_features, h, bias=False)  # SpecForge's has no bias
            if i == 0:
                for n in ("q_a_proj", "kv_a_proj_with_mqa") if mla else ("q_proj", "k_proj", "v_proj"):
                    old = getattr(attn, n)
                    setattr(attn, n, nn.Linear(2 * h, old.out_features, bias=old.bias is not None))
            if mla:
                attn.q_a_layernorm.variance_epsilon = attn.kv_a_layernorm.variance_epsilon = hf.rms_norm_eps
            parts = {"self_attn": attn, "mlp": LlamaMLP(hf)}
            for n in ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if i == 0 else [])):
                parts[n] = LlamaRMSNorm(h, hf.rms_norm_eps)
            layer = nn.ModuleDict(parts)
            prefix = f"layers.{i}."
            layer.load_state_dict({n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)})
            self.layers.append(layer)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = LlamaRMSNorm(x.shape[-1], self.config["rms_norm_eps"])
        norm.weight.data = self.w[f"{name}.weight"]
        return norm(x)

    def forward(self, rows: torch.Tensor, ids: list[int], embed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        if c.get("norm_before_fc") or c.get("eagle_config", {}).get("norm_before_fc"):
            rows = self.norm("input_norm", rows)
        if c.get("fc_norm"):
            width = self.w["fc_norm.0.weight"].shape[0]
            rows = torch.cat([self.norm(f"fc_norm.{i}", r) for i, r in enumerate(rows.split(width, -1))], -1)
        stream = (rows @ self.w["fc.weight"].T)[None]
        embeds = embed[torch.tensor(ids)][None]
        n = len(ids)
        rope = self.rotary(stream, torch.arange(n)[None])
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        for i, layer in enumerate(self.layers):
            if i == 0:
                x = layer["hidden_norm"](stream)
                stream = x if c.get("norm_before_residual") else stream
                x = torch.cat([layer["input_layernorm"](embeds), x], -1)
            else:
                x = layer["input_layernorm"](stream)
            stream = stream + layer["self_attn"](x, position_embeddings=rope, attention_mask=mask)[0]
            stream = stream + layer["mlp"](layer["post_attention_layernorm"](stream))
        normed = self.norm("norm", stream)
        return (normed @ self.w["lm_head.weight"].T)[0], (normed if c.get("norm_output") else stream)[0]


def build(tmp_path: Path, case: dict[str, Any], target: Target) -> tuple[Drafter, Wired]:
    case = dict(case)
    if case.pop("nested", False):
        case["eagle_config"] = {"norm_before_fc": case["norm_before_fc"]}
    folder = drafter_files(tmp_path, **case)
    checkpoint = load_checkpoint(folder)
    if "eagle_config" in case:  # the nested switch must do on its own
        del checkpoint.config["norm_before_fc"]
    weights = {"embed_tokens.weight": target.embed_weight, **checkpoint.weights}
    return Drafter(checkpoint.config, weights), Wired(
        checkpoint.config, dict(checkpoint.weights), case["kind"] == "mla"
    )


def inputs(drafter: Drafter, length: int = 50) -> tuple[torch.Tensor, list[int]]:
    gen = torch.Generator().manual_seed(3)
    rows = torch.randn(length, drafter.weights["fc.weight"].shape[1], generator=gen) * 3
    return rows, torch.randint(0, 96, (length,), generator=gen).tolist()


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_and_carried_state_equal_transformers_modules(case: str, tmp_path: Path, target: Target) -> None:
    drafter, wired = build(tmp_path, CASES[case], target)
    assert drafter.is_mla == (CASES[case]["kind"] == "mla")
    rows, ids = inputs(drafter)
    normed, carried = drafter.forward(ids, drafter.combine_hidden_states(rows), Cache())
    logits, want = wired(rows, ids, drafter.weights["embed_tokens.weight"])
    print(f"{case}: logits {relative_error(drafter.logits(normed), logits):.1e}")
    assert relative_error(drafter.logits(normed), logits) < TOLERANCE
    assert relative_error(carried, want) < TOLERANCE
    shifted, _ = drafter.forward([*ids[1:], ids[0]], drafter.combine_hidden_states(rows), Cache())
    assert relative_error(drafter.logits(shifted), logits) > 100 * TOLERANCE
    other, _ = drafter.forward(ids, drafter.combine_hidden_states(rows.roll(1, 0)), Cache())
    assert relative_error(drafter.logits(other), logits) > 100 * TOLERANCE


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
@torch.inference_mode()
def test_each_switch_matters(switch: str, tmp_path: Path, target: Target) -> None:
    drafter, _ = build(tmp_path, {"kind": "gqa", switch: True}, target)
    off = Drafter({**drafter.config, switch: False}, drafter.weights)
    rows, ids = inputs(drafter)
    on_carried = drafter.forward(ids, drafter.combine_hidden_states(rows), Cache())[1]
    off_carried = off.forward(ids, off.combine_hidden_states(rows), Cache())[1]
    assert relative_error(off_carried, on_carried) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_proposing_in_pieces_equals_recomputing_from_scratch(kind: str, tmp_path: Path, target: Target) -> None:
    drafter, _ = build(tmp_path, {"kind": kind}, target)
    rows, ids = inputs(drafter)
    session, at = drafter.start(), 0
    for size in (20, 1, 4, 2, 1, 1, 5):
        piece = session.propose(rows[at : at + size], ids[at : at + size], at, 4)
        at += size
        scratch = drafter.start().propose(rows[:at], ids[:at], 0, 4)
        assert piece.token_ids == scratch.token_ids
        assert relative_error(piece.logits, scratch.logits) < TOLERANCE
        assert relative_error(piece.entering, scratch.entering) < TOLERANCE
    late = drafter.start().propose(rows[1:at], ids[1:at], 0, 4)
    assert relative_error(late.logits, scratch.logits) > 100 * TOLERANCE
    with pytest.raises(ValueError, match=f"position 3, the drafter has seen {at}"):
        session.propose(rows[:1], ids[:1], 3, 2)


@torch.inference_mode()
def test_later_drafts_feed_the_carried_state_and_the_draft_itself(tmp_path: Path, target: Target) -> None:
    drafter, wired = build(tmp_path, {"kind": "gqa"}, target)
    rows, ids = inputs(drafter, 9)
    proposal = drafter.start().propose(rows, ids, 0, 3)
    first, carried = wired(rows, ids, drafter.weights["embed_tokens.weight"])
    assert proposal.token_ids[0] == int(drafter.draft_to_target[first[-1].argmax()])
    assert relative_error(proposal.entering[0], drafter.combine_hidden_states(rows)[-1]) < TOLERANCE
    assert relative_error(proposal.entering[1], carried[-1]) < TOLERANCE
    cache = Cache()
    drafter.forward(ids, drafter.combine_hidden_states(rows), cache)
    normed, _ = drafter.forward([proposal.token_ids[0]], carried[-1:], cache)
    assert relative_error(proposal.logits[1], drafter.logits(normed)[0]) < TOLERANCE
    assert relative_error(proposal.entering[1], drafter.forward(ids, carried, Cache())[0][-1]) > 100 * TOLERANCE


def test_draft_ids_go_through_d2t(tmp_path: Path, target: Target) -> None:
    drafter, _ = build(tmp_path, {"kind": "gqa", "draft_vocab_size": 7}, target)
    allowed = load_checkpoint(tmp_path).weights["t2d"].nonzero().flatten().tolist()
    assert drafter.draft_to_target.tolist() == allowed != list(range(7))
    rows, ids = inputs(drafter)
    assert set(drafter.start().propose(rows, ids, 0, 20).token_ids) <= set(allowed)


def test_what_the_drafter_lacks_is_borrowed_or_asked_for(tmp_path: Path, target: Target) -> None:
    folder = drafter_files(tmp_path / "a", kind="gqa")
    assert Drafter.load(folder, target).weights["embed_tokens.weight"] is target.embed_weight
    with pytest.raises(ValueError, match=r"no embed_tokens\.weight; give the target"):
        Drafter.load(folder)
    narrow = drafter_files(tmp_path / "b", kind="gqa", width=32)
    with pytest.raises(ValueError, match="the target's has width 48"):
        Drafter.load(narrow, target)
    own = drafter_files(tmp_path / "c", kind="gqa", own_embeddings=True)
    assert Drafter.load(own, target).weights["embed_tokens.weight"] is not target.embed_weight


def test_refusals_say_what_is_wrong(tmp_path: Path, target: Target) -> None:
    drafter, _ = build(tmp_path / "gqa", {"kind": "gqa"}, target)
    with pytest.raises(ValueError, match="fc takes 144 features, got 96"):
        drafter.combine_hidden_states(torch.zeros(2, 96))
    mla, _ = build(tmp_path / "mla", {"kind": "mla"}, target)
    with pytest.raises(ValueError, match="norm_before_fc"):
        Drafter({**mla.config, "norm_before_fc": True}, mla.weights)
    with pytest.raises(ValueError, match="rope type 'longrope'"):
        Drafter({**drafter.config, "rope_scaling": {"rope_type": "longrope"}}, drafter.weights)
