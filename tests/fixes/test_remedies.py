# SPDX-License-Identifier: Apache-2.0
"""Remedies that no CPU engine exercises, on the releases' own functions: each red without, green with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.releases import build, definition
from vllm_kimi_eagle3.fixes import embeddings, float16_stream, k25_language_model, shared_lm_head, use_aux_flag
from vllm_kimi_eagle3.fixes.eagle3_interface import decoder

DEEPSEEK = "model_executor/models/deepseek_v2.py"


class _MLP(torch.nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return x


def causal_model(release: str) -> Any:
    """A ``DeepseekV2ForCausalLM`` of one layer: the release's own forwards around parts that are identities."""
    namespace = {"torch": torch, "DeepseekAttention": int, "DeepseekV2MLP": _MLP}
    layer_forward = build(
        release, DEEPSEEK, definition(release, DEEPSEEK, "forward", "DeepseekV2DecoderLayer"), namespace
    )
    outer_forward = build(release, DEEPSEEK, definition(release, DEEPSEEK, "forward", "DeepseekV2ForCausalLM"))

    def norm(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return x.clone() if residual is None else (x.clone(), x + residual)

    layer = SimpleNamespace(
        use_mha=False,
        use_sequence_parallel_moe=False,
        routed_scaling_factor=2.5,
        layer_idx=0,
        self_attn=lambda *args, **kwargs: (kwargs.get("hidden_states") if kwargs else args[1]).clone(),
        input_layernorm=norm,
        post_attention_layernorm=norm,
        mlp=_MLP(),
    )

    def model(input_ids: Any, positions: torch.Tensor, tensors: Any, embeds: torch.Tensor) -> Any:
        hidden, residual = layer_forward(layer, positions, embeds, None)
        return hidden, [hidden + residual]

    model.config = SimpleNamespace(routed_scaling_factor=2.5)
    return SimpleNamespace(model=model), outer_forward


@pytest.mark.parametrize(("release", "mutates"), [("0.24.0", False), ("0.25.0", True), ("0.33.0", True)])
def test_float16_leaves_the_callers_embeddings(release: str, mutates: bool) -> None:
    outer, forward = causal_model(release)
    given = torch.ones(3, 4, dtype=torch.float16)
    forward(outer, None, torch.arange(3), None, given)
    assert bool((given != 1).any()) == mutates
    given = torch.ones(3, 4, dtype=torch.float16)
    float16_stream.around(forward)(outer, None, torch.arange(3), None, given)
    assert bool((given == 1).all())


@pytest.mark.parametrize("release", ["0.25.0", "0.33.0"])
@pytest.mark.parametrize("from_ids", [False, True])
def test_embeddings_are_captured_as_they_were_passed_in(release: str, from_ids: bool) -> None:
    """D23, on a decoder that changes its input in place: in front of the loop's own states, before the change."""
    outer, forward = causal_model(release)
    given = torch.ones(3, 4, dtype=torch.float16)
    inner = outer.model
    inner.embed_input_ids = lambda ids: torch.ones(len(ids), 4, dtype=torch.float16)
    model = type("Causal", (), {"forward": forward})()
    model.model = lambda ids, *rest: inner(None, *rest[:2], inner.embed_input_ids(ids) if rest[2] is None else rest[2])
    model.model.embed_input_ids = inner.embed_input_ids
    capturing = embeddings.with_embeddings(model)
    ids = torch.arange(3) if from_ids else None
    _, captured = capturing(ids, torch.arange(3), inputs_embeds=None if from_ids else given)
    assert len(captured) == 2
    assert bool((captured[0] == 1).all())
    assert from_ids or bool((given != 1).any()), "the control: this decoder does change what it is given"


@pytest.mark.parametrize("release", ["0.17.1", "0.24.0", "0.33.0"])
def test_float16_states_get_their_size_back(release: str) -> None:
    outer, forward = causal_model(release)
    _, scaled = forward(outer, None, torch.arange(3), None, torch.ones(3, 4, dtype=torch.float16))
    _, (found,) = float16_stream.around(forward)(
        outer, None, torch.arange(3), None, torch.ones(3, 4, dtype=torch.float16)
    )
    assert torch.equal(found, (scaled[0].float() * 2.5).half())


def test_float16_states_beyond_its_range_stay_finite() -> None:
    (found,) = float16_stream.unscaled([torch.tensor([[60000.0, -60000.0, 1.0]], dtype=torch.float16)], 2.5)
    assert found.tolist() == [[65504.0, -65504.0, 2.5]]


def test_other_dtypes_pass_through_untouched() -> None:
    states = [torch.ones(2, 2)]

    def forward(self: Any, *args: Any) -> Any:
        return args[3], states

    embeds = torch.ones(2, 2)
    out, same = float16_stream.around(forward)(None, None, None, None, embeds)
    assert out is embeds and same is states


@pytest.mark.parametrize(("says", "kept"), [({}, True), ({"use_aux_hidden_state": False}, False), (None, True)])
def test_aux_flag_follows_the_drafter(says: dict[str, bool] | None, kept: bool) -> None:
    """The property as D13 puts it on the runner; the assignment is the one of its ``__init__``."""

    class Runner:
        def __init__(self) -> None:
            hf_config = SimpleNamespace() if says is None else SimpleNamespace(eagle_config=says)
            self.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf_config))
            self.use_aux_hidden_state_outputs = False
            assert self.use_aux_hidden_state_outputs is False
            self.use_aux_hidden_state_outputs = True

    class Mended(Runner):
        use_aux_hidden_state_outputs = property(use_aux_flag._get, use_aux_flag._set)

    assert Runner().use_aux_hidden_state_outputs is True
    assert Mended().use_aux_hidden_state_outputs is kept


class _Wrapper(torch.nn.Module):
    """Kimi-K2.5 as 0.15 builds it (``bare``) or as later releases do."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        inner = torch.nn.Module()
        inner.embed_tokens = torch.nn.Embedding(4, 2)
        if bare:
            self.language_model, self.lm_head = inner, torch.nn.Linear(2, 4)
        else:
            self.language_model = torch.nn.Module()
            self.language_model.model, self.language_model.lm_head = inner, torch.nn.Linear(2, 4)

    def get_language_model(self) -> Any:
        return self.language_model


def test_bare_decoder_shows_its_parts_while_the_drafter_loads() -> None:
    wrapper = _Wrapper(bare=True)
    names = list(dict(wrapper.named_modules()))
    with k25_language_model.parts_where_expected(wrapper):
        shown = wrapper.get_language_model()
        assert shown.model is wrapper.language_model and shown.lm_head is wrapper.lm_head
        assert list(dict(wrapper.named_modules())) == names
    assert wrapper.get_language_model() is wrapper.language_model
    whole = _Wrapper(bare=False)
    with k25_language_model.parts_where_expected(whole):
        assert whole.get_language_model() is whole.language_model


@pytest.mark.parametrize("bare", [True, False])
def test_decoder_is_found_in_either_shape(bare: bool) -> None:
    assert hasattr(decoder(_Wrapper(bare)), "embed_tokens")


def test_wrapper_shows_its_lm_head_while_the_drafter_loads() -> None:
    wrapper = _Wrapper(bare=False)
    names = list(dict(wrapper.named_modules()))
    with shared_lm_head.with_lm_head(wrapper):
        assert wrapper.lm_head is wrapper.language_model.lm_head
        assert list(dict(wrapper.named_modules())) == names
    assert not hasattr(wrapper, "lm_head")
