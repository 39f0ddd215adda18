# SPDX-License-Identifier: Apache-2.0
"""The target against Transformers' DeepseekV3, in float32, on every boundary."""

from pathlib import Path

import pytest
import torch
from tiny_models import BASE, TARGETS, YARN, make_hf, relative_error
from transformers import DeepseekV3ForCausalLM

from vllm_kimi_eagle3.reference import Cache, Target, greedy

TOLERANCE = 2e-5
PROMPT = torch.randint(0, BASE["vocab_size"], (70,), generator=torch.Generator().manual_seed(9)).tolist()
Folders = dict[str, tuple[DeepseekV3ForCausalLM, Path]]


def hf_boundaries(model: DeepseekV3ForCausalLM, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Boundary k from what layer k was called with, and the last one from what the final norm was called with."""
    seen: list[torch.Tensor] = []
    modules = [*model.model.layers, model.model.norm]
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].clone())) for m in modules]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    for h in hooks:
        h.remove()
    return torch.stack(seen), logits


@pytest.mark.parametrize("name", TARGETS)
def test_every_boundary_and_the_logits_equal_transformers(target_folders: Folders, name: str) -> None:
    model, folder = target_folders[name]
    out = Target.load(folder).forward(PROMPT)
    boundaries, logits = hf_boundaries(model, PROMPT)
    assert len(boundaries) == BASE["num_hidden_layers"] + 1
    errors = [relative_error(a, b) for a, b in zip(out.boundaries, boundaries, strict=True)]
    print(f"{name}: worst boundary {max(errors):.1e}, logits {relative_error(out.logits, logits):.1e}")
    assert max(errors) < TOLERANCE
    assert relative_error(out.logits, logits) < TOLERANCE
    for k in range(len(boundaries)):
        for other in {k - 1, k + 1} & set(range(len(boundaries))):
            assert relative_error(out.boundaries[other], boundaries[k]) > 100 * TOLERANCE
    # What a capture that leaves the residual out would show.
    assert relative_error(out.boundaries[2] - out.boundaries[1], boundaries[2]) > 100 * TOLERANCE
    # What a capture of the normed states would show.
    assert relative_error(out.normed, boundaries[-1]) > 100 * TOLERANCE


@pytest.mark.parametrize("spoil", ["e_score_correction_bias", "q_a_layernorm", "kv_a_layernorm", "shared_experts"])
def test_the_comparison_sees_a_weight_that_is_ignored(target_folders: Folders, spoil: str) -> None:
    model, folder = target_folders["yarn-grouped"]
    target = Target.load(folder)
    hit = [n for n in target.weights if spoil in n]
    assert hit
    neutral = torch.ones_like if spoil.endswith("layernorm") else torch.zeros_like
    target.weights = {n: neutral(w) if n in hit else w for n, w in target.weights.items()}
    assert relative_error(target.forward(PROMPT).boundaries[-1], hf_boundaries(model, PROMPT)[0][-1]) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_parameters", BASE["rope_parameters"]), ("routed_scaling_factor", 1.0), ("topk_group", 4)],
)
def test_the_comparison_sees_a_config_field_that_is_ignored(target_folders: Folders, key: str, value: object) -> None:
    model, folder = target_folders["yarn-grouped"]
    good = Target.load(folder)
    bad = Target({**good.config, key: value}, good.weights)
    assert relative_error(bad.forward(PROMPT).boundaries[-1], hf_boundaries(model, PROMPT)[0][-1]) > 100 * TOLERANCE


def test_yarn_magnitude_and_softmax_scale_follow_mscale(tmp_path: Path) -> None:
    model = make_hf(5, rope_parameters={**YARN, "mscale": 1.4, "mscale_all_dim": 0.5})
    model.save_pretrained(tmp_path)
    assert relative_error(Target.load(tmp_path).forward(PROMPT).logits, hf_boundaries(model, PROMPT)[1]) < TOLERANCE


def test_latent_norms_use_the_engines_epsilon_and_can_use_transformers(tmp_path: Path) -> None:
    model = make_hf(6, rms_norm_eps=1e-2)
    model.save_pretrained(tmp_path)
    engine = Target.load(tmp_path)
    transformers = Target(engine.config, engine.weights, lora_norm_eps=1e-6)
    logits = hf_boundaries(model, PROMPT)[1]
    assert relative_error(transformers.forward(PROMPT).logits, logits) < TOLERANCE
    assert relative_error(engine.forward(PROMPT).logits, logits) > 100 * TOLERANCE


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("chunks", [(69, 1), (1, 5, 64), (30, 4, 4, 4, 28)])
def test_cached_equals_uncached(target_folders: Folders, name: str, chunks: tuple[int, ...]) -> None:
    target = Target.load(target_folders[name][1])
    whole, cache, parts, at = target.forward(PROMPT), Cache(), [], 0
    for size in chunks:
        parts.append(target.forward(PROMPT[at : at + size], cache))
        at += size
    assert at == len(PROMPT) == cache.length
    assert relative_error(torch.cat([p.boundaries for p in parts], 1), whole.boundaries) < TOLERANCE
    assert relative_error(torch.cat([p.logits for p in parts]), whole.logits) < TOLERANCE


def test_truncating_the_cache_forgets_rejected_tokens(target: Target) -> None:
    cache = Cache()
    target.forward(PROMPT[:20], cache)
    wrong = target.forward([1, 2, 3], cache)
    stale = target.forward(PROMPT[20:25], cache)
    cache.truncate(20)
    right = target.forward(PROMPT[20:25], cache)
    whole = target.forward(PROMPT[:25])
    assert relative_error(right.logits, whole.logits[20:]) < TOLERANCE
    assert relative_error(stale.logits, whole.logits[20:]) > 100 * TOLERANCE
    assert relative_error(wrong.logits, whole.logits[20:23]) > 100 * TOLERANCE


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_equals_transformers_generate(target_folders: Folders, name: str) -> None:
    model, folder = target_folders[name]
    want = model.generate(torch.tensor([PROMPT[:12]]), max_new_tokens=40, do_sample=False)[0, 12:].tolist()
    got = greedy(Target.load(folder), PROMPT[:12], 40)
    assert got == want
    assert got != greedy(Target.load(folder), PROMPT[1:13], 40)


@pytest.mark.parametrize(
    ("key", "value"), [("scoring_func", "softmax"), ("topk_method", "greedy"), ("hidden_act", "gelu")]
)
def test_other_architectures_are_refused_by_name(target: Target, key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{key}='{value}'"):
        Target({**target.config, key: value}, target.weights)
