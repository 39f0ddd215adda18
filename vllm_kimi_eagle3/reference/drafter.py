# SPDX-License-Identifier: Apache-2.0
"""The drafter: EAGLE-3's one (or few) decoder layers over [embedding, features], with either kind of attention.

Sources: EAGLE-3 (arXiv:2503.01840) and what vLLM 0.32 makes of it in llama_eagle3.py (GQA), deepseek_eagle3.py (MLA)
and llm_base_proposer.py. Row i of a drafter's input holds the target's features of token i and the embedding of token
i + 1, at position i; its output predicts token i + 2. It knows nothing about which boundaries the features are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kimi_eagle3.reference.checkpoint import load_checkpoint
from vllm_kimi_eagle3.reference.ops import GQA, MLA, Cache, Media, Weights, placed, rms_norm, swiglu
from vllm_kimi_eagle3.reference.target import Borrowed, Target


@dataclass(frozen=True)
class Proposal:
    """k drafts and how they came about.

    Attributes:
        token_ids: k ids in the target's vocabulary.
        entering: (k, H_draft), the hidden state that entered the pass which drafted each; the first is fc's output.
        logits: (k, V_draft).
    """

    token_ids: list[int]
    entering: Tensor
    logits: Tensor


class Drafter:
    """An EAGLE-3 drafter; MLA if its checkpoint has a ``kv_b_proj``, else GQA.

    Args:
        config: its config.json.
        weights: names as SpecForge writes them, ``midlayer.`` spelt ``layers.0.``; ``embed_tokens.weight`` and
            ``lm_head.weight`` must be there.

    Raises:
        ValueError: a switch that vLLM 0.32 does not read for this kind, or a shape that contradicts the config.
    """

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        eagle: Mapping[str, Any] = config.get("eagle_config") or {}
        self.config = dict(config)
        self.weights = weights
        self.num_layers = int(config.get("num_hidden_layers", 1))
        self.eps = float(config["rms_norm_eps"])
        self.is_mla = "layers.0.self_attn.kv_b_proj.weight" in weights
        self.attention = MLA(config) if self.is_mla else GQA(config)
        self.use_aux_hidden_state = bool(eagle.get("use_aux_hidden_state", True))
        self.norm_before_residual = bool(config.get("norm_before_residual", False))
        self.norm_before_fc = bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False)))
        self.fc_norm = bool(config.get("fc_norm", False))
        self.norm_output = bool(config.get("norm_output", False))
        if self.is_mla and (self.norm_before_fc or not self.use_aux_hidden_state):
            raise ValueError("vLLM's MLA drafter has neither norm_before_fc nor use_aux_hidden_state=false")
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError("sliding window drafters are not modelled by the reference")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config has hidden_act={config['hidden_act']!r}; the reference models 'silu' only")
        vocab = int(config.get("draft_vocab_size") or config["vocab_size"])
        head = weights["lm_head.weight"]
        if head.shape[0] < vocab:
            raise ValueError(f"lm_head has {head.shape[0]} rows, draft_vocab_size is {vocab}")
        # Without d2t vLLM leaves its offsets at zero: draft id i is target id i.
        offsets = weights.get("d2t", torch.zeros(vocab, dtype=torch.long, device=head.device))
        self.draft_to_target = torch.arange(vocab, device=head.device) + offsets

    @classmethod
    def load(
        cls, folder: str | Path, target: Target | Borrowed | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Drafter:
        """Read a drafter; embeddings and lm_head that its checkpoint lacks are borrowed from ``target``.

        Raises:
            ValueError: they are lacking and there is no target, or the target's are of another width.
        """
        checkpoint = load_checkpoint(folder, dtype=dtype)
        weights = dict(checkpoint.weights)
        for name, source in (("embed_tokens.weight", "embed_weight"), ("lm_head.weight", "lm_head_weight")):
            if name in weights:
                continue
            if target is None:
                raise ValueError(f"{checkpoint.folder}: no {name}; give the target to borrow it from")
            borrowed: Tensor = getattr(target, source)
            if borrowed.shape[1] != checkpoint.config["hidden_size"]:
                raise ValueError(f"{checkpoint.folder}: no {name}, and the target's has width {borrowed.shape[1]}")
            weights[name] = borrowed
        return cls(checkpoint.config, weights)

    def start(self) -> DrafterSession:
        """A new sequence with an empty KV cache."""
        return DrafterSession(self)

    def combine_hidden_states(self, rows: Tensor) -> Tensor:
        """Features to the drafter's width: (T, n * H_target) -> (T, H_draft).

        Raises:
            ValueError: the rows are not as wide as fc's input.
        """
        if not self.use_aux_hidden_state:
            return rows
        width = self.weights["fc.weight"].shape[1]
        if rows.shape[-1] != width:
            raise ValueError(f"fc takes {width} features, got {rows.shape[-1]}: wrong number of boundaries?")
        if self.norm_before_fc:
            rows = rms_norm(self.weights, "input_norm", rows, self.eps)
        if self.fc_norm:
            count = sum(name.startswith("fc_norm.") for name in self.weights)
            chunks = rows.chunk(count, dim=-1)
            rows = torch.cat([rms_norm(self.weights, f"fc_norm.{i}", c, self.eps) for i, c in enumerate(chunks)], -1)
        return F.linear(rows, self.weights["fc.weight"])

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], hidden: Tensor, cache: Cache, media: Media | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run T rows that follow those in ``cache``.

        Args:
            token_ids: T ids; row i's is the token *after* the one whose features it holds.
            hidden: (T, H_draft), fc's output, or what this function returned as carried state.
            cache: extended by T rows; its length before is the first row's position.
            media: rows that stand in for the embeddings of some of ``token_ids``.

        Returns:
            (T, H_draft) for the lm_head, and (T, H_draft) carried into the next pass: the stream before the final norm,
            or after it with ``norm_output``.
        """
        w, start = self.weights, cache.length
        embeds = placed(self.embed(token_ids), media)
        stream = hidden
        for i in range(self.num_layers):
            name = f"layers.{i}"
            if i == 0:
                x = rms_norm(w, f"{name}.hidden_norm", stream, self.eps)
                stream = x if self.norm_before_residual else stream
                x = torch.cat((rms_norm(w, f"{name}.input_layernorm", embeds, self.eps), x), dim=-1)
            else:
                x = rms_norm(w, f"{name}.input_layernorm", stream, self.eps)
            stream = stream + self.attention(w, f"{name}.self_attn", x, cache, i, start)
            x = rms_norm(w, f"{name}.post_attention_layernorm", stream, self.eps)
            stream = stream + swiglu(w, f"{name}.mlp", x)
        normed = rms_norm(w, "norm", stream, self.eps)
        return normed, normed if self.norm_output else stream

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """The tokens' embeddings, (T, H_draft)."""
        table = self.weights["embed_tokens.weight"]
        return F.embedding(torch.tensor(token_ids, device=table.device), table)

    def logits(self, normed: Tensor) -> Tensor:
        """(T, H_draft) -> (T, V_draft), in the draft vocabulary."""
        head = self.weights["lm_head.weight"][: len(self.draft_to_target)]
        return F.linear(normed, head) * float(self.config.get("logit_scale", 1.0))


