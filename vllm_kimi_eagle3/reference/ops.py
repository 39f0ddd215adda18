# SPDX-License-Identifier: Apache-2.0
"""The pieces that targets and drafters share: RMSNorm, rope, attention (GQA and MLA), SwiGLU, the KV cache.

One sequence at a time, no batch dimension: activations are (T, width), heads (T, heads, dim). Weights are looked up by
name in a mapping, so a forward pass reads like the checkpoint. Norms, softmax and rope angles are computed in float32
and rounded back to the activations' dtype, as the engines do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Media = Mapping[int, Tensor]
"""Rows that stand in for the embeddings of some tokens, by index in the tokens of one forward pass."""


def shifted(media: Media, by: int) -> Media:
    """The same rows for tokens that start ``by`` later; those before the start are gone."""
    return {place - by: row for place, row in media.items() if place >= by}


def placed(embeds: Tensor, media: Media | None) -> Tensor:
    """The embeddings, (T, H), with the media's rows in their places; places beyond T belong to a later pass."""
    here = {place: row for place, row in (media or {}).items() if place < embeds.shape[0]}
    if not here:
        return embeds
    return embeds.index_copy(
        0, torch.tensor(list(here), device=embeds.device), torch.stack(list(here.values())).to(embeds.dtype)
    )


class Cache:
    """Whatever each layer's attention keeps, as tensors whose first dimension is the position.

    Args:
        dtype: what it is stored in; None for the activations' own.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    @property
    def length(self) -> int:
        """Positions held; equal in all layers between two forward passes."""
        return next(iter(self._layers.values()))[0].shape[0] if self._layers else 0

    def extend(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append T rows to each of a layer's tensors and return the whole tensors."""
        old = self._layers.get(layer)
        if self.dtype is not None:
            most = torch.finfo(self.dtype).max  # beyond it fp8 has NaN or infinity, where the engines take the largest
            new = tuple(t.clamp(-most, most).to(self.dtype).to(t.dtype) for t in new)
        whole = new if old is None else tuple(torch.cat(pair) for pair in zip(old, new, strict=True))
        self._layers[layer] = whole
        return whole

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on, as when drafts are rejected."""
        self._layers = {layer: tuple(t[:length] for t in held) for layer, held in self._layers.items()}


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    """``x @ weight.T``, plus the bias if the checkpoint has one."""
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def rms_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, rounded to x's dtype before the weight is applied."""
    wide = x.float()
    return w[f"{name}.weight"] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def swiglu(w: Weights, name: str, x: Tensor) -> Tensor:
    """The gated MLP: down(silu(gate(x)) * up(x))."""
    return linear(w, f"{name}.down_proj", F.silu(linear(w, f"{name}.gate_proj", x)) * linear(w, f"{name}.up_proj", x))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last T positions over all S.

    Args:
        q: (T, heads, d).
        k: (S, heads, d), S >= T.
        v: (S, heads, dv).
        scale: multiplies the scores.

    Returns:
        (T, heads * dv).
    """
    queries, keys = q.shape[0], k.shape[0]
    scores = torch.einsum("thd,shd->hts", q, k).float() * scale
    future = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
    probs = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("hts,shd->thd", probs, v).flatten(1)


class Rope:
    """Rotary position embedding for one head width.

    Reads ``rope_parameters`` (Transformers 5) or ``rope_scaling`` with ``rope_theta`` (before). DeepSeek pairs
    neighbouring dimensions ("interleaved", GPT-J), Llama pairs the two halves (NeoX). Rotated values stay
    in place, as in vLLM; whether they are moved, no dot product can tell.

    Args:
        config: the model's config.
        dim: width of the rotated part of a head.
        mla: DeepSeek's conventions: interleaved, and its own yarn magnitudes.

    Raises:
        ValueError: a scaling rule that is not modelled here.
    """

    def __init__(self, config: Mapping[str, Any], dim: int, *, mla: bool) -> None:
        given: dict[str, Any] = {**(config.get("rope_parameters") or config.get("rope_scaling") or {})}
        kind = given.get("rope_type", given.get("type", "default"))
        theta = float(given.get("rope_theta", config.get("rope_theta", 10000.0)))
        factor = float(given.get("factor") or 1.0)
        self.interleaved = mla
        self.magnitude = 1.0
        self.softmax_factor = 1.0  # what the attention scale is multiplied by
        if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
            raise ValueError("partial_rotary_factor is not modelled by the reference")
        freq = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if kind == "linear" and not mla:
            freq = freq / factor
        elif kind == "llama3" and not mla:
            low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
            turns = given["original_max_position_embeddings"] * freq / (2 * math.pi)
            keep = ((turns - low) / (high - low)).clamp(0, 1)
            freq = freq / factor * (1 - keep) + freq * keep
        elif kind in ("yarn", "deepseek_yarn"):
            freq = self._yarn(given, freq, theta, dim, factor)
            if mla:
                # vLLM: deepseek_scaling_rope.py and DeepseekV2MLAAttention
                all_dim = float(given.get("mscale_all_dim") or 0)
                self.magnitude = _mscale(factor, given.get("mscale", 1)) / _mscale(factor, all_dim)
                self.softmax_factor = _mscale(factor, all_dim) ** 2
            elif given.get("attention_factor") is not None:
                self.magnitude = float(given["attention_factor"])
            elif given.get("mscale") and given.get("mscale_all_dim"):
                self.magnitude = _mscale(factor, given["mscale"]) / _mscale(factor, given["mscale_all_dim"])
            else:
                self.magnitude = _mscale(factor, 1)
        elif kind != "default":
            raise ValueError(f"rope type {kind!r} is not modelled by the reference")
        self._freq = freq

    @staticmethod
    def _yarn(given: dict[str, Any], freq: Tensor, theta: float, dim: int, factor: float) -> Tensor:
        """Interpolate slow dimensions by ``factor``, leave fast ones, and ramp between (arXiv:2309.00071)."""

        def dimension(turns: float) -> float:
            return (
                dim
                * math.log(given["original_max_position_embeddings"] / (turns * 2 * math.pi))
                / (2 * math.log(theta))
            )

        low, high = dimension(given.get("beta_fast") or 32), dimension(given.get("beta_slow") or 1)
        if given.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = high + 0.001 if low == high else high
        interpolate = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return freq / factor * interpolate + freq * (1 - interpolate)

    def __call__(self, x: Tensor, start: int) -> Tensor:
        """Rotate (T, heads, dim) for positions start..start+T-1."""
        angles = torch.outer(torch.arange(start, start + x.shape[0], dtype=torch.float32), self._freq).to(x.device)
        cos = (angles.cos() * self.magnitude).to(x.dtype)[:, None]
        sin = (angles.sin() * self.magnitude).to(x.dtype)[:, None]
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * float(mscale) * math.log(factor) + 1.0


class GQA:
    """Llama's grouped-query attention; the input may be wider than the output (an EAGLE-3 first layer's is 2H)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        heads = int(config["num_attention_heads"])
        self.kv_heads = int(config.get("num_key_value_heads") or heads)
        self.dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        self.groups = heads // self.kv_heads
        self.rope = Rope(config, self.dim, mla=False)

    def __call__(self, w: Weights, name: str, x: Tensor, cache: Cache, layer: int, start: int) -> Tensor:
        """(T, width) -> (T, H); keeps rotated keys and values."""
        q = self.rope(linear(w, f"{name}.q_proj", x).unflatten(-1, (-1, self.dim)), start)
        k = self.rope(linear(w, f"{name}.k_proj", x).unflatten(-1, (-1, self.dim)), start)
        v = linear(w, f"{name}.v_proj", x).unflatten(-1, (-1, self.dim))
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in cache.extend(layer, k, v))
        return linear(w, f"{name}.o_proj", attend(q, k, v, self.dim**-0.5))


