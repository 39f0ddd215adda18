# SPDX-License-Identifier: Apache-2.0
"""The target: a DeepSeek-V3 forward pass (MLA and mixture of experts) that shows every boundary.

Sources: the DeepSeek-V3 report (arXiv:2412.19437) and Transformers' modeling_deepseek_v3.py, with which the tests
compare it on every boundary. Kimi-K2 and the language model of Kimi-K2.5 are this architecture. V2's softmax routing,
V3.2's sparse attention and MTP layers are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kimi_eagle3.reference.checkpoint import LazyWeights, load_checkpoint, load_tensor
from vllm_kimi_eagle3.reference.ops import MLA, Cache, Media, Weights, placed, rms_norm, swiglu


@dataclass(frozen=True)
class TargetOutput:
    """What one forward pass over T tokens shows.

    Attributes:
        boundaries: (L + 1, T, H), the residual stream entering layer k, and after the last layer at k = L.
        normed: (T, H), boundary L after the final norm.
        logits: (T, V).
    """

    boundaries: Tensor
    normed: Tensor
    logits: Tensor


class Borrowed:
    """What a drafter borrows of a target, and nothing else of it: for targets too large, or quantised, to be run here.

    Args:
        folder: the target's; the matrices have to be stored as they are, which quantised checkpoints do.
        tied: whether the target's lm_head is its embedding.
    """

    def __init__(self, folder: str | Path, *, tied: bool = False) -> None:
        self.folder, self.tied = folder, tied

    @property
    def embed_weight(self) -> Tensor:
        """(V, H); raises ValueError when no file stores it."""
        return load_tensor(self.folder, "model.embed_tokens.weight")

    @property
    def lm_head_weight(self) -> Tensor:
        """(V, H); raises ValueError when no file stores it."""
        return self.embed_weight if self.tied else load_tensor(self.folder, "lm_head.weight")


class Target:
    """A DeepSeek-V3 language model.

    Args:
        config: its config.json (for Kimi-K2.5 the ``text_config``).
        weights: tensors by their names in a DeepSeek-V3 checkpoint.
        lora_norm_eps: see ``MLA``; the default is what vLLM does.
        cache_dtype: see ``Cache``.
        latent_cache: see ``MLA``.

    Raises:
        ValueError: the config asks for routing or activations other than DeepSeek-V3's.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Weights,
        *,
        lora_norm_eps: float | None = None,
        cache_dtype: torch.dtype | None = None,
        latent_cache: bool = True,
    ) -> None:
        for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("hidden_act", "silu")):
            if config.get(key, known) != known:
                raise ValueError(f"config has {key}={config[key]!r}; the reference models {known!r} only")
        self.config = dict(config)
        self.weights = weights
        self.cache_dtype = cache_dtype
        self.num_layers = int(config["num_hidden_layers"])
        self.vocab_size = int(config["vocab_size"])
        self.eps = float(config["rms_norm_eps"])
        self.attention = MLA(config, lora_norm_eps, latent_cache=latent_cache)
        self.tied = bool(config.get("tie_word_embeddings"))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        lazy: bool = False,
        cache_dtype: torch.dtype | None = None,
        latent_cache: bool = True,
    ) -> Target:
        """Read a target from a checkpoint folder; see above and ``load_checkpoint`` for the arguments and errors."""
        checkpoint = load_checkpoint(folder, dtype=dtype, lazy=lazy)
        return cls(checkpoint.config, checkpoint.weights, cache_dtype=cache_dtype, latent_cache=latent_cache)

    @property
    def embed_weight(self) -> Tensor:
        """(V, H), what a drafter without embeddings borrows."""
        return self.weights["model.embed_tokens.weight"]

    @property
    def lm_head_weight(self) -> Tensor:
        """(V, H), what a drafter without an lm_head borrows."""
        return self.embed_weight if self.tied else self.weights["lm_head.weight"]

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], cache: Cache | None = None, media: Media | None = None) -> TargetOutput:
        """Run T tokens that follow those already in ``cache`` (none: a new sequence), and extend the cache.

        ``media`` are the rows of pictures that stand in for the embeddings of some of the T tokens.
        """
        cache = Cache(self.cache_dtype) if cache is None else cache
        start = cache.length
        stream = placed(self.embed(token_ids), media)
        boundaries = [stream]
        for i in range(self.num_layers):
            stream = self._layer(i, stream, cache, start)
            boundaries.append(stream)
        normed = rms_norm(self.weights, "model.norm", stream, self.eps)
        return TargetOutput(torch.stack(boundaries), normed, F.linear(normed, self.lm_head_weight))

    @torch.inference_mode()
    def features(self, token_ids: Sequence[int], boundaries: Sequence[int], media: Media | None = None) -> Tensor:
        """A whole sequence's drafter features, (T, n * H): the boundaries side by side.

        As ``forward`` has them, but it stops at the last boundary asked for, holds no other, and forgets each layer's
        keys: with lazily read weights one layer is in memory at a time.

        Raises:
            ValueError: the boundaries are not strictly increasing, or not in 0..L.
        """
        wanted = list(boundaries)
        if not wanted or wanted != sorted(set(wanted)) or wanted[0] < 0 or wanted[-1] > self.num_layers:
            raise ValueError(f"boundaries {wanted}: need strictly increasing numbers in 0..{self.num_layers}")
        stream = placed(self.embed(token_ids), media)
        kept = [stream] if wanted[0] == 0 else []
        for i in range(wanted[-1]):
            stream = self._layer(i, stream, Cache(self.cache_dtype), 0)
            if i + 1 in wanted:
                kept.append(stream)
        return torch.cat(kept, dim=-1)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """The tokens' own embeddings, (T, H)."""
        if isinstance(self.weights, LazyWeights):
            return self.weights.rows("model.embed_tokens.weight", token_ids)
        return F.embedding(torch.tensor(token_ids, device=self.embed_weight.device), self.embed_weight)

    def _layer(self, i: int, stream: Tensor, cache: Cache, start: int) -> Tensor:
        w, name = self.weights, f"model.layers.{i}"
        x = rms_norm(w, f"{name}.input_layernorm", stream, self.eps)
        stream = stream + self.attention(w, f"{name}.self_attn", x, cache, i, start)
        x = rms_norm(w, f"{name}.post_attention_layernorm", stream, self.eps)
        sparse = i >= self.config.get("first_k_dense_replace", 0) and i % self.config.get("moe_layer_freq", 1) == 0
        return stream + (self._experts(f"{name}.mlp", x) if sparse else swiglu(w, f"{name}.mlp", x))

    def _experts(self, name: str, x: Tensor) -> Tensor:
        weight, chosen = self._route(name, x)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, slot = torch.where(chosen == expert)
            y = swiglu(self.weights, f"{name}.experts.{expert}", x[token])
            out.index_add_(0, token, (y * weight[token, slot, None]).to(x.dtype))
        return out + swiglu(self.weights, f"{name}.shared_experts", x) if self.config.get("n_shared_experts") else out

    def _route(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, top_k) weights and expert ids. The bias helps to choose experts and has no part in their weights."""
        c = self.config
        scores = F.linear(x.float(), self.weights[f"{name}.gate.weight"].float()).sigmoid()
        choice = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        groups = choice.unflatten(-1, (c.get("n_group") or 1, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(c.get("topk_group") or 1, dim=-1).indices
        closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        choice = groups.masked_fill(closed[..., None], float("-inf")).flatten(1)
        chosen = choice.topk(c["num_experts_per_tok"], dim=-1).indices
        weight = scores.gather(1, chosen)
        if c.get("norm_topk_prob", True):
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return weight * float(c.get("routed_scaling_factor", 1.0)), chosen