class DrafterSession:
    """One sequence's drafting: the KV cache of confirmed rows, extended at each proposal."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.cache = Cache()

    @torch.inference_mode()
    def propose(
        self, rows: Tensor, token_ids: Sequence[int], first_position: int, k: int, media: Media | None = None
    ) -> Proposal:
        """Take in the newly confirmed rows and draft k tokens.

        The drafts' own rows are dropped from the cache afterwards: the engine leaves them in place and overwrites them
        at the next proposal, which comes to the same.

        Args:
            rows: (T, n * H_target), features of the confirmed tokens that the drafter has not seen yet.
            token_ids: T ids, each the token after its row's; the last one is the newest sampled.
            first_position: position of the first row.
            k: how many tokens to draft.
            media: rows that stand in for the embeddings of some of ``token_ids``; not of the drafts.

        Raises:
            ValueError: the rows do not follow those seen before.
        """
        if first_position != self.cache.length:
            raise ValueError(f"rows start at position {first_position}, the drafter has seen {self.cache.length}")
        d = self.drafter
        hidden = d.combine_hidden_states(rows)
        confirmed = self.cache.length + len(token_ids)
        ids, drafts, entering, logits = list(token_ids), list[int](), list[Tensor](), list[Tensor]()
        for _ in range(k):
            normed, carried = d.forward(ids, hidden, self.cache, media)
            media = None
            entering.append(hidden[-1])
            logits.append(d.logits(normed[-1]))
            ids = [int(d.draft_to_target[logits[-1].argmax()])]
            drafts += ids
            hidden = carried[-1:]
        self.cache.truncate(confirmed)
        return Proposal(drafts, torch.stack(entering), torch.stack(logits))