class MLA:
    """DeepSeek's multi-head latent attention (arXiv:2405.04434), uncompressed form.

    Args:
        config: the model's config.
        lora_norm_eps: epsilon of the norms on the two latents. vLLM uses rms_norm_eps; DeepSeek's own code and
            Transformers always use 1e-6, which differs where rms_norm_eps is another number.
        latent_cache: keep the latents, as MLA's backends do; else every head's keys and values, as vLLM does without
            MLA. It is the same but for what a cache in another dtype rounds.
    """

    def __init__(
        self, config: Mapping[str, Any], lora_norm_eps: float | None = None, *, latent_cache: bool = True
    ) -> None:
        self.latent_cache = latent_cache
        self.nope = int(config["qk_nope_head_dim"])
        self.rope_dim = int(config["qk_rope_head_dim"])
        self.rank = int(config["kv_lora_rank"])
        self.v_dim = int(config["v_head_dim"])
        self.eps = float(config["rms_norm_eps"]) if lora_norm_eps is None else lora_norm_eps
        self.rope = Rope(config, self.rope_dim, mla=True)
        self.scale = (self.nope + self.rope_dim) ** -0.5 * self.rope.softmax_factor

    def __call__(self, w: Weights, name: str, x: Tensor, cache: Cache, layer: int, start: int) -> Tensor:
        """(T, width) -> (T, H); keeps the normed latent and the one rotated key that all heads share, or their own."""
        if f"{name}.q_a_proj.weight" in w:
            q = rms_norm(w, f"{name}.q_a_layernorm", linear(w, f"{name}.q_a_proj", x), self.eps)
            q = linear(w, f"{name}.q_b_proj", q)
        else:
            q = linear(w, f"{name}.q_proj", x)
        q = q.unflatten(-1, (-1, self.nope + self.rope_dim))
        q = torch.cat((q[..., : self.nope], self.rope(q[..., self.nope :], start)), dim=-1)

        latent, k_rope = linear(w, f"{name}.kv_a_proj_with_mqa", x).split((self.rank, self.rope_dim), dim=-1)
        latent = rms_norm(w, f"{name}.kv_a_layernorm", latent, self.eps)
        k_rope = self.rope(k_rope[:, None], start)
        if self.latent_cache:
            latent, k_rope = cache.extend(layer, latent, k_rope)
        kv = linear(w, f"{name}.kv_b_proj", latent).unflatten(-1, (-1, self.nope + self.v_dim))
        k_nope, v = kv.split((self.nope, self.v_dim), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1)), dim=-1)
        if not self.latent_cache:
            k, v = cache.extend(layer, k, v)
        return linear(w, f"{name}.o_proj", attend(q, k, v, self.scale))
